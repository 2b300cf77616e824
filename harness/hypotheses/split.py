"""Split-K: a GEMM that sums parts of its terms apart and passes the partial sums on in bf16.

cuBLAS does so for some shapes unless it is told not to (CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_
REDUCTION): the result is no single rounding of the sum any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from harness.bounds import TINY, Bound, U
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.gemm import GEMMS, Linear
from harness.hypotheses.recipe import Recipe, Some
from harness.hypotheses.registry import hypothesis
from harness.hypotheses.scores import ATTN_V, Weighted
from reference.rounding import round_to_bf16

_TERMS: Final = 2**22  # products held at once: 32 MiB


@dataclass(frozen=True)
class Split(Recipe):
    """The sum of parts of `inner`'s terms, each rounded to bf16. ends: where each part ends.

    A part that lies within its own bound of a tie may go either way: b holds both.
    """

    inner: Linear | Weighted
    ends: tuple[int, ...]
    shape: tuple[int, ...]

    def some(self, flat: Tensor) -> Some:
        products = self.inner.products(flat)  # (m, K)
        total = torch.zeros(len(flat), dtype=torch.float64)
        slack = torch.zeros_like(total)
        first = 0
        for end in self.ends:
            part = products[:, first:end]
            real, terms = part.sum(1), end - first
            b = part.abs().sum(1) * (2 * U * terms / (1 - 2 * U * terms)) + terms * TINY
            total += round_to_bf16(real)
            slack += round_to_bf16(real + b) - round_to_bf16(real - b)
            slack += U * round_to_bf16(real).abs()
            first = end
        return total, slack

    def whole(self) -> tuple[Tensor, Bound]:
        elements = torch.Size(self.shape).numel()
        step = max(1, _TERMS // self.ends[-1])
        parts = [self.some(flat) for flat in torch.arange(elements).split(step)]
        real, b = (torch.cat(each) for each in zip(*parts, strict=True))
        return real.reshape(self.shape), Bound(self.shape, lambda flat: (b[flat], b[flat]))


@hypothesis("bf16 partial sums", axis="sum", ops=(*GEMMS, *ATTN_V), alone=True)
def _split(recipe: Linear | Weighted, evidence: Evidence) -> Iterator[tuple[str, Recipe]]:
    """a sum in {} that are rounded to bf16 before they are added (split-K)"""
    terms = recipe.products(torch.zeros(1, dtype=torch.int64)).shape[1]
    shape = tuple(evidence.real.shape)
    for cut in (8, 16, 32, 64, 128, 256):
        if cut < terms:
            split = Split(recipe, (cut, terms), shape)
            yield f"two parts, the first of {cut} terms,", split
    for count in (2, 4, 8, 16):
        if terms % (8 * count) == 0:
            size = terms // count
            ends = tuple(range(size, terms + 1, size))
            yield f"{count} equal parts", Split(recipe, ends, shape)
