"""The stress battery as cases for the probe: its passes, and the engine's state for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.battery import Pass, battery_inputs
from harness.probe import Case, Event
from harness.taps import DECODE, PREFILL, TAPS
from port import main as engine_main
from port.main import Engine
from reference import ops
from reference.checkpoint import Checkpoint
from reference.config import EMBED

REFERENCE: dict[str, Callable[..., Tensor]] = {
    "embed": ops.embed,
    **dict.fromkeys(("attn_norm", "mlp_norm", "final_norm"), ops.rms_norm),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ops.linear),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "logits"), ops.linear),
    **dict.fromkeys(("q_rope", "k_rope"), ops.rope),
    **dict.fromkeys(("attn_residual", "mlp_residual"), ops.residual),
    "kv_write": ops.kv_write,
    "scores": ops.scores,
    "mask": ops.mask,
    "softmax": ops.softmax,
    "attn_v": ops.attn_v,
    "attention": ops.attention,
    "swiglu": ops.swiglu,
    "argmax": ops.argmax,
}


def reference_result(op: str, inputs: Mapping[str, Any]) -> Tensor:
    """The real result of an op for recorded inputs (weights included)."""
    if op == "embed":
        # The recorded weight is the rows of these tokens, not the table.
        return ops.embed(torch.arange(len(inputs["tokens"])), inputs["weight"])
    return REFERENCE[op](**inputs)


class BatteryPass:
    """One pass of the battery over one layer: its cases, and how to run the engine for them."""

    def __init__(
        self, each: Pass, layer: int, weights: Mapping[str, Mapping[str, Tensor]], model: Checkpoint
    ) -> None:
        """weights: op -> what the model supplies to it ("weight", "inv_freq")."""
        self._pass = each
        self._before = np.full(
            (engine_main.MAX_SEQUENCES, engine_main.N_LAYERS, engine_main.MAX_BLOCKS_PER_SEQ),
            -1,
            np.int32,
        )
        free = list(range(engine_main.NUM_BLOCKS))
        if each.phase == DECODE:
            _hand_out_past(self._before, free, each.positions, model.layers)
        self._free = list(free)
        table = self._before.copy()
        _hand_out_now(table, free, each, model.layers)
        slots = each.active if each.phase == DECODE else (0,)
        tokens = (0,) * len(each.row_positions)
        self.event = event = Event(
            each.phase, 0, slots, each.row_positions, tokens, table, tuple(range(len(slots)))
        )
        self.cases = []
        for op in each.ops:
            supplied = dict(weights.get(op, {}))
            inputs = battery_inputs(each, op, supplied)
            if op == "embed":
                inputs["weight"] = model.rows(EMBED, inputs["tokens"])
            outside = op in ("embed", "final_norm", "logits", "argmax")
            self.cases.append(
                Case(
                    event,
                    TAPS[each.phase][op],
                    None if outside else layer,
                    each.name,
                    inputs,
                    reference_result(op, inputs),
                )
            )

    def tokens(self) -> list[int]:
        """The embedding rows that the pass reads."""
        return [int(t) for case in self.cases for t in case.inputs.get("tokens", ())]

    def run(self, engine: Engine) -> None:
        """One prefill of a prompt of as many tokens, or one decode step at these positions."""
        if self._pass.phase == PREFILL:
            engine.reset([[0] * len(self._pass.row_positions)])
            engine_main.prefill(engine, 0)
            return
        engine.reset([])
        engine.block_table = self._before.copy()
        engine.free_blocks = list(self._free)
        for slot, position in enumerate(self._pass.positions):
            if position is not None:
                engine.is_slot_free[slot] = False
                engine.current_prompt_len[slot] = position
        engine_main.decode_step(engine)


def _hand_out_past(
    table: np.ndarray, free: list[int], positions: tuple[int | None, ...], layers: int
) -> None:
    """Blocks for all positions before each slot's own."""
    for slot, position in enumerate(positions):
        if position is None:
            continue
        for layer in range(layers):
            for logical in range(-(-position // engine_main.BLOCK_SIZE)):
                table[slot, layer, logical] = free.pop()


def _hand_out_now(table: np.ndarray, free: list[int], each: Pass, layers: int) -> None:
    """The blocks that this pass takes itself, in the engine's order: layer by layer."""
    size = engine_main.BLOCK_SIZE
    for layer in range(layers):
        if each.phase == PREFILL:
            for logical in range(-(-len(each.row_positions) // size)):
                table[0, layer, logical] = free.pop()
        else:
            for slot, position in zip(each.active, each.row_positions, strict=True):
                if position % size == 0:
                    table[slot, layer, position // size] = free.pop()
