"""How a result becomes bf16: faults of the last instruction, which any op may have."""

from __future__ import annotations

from dataclasses import replace

from harness.bounds import ops as bounded
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe, ties_away, truncated
from harness.hypotheses.registry import hypothesis

_ROUNDED = tuple(
    op for op in bounded() if op not in ("embed", "kv_write", "mask", "argmax")
)  # those copy or compare: there is nothing to round


@hypothesis("truncated store", axis="store", ops=_ROUNDED)
def _truncated(recipe: Recipe, evidence: Evidence) -> Recipe:
    """a store that cuts off bits where it must round"""
    return replace(recipe, store=truncated)


@hypothesis("ties away from zero", axis="store", ops=_ROUNDED)
def _ties_away(recipe: Recipe, evidence: Evidence) -> Recipe:
    """a store that rounds ties away from zero where it must round them to even"""
    return replace(recipe, store=ties_away)
