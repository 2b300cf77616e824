"""Operands taken from the wrong place: another tap's result, or an earlier step's.

These need no list: every tap at hand whose shape fits is tried in place of each input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe
from harness.hypotheses.registry import base_recipe, hypothesis, ops

# What has a name of its own: (op, input, tap that it is read from) -> name and phrase.
_NAMED: Final = {
    ("scores", "k", "k_proj"): ("unrotated keys", "keys as they were before RoPE"),
    ("scores", "q", "q_proj"): ("unrotated queries", "queries as they were before RoPE"),
    ("scores", "k", "v_proj"): ("values read as keys", "values where keys belong"),
    ("attn_v", "v", "k_rope"): ("keys read as values", "keys where values belong"),
    ("attn_v", "v", "k_proj"): ("unrotated keys read as values", "unrotated keys for values"),
    ("attn_v", "probs", "scores"): ("scores read as probabilities", "raw scores for weights"),
    ("attn_v", "probs", "mask"): ("masked scores read as probabilities", "scores for weights"),
    ("kv_write", "k", "k_proj"): ("unrotated keys", "keys written before RoPE"),
    ("softmax", "scores", "scores"): ("scores before the mask", "scores read before the mask"),
    ("attention", "q", "q_proj"): ("unrotated queries", "queries as they were before RoPE"),
}
_NOT_OPERANDS: Final = ("weight", "inv_freq", "positions", "tokens", "keys", "values")
_INPUT_TAPS: Final = {  # whose result an op's `x` is, where that is not its name
    "attn_norm": "mlp_residual",
    "q_proj": "attn_norm",
    "k_proj": "attn_norm",
    "v_proj": "attn_norm",
    "q_rope": "q_proj",
    "k_rope": "k_proj",
    "o_proj": "attention",
    "mlp_norm": "attn_residual",
    "gate_proj": "mlp_norm",
    "up_proj": "mlp_norm",
    "down_proj": "swiglu",
    "final_norm": "mlp_residual",
    "logits": "final_norm",
}


def _inputs(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    for name, value in evidence.inputs.items():
        if isinstance(value, Tensor) and name not in _NOT_OPERANDS:
            yield name, value


def _put(evidence: Evidence, name: str, value: Tensor) -> Recipe:
    return base_recipe(replace(evidence, inputs={**evidence.inputs, name: value}))


def _fits(value: Tensor, own: Tensor) -> Tensor | None:
    """The rows of `value` that would be read in place of `own`; None if the widths differ."""
    if value.dim() != own.dim() or value.shape[1:] != own.shape[1:] or len(value) < len(own):
        return None
    return value[: len(own)].to(torch.float64)


_OPS: Final = tuple(op for op in ops() if op not in ("embed", "argmax"))

for (_op, _name, _tap), (_title, _phrase) in _NAMED.items():

    def _named(
        recipe: Recipe, evidence: Evidence, name: str = _name, tap: str = _tap
    ) -> Recipe | None:
        value = evidence.context.taps.get(tap)
        value = None if value is None else _fits(value, evidence.inputs[name])
        return None if value is None else _put(evidence, name, value)

    hypothesis(_title, axis="operand", ops=(_op,), says=_phrase, alone=True)(_named)


@hypothesis("wrong operand", axis="operand", ops=_OPS, alone=True)
def _wrong(recipe: Recipe, evidence: Evidence) -> Iterator[tuple[str, Recipe]]:
    """{}"""
    for name, own in _inputs(evidence):
        for tap, value in evidence.context.taps.items():
            read = _fits(value, own)
            if read is None or (evidence.op, name, tap) in _NAMED or torch.equal(read, own):
                continue
            yield f"the result of {tap} read as {name}", _put(evidence, name, read)


@hypothesis("stale input", axis="operand", ops=_OPS, alone=True)
def _stale(recipe: Recipe, evidence: Evidence) -> Iterator[tuple[str, Recipe]]:
    """{}"""
    for name, own in _inputs(evidence):
        for tap, values in evidence.context.earlier.items():
            steps = [values] if isinstance(values, Tensor) else list(values)
            for back, value in enumerate(reversed(steps), start=1):
                read = _fits(value, own)
                if read is None or torch.equal(read, own):
                    continue
                fresh = tap in (_INPUT_TAPS.get(evidence.op), name, f"{name}_proj")
                label = f"{name} as it was {back} steps earlier" if back > 1 else ""
                label = label or f"{name} as it was one step earlier"
                if not fresh:
                    label = f"{tap}'s result of {back} steps earlier read as {name}"
                yield label, _put(evidence, name, read)
