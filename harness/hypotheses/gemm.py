"""The projections and the output head: which operands, which strides, which factor.

Elements are tried one dot product at a time, so that a guess about a weight of 32 MiB costs some
rows of it. To add a guess about the weight: a `Weight` in a new hypothesis, see registry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from harness.bounds import TINY, Bound, U, bound_of
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Added, Elsewhere, Recipe, Some
from harness.hypotheses.registry import base, hypothesis
from harness.hypotheses.weights import read_as_bf16, same_shape
from reference import ops as reference
from reference.rounding import from_bits

LAYER_GEMMS: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
GEMMS: Final = (*LAYER_GEMMS, "logits")
ALPHAS: Final = (2.0, 0.5, 0.125, 8.0, 1 / 64, 64.0, -1.0, 1 / 32, 32.0)

Take = Callable[..., Tensor]
_SMALL: Final = 128  # rows


@dataclass(frozen=True)
class Linear(Recipe):
    """x (n, K) @ weight.T * alpha, of the terms `part` of each sum.

    take: rows of the weight by number, or all of it (out, K).
    """

    x: Tensor
    take: Take
    out: int
    alpha: float = 1.0
    part: slice = field(default_factory=lambda: slice(None))

    def products(self, flat: Tensor) -> Tensor:
        """The terms of the sums at flat indices, (m, K)."""
        # Element by element: BLAS would cost more in waking its threads than this costs.
        x = self.x[flat // self.out][:, self.part]  # (m, K)
        weight = self.take(flat % self.out)[:, self.part]  # (m, K)
        return x * weight * self.alpha

    def some(self, flat: Tensor) -> Some:
        products = self.products(flat)
        # As bounds._Gemm.bound: K sums, each of which may truncate.
        terms = products.shape[1]
        worst = 2 * U * terms / (1 - 2 * U * terms)
        return products.sum(1), products.abs().sum(1) * worst + terms * TINY

    def whole(self) -> tuple[Tensor, Bound]:
        x, weight = self.x[:, self.part] * self.alpha, self.take()[:, self.part]
        real = reference.linear(x, weight)
        return real, bound_of("o_proj", {"x": x, "weight": weight}, real)


def taking(weight: Tensor) -> Take:
    """Rows of a tensor that is at hand, as float64; those of a sample are kept."""
    kept: dict[tuple[int, ...], Tensor] = {}

    def take(ids: Tensor | None = None) -> Tensor:
        if ids is None:
            return weight
        if ids.numel() > _SMALL:
            return weight[ids].to(torch.float64)
        key = tuple(ids.tolist())
        if key not in kept:
            kept[key] = weight[ids].to(torch.float64)
        return kept[key]

    return take


@base(*GEMMS)
def _linear(evidence: Evidence) -> Linear:
    weight = evidence.inputs["weight"]
    return Linear(evidence.inputs["x"], taking(weight), weight.shape[0])


# --- the weight -----------------------------------------------------------------------------------


@hypothesis("transposed weight", axis="weight", ops=LAYER_GEMMS)
def _transposed(recipe: Linear, evidence: Evidence) -> Linear:
    """the weight not transposed (OP_N with lda = out)"""
    weight = recipe.take()  # (out, K)
    out, terms = weight.shape
    return replace(recipe, take=taking(weight.reshape(terms, out).T))


@hypothesis("weight's leading dimension", axis="weight", ops=LAYER_GEMMS)
def _leading(recipe: Linear, evidence: Evidence) -> Iterator[tuple[str, Linear]]:
    """a weight with rows {} elements apart (lda) where they must be a row apart"""
    weight = recipe.take().contiguous()
    out, terms = weight.shape
    for stride in dict.fromkeys((64, 512, 1024, 2048, 8192, out, terms // 2, terms - 1)):
        if 0 < stride < terms:
            strided = weight.as_strided((out, terms), (stride, 1))
            yield f"{stride:,}", replace(recipe, take=taking(strided))


@hypothesis("another tensor", axis="weight", ops=LAYER_GEMMS, alone=True)
def _another(recipe: Linear, evidence: Evidence) -> Iterator[tuple[str, Linear]]:
    """the weight {} in place of its own"""
    for name, take in same_shape(evidence):
        yield name, replace(recipe, take=take)


@hypothesis("weight read as bf16", axis="weight", ops=GEMMS, alone=True)
def _reinterpreted(recipe: Linear, evidence: Evidence) -> Iterator[tuple[str, Linear]]:
    """{} weights read as bf16"""
    own = recipe.take

    def fp16(ids: Tensor | None = None) -> Tensor:
        return dict(read_as_bf16(own(ids).to(torch.bfloat16)))["fp16"].to(torch.float64)

    def fp32(ids: Tensor | None = None) -> Tensor:
        # Row r takes the second or first half of row r / 2, zeros between.
        ids = torch.arange(recipe.out) if ids is None else ids
        rows = own(ids // 2).to(torch.float64)  # (m, K)
        half = rows.shape[1] // 2
        part = torch.where((ids % 2 == 1)[:, None], rows[:, half:], rows[:, :half])
        return torch.stack((torch.zeros_like(part), part), dim=2).flatten(1)

    yield "fp16", replace(recipe, take=fp16)
    if own(torch.zeros(1, dtype=torch.int64)).shape[1] % 2 == 0:
        yield "fp32", replace(recipe, take=fp32)


# --- factor and terms -----------------------------------------------------------------------------


@hypothesis("alpha", axis="alpha", ops=LAYER_GEMMS)
def _alpha(recipe: Linear, evidence: Evidence) -> Iterator[tuple[str, Linear]]:
    """alpha {} where it must be 1"""
    for alpha in ALPHAS:
        yield f"{alpha:g}", replace(recipe, alpha=alpha)


@hypothesis("beta 1", axis="alpha", ops=GEMMS, alone=True)
def _beta(recipe: Linear, evidence: Evidence) -> Recipe | None:
    """beta 1, the product added to what the buffer held before,"""
    if evidence.before is None:
        return None
    return Added(recipe, from_bits(evidence.before))


@hypothesis("part of the sum", axis="terms", ops=GEMMS)
def _part(recipe: Linear, evidence: Evidence) -> Iterator[tuple[str, Linear]]:
    """only {} of each sum"""
    terms = recipe.x.shape[1]
    parts = {
        "the first half": slice(0, terms // 2),
        "the second half": slice(terms // 2, terms),
        "all but the last term": slice(0, terms - 1),
        "all but the first term": slice(1, terms),
    }
    parts |= {f"all but the last {k} terms": slice(0, terms - k) for k in (8, 16, 32, 64, 128)}
    parts |= {f"the first {k} terms": slice(0, k) for k in (64, 512, 1024, 2048) if k < terms // 2}
    for label, part in parts.items():
        yield label, replace(recipe, part=part)


# --- the activation -------------------------------------------------------------------------------


@hypothesis("activation's leading dimension", axis="activation", ops=GEMMS)
def _activation_stride(recipe: Linear, evidence: Evidence) -> Iterator[tuple[str, Linear]]:
    """an activation with rows {} elements apart (ldb) where they must be a row apart"""
    rows, terms = recipe.x.shape
    if rows < 2:
        return
    for stride in dict.fromkeys((64, 512, 1024, 2048, terms // 2)):
        if 0 < stride < terms:
            strided = recipe.x.contiguous().as_strided((rows, terms), (stride, 1))
            yield f"{stride:,}", replace(recipe, x=strided)


@hypothesis("wrong row", axis="activation", ops=GEMMS)
def _row(recipe: Linear, evidence: Evidence) -> Iterator[tuple[str, Linear]]:
    """{} read in place of each row's own activation"""
    rows = recipe.x.shape[0]
    if rows < 2:
        return
    yield "the first row", replace(recipe, x=recipe.x[:1].expand(rows, -1))
    yield "the last row", replace(recipe, x=recipe.x[-1:].expand(rows, -1))
    yield "the row before", replace(recipe, x=recipe.x.roll(1, 0))
    yield "the row after", replace(recipe, x=recipe.x.roll(-1, 0))


# --- the result -----------------------------------------------------------------------------------


@hypothesis("result's leading dimension", axis="result", ops=GEMMS, alone=True)
def _result_stride(recipe: Linear, evidence: Evidence) -> Iterator[tuple[str, Recipe]]:
    """a result with rows {} elements apart (ldc) where they must be a row apart"""
    rows, out = recipe.x.shape[0], recipe.out
    if rows < 2 or evidence.before is None:
        return
    strides = [s for s in (512, 2048, 8192, 128256) if s > out]
    if not strides:
        return
    flat = torch.arange(rows * out)
    for stride in strides:
        row, column = flat // stride, flat % stride
        hole = (column >= out).reshape(rows, out)
        source = torch.where(column < out, row * out + column, 0).reshape(rows, out)
        yield (
            f"{stride:,}",
            Elsewhere(recipe, source, unwritten=hole),
        )
