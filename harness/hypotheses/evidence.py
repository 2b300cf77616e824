"""What a diagnosis looks at: one failing op with its inputs, and what lay around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

Pages = tuple[Tensor, Tensor]  # key rows and value rows, (len, 512) float64 each


def _no_weight(name: str) -> Tensor | None:
    return None


@dataclass(frozen=True)
class Context:
    """What else was at hand when the op ran. All of it is optional: less of it, fewer hypotheses.

    weight(name): a tensor of the checkpoint (bfloat16) by its full name, None if there is none.
    rows(name, ids): only some of its rows (ids int64), which is cheaper for a made-up checkpoint;
    it is asked only for tensors of the expected names and must return None for one there is not.
    taps: the ideal's rounded results of the other taps of the same event and layer, float64.
    earlier: the ideal's rounded results of this tap and of others at earlier steps, newest last.
    slots, positions: of each row of the op. table: the block table int32 (2, 16, 128).
    other_slots: key and value rows that this op should not read, by a label such as "slot 0" or
    "layer 3". unrotated: key rows of each row's sequence as they were before RoPE.
    changes: what else the op wrote (`harness.memory.Change`). poison: the value of memory that was
    never written; None if it is unknown.
    """

    weight: Callable[[str], Tensor | None] = _no_weight
    rows: Callable[[str, Tensor], Tensor | None] | None = None
    taps: Mapping[str, Tensor] = field(default_factory=dict)
    earlier: Mapping[str, Tensor | Sequence[Tensor]] = field(default_factory=dict)
    slots: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    table: np.ndarray | None = None
    other_slots: Mapping[str, Pages] = field(default_factory=dict)
    unrotated: Sequence[Tensor] | None = None
    changes: Sequence[Any] = ()
    poison: float | None = float("nan")

    def weight_rows(self, name: str, ids: Tensor | None = None) -> Tensor | None:
        """Some rows of a tensor, or all of it; None if there is no such tensor."""
        if ids is not None and self.rows is not None:
            return self.rows(name, ids)
        whole = self.weight(name)
        return whole if whole is None or ids is None else whole[ids]


@dataclass(frozen=True)
class Evidence:
    """One op that failed.

    inputs: as recorded, float64 or int64 tensors (weights bfloat16 or float64). real: the right
    result, float64, unrounded (argmax: int64). got: what was stored, bf16 bits uint16 of real's
    shape (argmax: int64 indices). before: the bits of the output before the op ran (an input, if it
    works in place, or poison), None if unknown. upstream: upstream's lines, for the sentence.
    """

    phase: str
    op: str
    layer: int | None
    inputs: Mapping[str, Any]
    real: Tensor
    got: np.ndarray
    before: np.ndarray | None = None
    upstream: str | None = None
    context: Context = field(default_factory=Context)

    def __post_init__(self) -> None:
        if tuple(self.got.shape) != tuple(self.real.shape):
            raise ValueError(
                f"got must be of real's shape {tuple(self.real.shape)} (got {self.got.shape})"
            )
