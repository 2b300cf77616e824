"""Faults of the control flow, as public reports and bug-fix commits tell them.

To add one: an entry with the edits of a function of port/main.py, the run that shows it, and the
tap that must be blamed.
"""

from __future__ import annotations

from dataclasses import dataclass

from plant import Edit


@dataclass(frozen=True)
class ControlFault:
    """function: of port/main.py. prompts: lengths. decode_ids: one list a slot. blamed: (phase, op)
    pairs that must be culprits; `also` may be culprits, nothing else."""

    name: str
    function: str
    edits: tuple[Edit, ...]
    blamed: frozenset[tuple[str, str]]
    also: frozenset[tuple[str, str]] = frozenset()
    prompts: tuple[int, ...] = (5, 3)
    decode_ids: tuple[tuple[int, ...], ...] | None = None
    steps: int = 1
    layer: int = 0


def _at(phase: str, *ops: str) -> frozenset[tuple[str, str]]:
    return frozenset((phase, op) for op in ops)


_ROPE = "                position = e.current_prompt_len[slot]\n                call.rope_decode("
_SCATTER = "                position = e.current_prompt_len[slot]\n                logical_block"
_LENGTHS = "seq_lens = [e.current_prompt_len[slot] + 1 for slot in active_slots]"
_EOT = 128009
_END_TEST = "token in (END_OF_TEXT_TOKEN_ID, EOT_ID_TOKEN_ID)"
_POP = "e.block_table[slot, layer, logical_block] = e.free_blocks.pop()"
_UPLOAD = (
    "        # 876: the WHOLE block table to the device, in every layer.\n"
    "        e.upload_block_table()\n"
)
_AFTER_ATTENTION = "        # 881-900: output projection.\n"

_ROPE_PLUS_1 = Edit(_ROPE, _ROPE.replace("[slot]\n", "[slot] + 1\n"))
_SCATTER_PLUS_1 = Edit(_SCATTER, _SCATTER.replace("[slot]\n", "[slot] + 1\n"))
_LENGTH_PLUS_1 = Edit(_LENGTHS, _LENGTHS.replace("+ 1", "+ 2"))
# A run in which slot 0 ends after its first step.
_ENDS = ((271, _EOT, 271, 271), (271, 271, 271, 271))

CONTROL_FAULTS = (
    ControlFault(
        "H10 position one too far, everywhere",
        "decode_step",
        (_ROPE_PLUS_1, _SCATTER_PLUS_1, _LENGTH_PLUS_1),
        _at("decode", "q_rope", "k_rope", "kv_write", "schedule"),
    ),
    ControlFault(
        "H10 position one too far, RoPE alone",
        "decode_step",
        (_ROPE_PLUS_1,),
        _at("decode", "q_rope", "k_rope"),
    ),
    ControlFault(
        "H10 position one too far, scatter alone",
        "decode_step",
        (_SCATTER_PLUS_1,),
        _at("decode", "kv_write"),
    ),
    ControlFault(
        "H10 length one too far",
        "decode_step",
        (_LENGTH_PLUS_1,),
        _at("decode", "schedule"),
    ),
    ControlFault(
        "H15 block table not refreshed in decode",
        "decode_step",
        (Edit(_UPLOAD, ""),),
        _at("decode", "block_table"),
        prompts=(16, 3),
    ),
    ControlFault(
        "H15 block table refreshed after attention",
        "decode_step",
        (Edit(_UPLOAD, ""), Edit(_AFTER_ATTENTION, _UPLOAD + _AFTER_ATTENTION)),
        _at("decode", "block_table"),
        prompts=(16, 3),
    ),
    ControlFault(
        "H18 blocks neither freed nor reset",
        "free_slot",
        (Edit("if physical_block != -1:", "if False:"),),
        _at("decode", "block_table"),
        also=_at("prefill", "schedule", "block_table") | _at("decode", "schedule"),
        prompts=(5, 3, 4),
        decode_ids=_ENDS,
        steps=3,
    ),
    ControlFault(
        "H18 blocks freed, entries left",
        "free_slot",
        (Edit("e.block_table[slot, layer, logical_block] = -1", "pass"),),
        _at("decode", "block_table"),
        also=_at("prefill", "schedule", "block_table") | _at("decode", "schedule"),
        prompts=(5, 3, 4),
        decode_ids=_ENDS,
        steps=3,
    ),
    ControlFault(
        "H18 entries reset, blocks leaked",
        "free_slot",
        (Edit("e.free_blocks.append(physical_block)", "pass"),),
        _at("decode", "block_table"),
        also=_at("prefill", "block_table"),
        prompts=(5, 3, 4),
        decode_ids=_ENDS,
        steps=3,
    ),
    ControlFault(
        "P12 first step advances by the prompt's length",
        "decode_step",
        (
            Edit(
                "e.current_prompt_len[slot] += 1",
                "e.current_prompt_len[slot] += "
                "e.current_prompt_len[slot] if len(e.generated_tokens[slot]) == 2 else 1",
            ),
        ),
        _at("decode", "schedule"),
        also=_at("decode", "block_table", "q_rope", "k_rope", "kv_write"),
        prompts=(2, 2),
        steps=2,
    ),
    ControlFault(
        "P14 one position for all rows",
        "decode_step",
        (Edit(_ROPE, _ROPE.replace("[slot]", "[active_slots[0]]")),),
        _at("decode", "q_rope", "k_rope"),
        prompts=(2, 3),
    ),
    ControlFault(
        "P54 last block reused at a boundary",
        "decode_step",
        (
            Edit(
                _POP,
                "e.block_table[slot, layer, logical_block] = "
                "e.block_table[slot, layer, logical_block - 1]",
            ),
        ),
        _at("decode", "block_table"),
        also=_at("decode", "kv_write"),
        prompts=(16, 3),
    ),
    ControlFault(
        "P57 prefill stores one token of a span",
        "prefill",
        (Edit("num_tokens_to_copy = min(BLOCK_SIZE, n - token)", "num_tokens_to_copy = 1"),),
        _at("prefill", "kv_write"),
    ),
    ControlFault(
        "P68 prefill's token not kept",
        "prefill",
        (Edit("    e.generated_tokens[slot].append(token)\n", ""),),
        _at("prefill", "schedule"),
        also=_at("decode", "schedule"),
    ),
    ControlFault(
        "P73 end of turn not tested",
        "decode_step",
        (Edit(_END_TEST, "token == END_OF_TEXT_TOKEN_ID"),),
        _at("decode", "schedule"),
        also=_at("decode", "block_table"),
        decode_ids=_ENDS,
        steps=2,
    ),
    ControlFault(
        "P74 slot not released at a stop",
        "free_slot",
        (Edit("    e.is_slot_free[slot] = True\n", ""),),
        _at("decode", "schedule"),
        also=_at("decode", "block_table"),
        decode_ids=_ENDS,
        steps=2,
    ),
)
