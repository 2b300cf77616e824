"""The taps: where each op of the engine reads and writes, and upstream's lines for it.

Each names the canonical buffers of the engine (an attribute of `port.main.Engine`), not the
pointers that a call was given: an op that wrote elsewhere is found. To add a tap: an entry here in
execution order, its reference op and its bound under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PREFILL = "prefill"
DECODE = "decode"
LAYERLESS = ("embed", "final_norm", "logits", "argmax")
CONTROL = ("schedule", "block_table")


@dataclass(frozen=True)
class Tap:
    """One op of one phase.

    inputs: the reference op's input name -> the engine's buffer that holds it.
    output: the buffer that holds the result. also: buffers written on the way to it.
    """

    phase: str
    op: str
    inputs: Mapping[str, str]
    output: str
    upstream: str
    also: tuple[str, ...] = field(default=())

    @property
    def in_place(self) -> bool:
        return self.output in self.inputs.values()


_ON_THE_WAY = {(PREFILL, "embed"): ("input_embeddings",)}


def _taps(phase: str, *rows: tuple[str, dict[str, str], str, str]) -> dict[str, Tap]:
    return {
        op: Tap(phase, op, inputs, output, lines, _ON_THE_WAY.get((phase, op), ()))
        for op, inputs, output, lines in rows
    }


_HIDDEN, _NORMS, _B1, _B2 = "hidden_state", "rms_norms", "buf_2048_1", "buf_2048_2"
_K, _V, _SCORES = "k_proj_temp_buf", "v_proj_temp_buf", "prefill_attn_scores"
_KB, _VB, _CACHE = "k_proj_batched_buffer", "v_proj_batched_buffer", "kv_cache"

# fmt: off
_PREFILL = _taps(
    PREFILL,
    ("embed", {"tokens": "gpu_input_tokens"}, _HIDDEN, "main.cpp:158-163, kernels.cu:32-53"),
    ("attn_norm", {"x": _HIDDEN}, _NORMS, "main.cpp:166, kernels.cu:55-94"),
    ("q_proj", {"x": _NORMS}, _B1, "main.cpp:177-240"),
    ("k_proj", {"x": _NORMS}, _K, "main.cpp:177-240"),
    ("v_proj", {"x": _NORMS}, _V, "main.cpp:177-240"),
    ("q_rope", {"x": _B1}, _B1, "main.cpp:244-245, kernels.cu:173-222"),
    ("k_rope", {"x": _K}, _K, "main.cpp:244-245, kernels.cu:173-222"),
    ("kv_write", {"k": _K, "v": _V}, _CACHE, "main.cpp:251-288"),
    ("scores", {"q": _B1, "k": _K}, _SCORES, "main.cpp:301-327"),
    ("mask", {"scores": _SCORES}, _SCORES, "main.cpp:329, kernels.cu:224-255"),
    ("softmax", {"scores": _SCORES}, _SCORES, "main.cpp:331, kernels.cu:257-309"),
    ("attn_v", {"probs": _SCORES, "v": _V}, _B1, "main.cpp:343-371"),
    ("o_proj", {"x": _B1}, _B2, "main.cpp:377-396"),
    ("attn_residual", {"x": _HIDDEN, "y": _B2}, _HIDDEN, "main.cpp:399, kernels.cu:311-329"),
    ("mlp_norm", {"x": _HIDDEN}, _NORMS, "main.cpp:401, kernels.cu:55-94"),
    ("gate_proj", {"x": _NORMS}, "gate", "main.cpp:413-453"),
    ("up_proj", {"x": _NORMS}, "up", "main.cpp:413-453"),
    ("swiglu", {"gate": "gate", "up": "up"}, "gate", "main.cpp:459, kernels.cu:331-344"),
    ("down_proj", {"x": "gate"}, _B2, "main.cpp:470-489"),
    ("mlp_residual", {"x": _HIDDEN, "y": _B2}, _HIDDEN, "main.cpp:492, kernels.cu:311-329"),
    ("final_norm", {"x": _HIDDEN}, _NORMS, "main.cpp:494, kernels.cu:55-94"),
    ("logits", {"x": _NORMS}, "embed_proj", "main.cpp:509-529"),
    ("argmax", {"logits": "embed_proj_cpu"}, "token", "main.cpp:533-543"),
)
_DECODE = _taps(
    DECODE,
    ("embed", {"tokens": "gpu_last_tokens"}, _HIDDEN, "main.cpp:759, kernels.cu:347-369"),
    ("attn_norm", {"x": _HIDDEN}, _NORMS, "main.cpp:762, kernels.cu:55-94"),
    ("q_proj", {"x": _NORMS}, _B1, "main.cpp:765-783"),
    ("k_proj", {"x": _NORMS}, _KB, "main.cpp:802-821"),
    ("v_proj", {"x": _NORMS}, _VB, "main.cpp:824-842"),
    ("q_rope", {"x": _B1}, _B1, "main.cpp:844-849, kernels.cu:371-405"),
    ("k_rope", {"x": _KB}, _KB, "main.cpp:844-849, kernels.cu:371-405"),
    ("kv_write", {"k": _KB, "v": _VB}, _CACHE, "main.cpp:851-873"),
    ("attention", {"q": _B1, "keys": _CACHE, "values": _CACHE}, _B1, "main.cpp:878, kernels.cu:461-528"),  # noqa: E501
    ("o_proj", {"x": _B1}, _B2, "main.cpp:881-900"),
    ("attn_residual", {"x": _HIDDEN, "y": _B2}, _HIDDEN, "main.cpp:902, kernels.cu:311-329"),
    ("mlp_norm", {"x": _HIDDEN}, _NORMS, "main.cpp:904, kernels.cu:55-94"),
    ("gate_proj", {"x": _NORMS}, "gate", "main.cpp:907-946"),
    ("up_proj", {"x": _NORMS}, "up", "main.cpp:907-946"),
    ("swiglu", {"gate": "gate", "up": "up"}, "gate", "main.cpp:948, kernels.cu:331-344"),
    ("down_proj", {"x": "gate"}, _B2, "main.cpp:951-969"),
    ("mlp_residual", {"x": _HIDDEN, "y": _B2}, _HIDDEN, "main.cpp:971, kernels.cu:311-329"),
    ("final_norm", {"x": _HIDDEN}, _NORMS, "main.cpp:974, kernels.cu:55-94"),
    ("logits", {"x": _NORMS}, "embed_proj", "main.cpp:976-996"),
    ("argmax", {"logits": "embed_proj_cpu"}, "token", "main.cpp:998-1014"),
)
# fmt: on

TAPS: dict[str, dict[str, Tap]] = {PREFILL: _PREFILL, DECODE: _DECODE}
CONTROL_UPSTREAM = {
    (PREFILL, "schedule"): "main.cpp:695-708",
    (DECODE, "schedule"): "main.cpp:722-757, 998-1037",
    (PREFILL, "block_table"): "main.cpp:251-288, 552",
    (DECODE, "block_table"): "main.cpp:851-876, 1015-1031",
}
EXECUTION_ORDER = {
    phase: {op: index for index, op in enumerate((*taps, *CONTROL))} for phase, taps in TAPS.items()
}
OPS = tuple(dict.fromkeys((*_PREFILL, *_DECODE, *CONTROL)))
