"""The causal mask: which entries are hidden, simulated as the blocks and threads that hide them.

Thread T of block B (32 n blocks of n threads) takes row(B), and if hidden(T, row) stores -infinity
at address(B) + T. A fault of one of these looks nothing like a mask once the others are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from harness.bounds import Bound
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe, Some, flat_bound
from harness.hypotheses.registry import base, hypothesis
from reference.rounding import from_bits

MASK: Final = ("mask",)
_LOOKED_AT: Final = 4096  # entries among which a finite mask value is sought
_CHUNK: Final = 2**20  # candidates looked at together


@dataclass(frozen=True)
class Mask(Recipe):
    """A mask of scores (32, n, n). row(block, n); hidden(thread, row); address block * stride."""

    scores: Tensor
    row: Callable[[Tensor, int], Tensor] = lambda block, n: block % n
    hidden: Callable[[Tensor, Tensor], Tensor] = torch.gt
    stride: int = 0  # 0: n
    value: float = -torch.inf

    def some(self, flat: Tensor) -> Some:
        n = self.scores.shape[-1]
        stride, blocks = self.stride or n, self.scores.numel() // n
        reach = -(-n // stride)  # blocks that may store at one place
        parts = []
        for part in flat.split(max(1, _CHUNK // reach)):
            block = part[:, None] // stride - torch.arange(reach)  # (m, reach)
            thread = part[:, None] - block * stride
            real = (block >= 0) & (block < blocks) & (thread < n)
            parts.append((real & self.hidden(thread, self.row(block, n))).any(dim=1))
        masked = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)
        kept = self.scores.reshape(-1)[flat]
        return torch.where(masked, self.value, kept), torch.zeros(len(flat), dtype=torch.float64)

    def whole(self) -> tuple[Tensor, Bound]:
        real, b = self.some(torch.arange(self.scores.numel()))
        return real.reshape(self.scores.shape), flat_bound(b.reshape(self.scores.shape))


@base(*MASK)
def _mask(evidence: Evidence) -> Mask:
    return Mask(evidence.inputs["scores"])


# --- which entries are hidden ---------------------------------------------------------------------


def _hiding(hidden: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Mask, Evidence], Mask]:
    return lambda recipe, evidence: replace(recipe, hidden=hidden)


for _name, _says, _hidden in (
    ("mask absent", "no mask at all", lambda t, row: (t > row) & (t < row)),
    ("diagonal masked", "the diagonal masked too (column >= row)", torch.ge),
    (
        "mask shifted by one",
        "a mask that begins one column late (column > row + 1)",
        lambda t, row: t > row + 1,
    ),
    (
        "mask shifted by minus two",
        "a mask that begins two columns early (column > row - 2)",
        lambda t, row: t > row - 2,
    ),
    ("mask transposed", "earlier keys masked in place of later ones (column < row)", torch.lt),
    (
        "mask transposed with diagonal",
        "earlier keys and the diagonal masked in place of later keys (column <= row)",
        torch.le,
    ),
    (
        "mask per block of 16",
        "a mask per block of 16 (column / 16 > row / 16)",
        lambda t, row: t // 16 > row // 16,
    ),
    (
        "mask per block of 16, diagonal block too",
        "a mask per block of 16 with the diagonal block (column / 16 >= row / 16)",
        lambda t, row: t // 16 >= row // 16,
    ),
    ("all masked", "every entry masked", lambda t, row: (t > row) | (t <= row)),
    ("all but the diagonal masked", "all but the diagonal masked", torch.ne),
):
    hypothesis(_name, axis="hidden", ops=MASK, says=_says)(_hiding(_hidden))


# --- the row --------------------------------------------------------------------------------------


def _rowing(row: Callable[[Tensor, int], Tensor]) -> Callable[[Mask, Evidence], Mask]:
    return lambda recipe, evidence: replace(recipe, row=row)


for _name, _says, _row in (
    (
        "row from block / heads",
        "the row taken as the block's number / 32 where it is modulo n",
        lambda block, n: block // 32,
    ),
    (
        "row from block modulo heads",
        "the row taken as the block's number modulo 32 where it is modulo n",
        lambda block, n: block % 32,
    ),
    (
        "row from block / n",
        "the row taken as the block's number / n (the head) where it is modulo n",
        lambda block, n: block // n,
    ),
    ("row of the block itself", "the row taken as the block's number", lambda block, n: block),
    ("rows reversed", "rows counted from the last", lambda block, n: n - 1 - block % n),
):
    hypothesis(_name, axis="row", ops=MASK, says=_says)(_rowing(_row))


# --- the address ----------------------------------------------------------------------------------


@hypothesis("address without row stride", axis="address", ops=MASK)
def _packed(recipe: Mask, evidence: Evidence) -> Mask:
    """a store at block + column where it must be at block * n + column"""
    return replace(recipe, stride=1)


@hypothesis("wrong row stride", axis="address", ops=MASK)
def _stride(recipe: Mask, evidence: Evidence) -> Iterator[tuple[str, Mask]]:
    """a row stride of {} where it must be n"""
    n = recipe.scores.shape[-1]
    strides = (n + 1, n - 1, 16, 32, 64, 512, 1024, 2048, -(-n // 16) * 16, -(-n // 32) * 32)
    for stride in dict.fromkeys(strides):
        if stride > 1 and stride != n:
            yield f"{stride:,}", replace(recipe, stride=stride)


# --- the value ------------------------------------------------------------------------------------


@hypothesis("finite mask value", axis="value", ops=MASK)
def _finite(recipe: Mask, evidence: Evidence) -> Iterator[tuple[str, Mask]]:
    """{} stored where -infinity belongs"""
    size = evidence.got.size
    at = np.random.default_rng(0).integers(0, size, _LOOKED_AT) if size > _LOOKED_AT else ...
    got = from_bits(evidence.got.reshape(-1)[at])
    wrong = got != evidence.real.reshape(-1)[at]  # the right result lies on the bf16 grid
    values, counts = got[wrong & got.isfinite()].unique(return_counts=True)
    if len(values):
        value = float(values[counts.argmax()])
        yield f"{value:g}", replace(recipe, value=value)


@hypothesis("masked with NaN", axis="value", ops=MASK)
def _nan(recipe: Mask, evidence: Evidence) -> Mask:
    """NaN stored where -infinity belongs"""
    return replace(recipe, value=torch.nan)


@hypothesis("masked with infinity", axis="value", ops=MASK)
def _infinity(recipe: Mask, evidence: Evidence) -> Mask:
    """+infinity stored where -infinity belongs"""
    return replace(recipe, value=torch.inf)
