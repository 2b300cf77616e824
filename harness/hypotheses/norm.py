"""RMSNorm: what is summed, what the sum is divided by, where eps is added, and which weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from harness.bounds import TINY, Bound, U
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe, Some, flat_bound
from harness.hypotheses.registry import base, hypothesis
from harness.hypotheses.weights import read_as_bf16, same_shape
from reference.rounding import round_to_bf16

NORMS: Final = ("attn_norm", "mlp_norm", "final_norm")
Total = Callable[[Tensor], Tensor]  # (n, d) -> (n, 1): what stands for the sum of squares


def _sum_of_squares(x: Tensor) -> Tensor:
    return x.square().sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Norm(Recipe):
    """x (n, d) over its root mean square, times weight (d,). divisor: None for d.

    slack: how far x itself may be off (n, d), where it is an intermediate result.
    """

    x: Tensor
    weight: Tensor
    eps: float = 1e-5
    total: Total = _sum_of_squares
    divisor: float | None = None
    outside: bool = False
    multiply: bool = False
    root: bool = True
    slack: Tensor | None = None

    def scale(self) -> Tensor:
        """What each row is divided by, (n, 1)."""
        mean = self.total(self.x) / (self.divisor or self.x.shape[-1])
        if not self.root:
            return mean + self.eps
        if self.outside:
            return mean.sqrt() + self.eps
        return (mean + self.eps).sqrt()

    def some(self, flat: Tensor) -> Some:
        row, column = flat // self.x.shape[1], flat % self.x.shape[1]
        return self._at(self.scale()[row, 0], (row, column), self.weight[column])

    def _at(self, scale: Tensor, at: Any, weight: Tensor) -> Some:
        x = self.x[at]
        real = (x * scale if self.multiply else x / scale) * weight
        # As bounds._norm; the root halves the relative error of the sum.
        terms = self.x.shape[1] / (2 if self.root else 1)
        b = (terms + 6) * U * real.abs() + TINY * (1 + weight.abs())
        if self.slack is not None:
            off = (self.slack.square().sum(-1) / self.x.square().sum(-1)).sqrt()
            more = off[at[0]] if isinstance(at, tuple) else off[:, None]
            b = b + self.slack[at] / scale * weight.abs() + real.abs() * more
        return real, b

    def whole(self) -> tuple[Tensor, Bound]:
        real, b = self._at(self.scale(), ..., self.weight)
        return real, flat_bound(b)


@base(*NORMS)
def _norm(evidence: Evidence) -> Norm:
    return Norm(evidence.inputs["x"], evidence.inputs["weight"].to(torch.float64))


# --- eps ------------------------------------------------------------------------------------------

for _name, _eps in (
    ("eps 1e-6", 1e-6),
    ("no eps", 0.0),
    ("eps 1e-8", 1e-8),
    ("eps 1e-4", 1e-4),
    ("eps 1e-3", 1e-3),
):

    def _other_eps(recipe: Norm, evidence: Evidence, eps: float = _eps) -> Norm:
        return replace(recipe, eps=eps)

    hypothesis(
        _name,
        axis="eps",
        ops=NORMS,
        says=f"{_name} where it must be 1e-5" if _eps else "no eps where it must be 1e-5",
    )(_other_eps)


@hypothesis("eps outside the root", axis="outside", ops=NORMS)
def _outside(recipe: Norm, evidence: Evidence) -> Norm:
    """eps added after the square root"""
    return replace(recipe, outside=True)


# --- the sum --------------------------------------------------------------------------------------


@hypothesis("sum instead of mean", axis="divisor", ops=NORMS)
def _sum(recipe: Norm, evidence: Evidence) -> Norm:
    """the sum of squares where their mean belongs"""
    return replace(recipe, divisor=1.0)


@hypothesis("divided by the wrong width", axis="divisor", ops=NORMS)
def _divisor(recipe: Norm, evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """the sum of squares divided by {} where it must be by the row's width"""
    width = recipe.x.shape[-1]
    for divisor in dict.fromkeys((1024, 2047, 4096, 8192, 512, 64, 32, width - 1)):
        if divisor != width:
            yield f"{divisor:,}", replace(recipe, divisor=float(divisor))


@hypothesis("part of the row summed", axis="total", ops=NORMS)
def _part(recipe: Norm, evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """the squares of {} alone"""
    width = recipe.x.shape[-1]
    halves = {
        "the first half of the row": slice(0, width // 2),
        "the second half of the row": slice(width // 2, width),
        "even columns": slice(0, width, 2),
        "all columns but the last": slice(0, width - 1),
        "all columns but the first": slice(1, width),
        "the first 512 columns": slice(0, 512),
        "the first 32 columns": slice(0, 32),
    }
    for label, part in halves.items():
        total = _sum_over(part)
        yield label, replace(recipe, total=total)
        size = recipe.x[..., part].shape[-1]
        yield f"{label}, and their mean,", replace(recipe, total=total, divisor=float(size))


def _sum_over(part: slice) -> Total:
    return lambda x: x[..., part].square().sum(dim=-1, keepdim=True)


@hypothesis("another row's sum", axis="total", ops=NORMS)
def _first_total(recipe: Norm, evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """the root mean square of {}"""
    rows = recipe.x.shape[0]
    if rows > 1:
        first = _sum_of_squares(recipe.x)[:1].expand(rows, 1)
        yield "the first row for all rows", replace(recipe, total=lambda x: first)
        every = _sum_of_squares(recipe.x).mean().expand(rows, 1)
        yield "all rows together", replace(recipe, total=lambda x: every)


@hypothesis("mean of magnitudes", axis="total", ops=NORMS)
def _magnitudes(recipe: Norm, evidence: Evidence) -> Norm:
    """the mean of magnitudes where the root of the mean of squares belongs"""
    return replace(
        recipe, total=lambda x: (x.abs().mean(dim=-1, keepdim=True)).square() * x.shape[-1]
    )


def _tree(values: Tensor) -> Tensor:
    """Neighbours added in turns, each sum rounded to bf16: (n, 2^k) -> (n, 1)."""
    while values.shape[-1] > 1:
        values = round_to_bf16(values[..., ::2] + values[..., 1::2])
    return values


def _halving(values: Tensor) -> Tensor:
    """The second half added to the first in turns, each sum rounded to bf16."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = round_to_bf16(values[..., :half] + values[..., half:])
    return values


def _one_by_one(values: Tensor) -> Tensor:
    """From the first on: float32 sums, each rounded to bf16. In NumPy, for its 2048 small steps."""
    columns = np.ascontiguousarray(values.to(torch.float32).numpy().T)  # (d, n)
    total = np.zeros_like(columns[0])
    for column in columns:
        bits = (total + column).view(np.uint32)
        total = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF_0000).view(np.float32)
    return torch.from_numpy(total.astype(np.float64))[:, None]


def _squares(x: Tensor) -> Tensor:
    return round_to_bf16(x.square())


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _leaves_bf16(x: Tensor) -> Tensor:
    a, b = _halves(x)
    return round_to_bf16(_squares(a) + _squares(b))


def _leaves_stored(x: Tensor) -> Tensor:
    a, b = _halves(x)
    return round_to_bf16(a.square() + b.square())


def _leaves_fused(x: Tensor) -> Tensor:
    a, b = _halves(x)
    return round_to_bf16(a.square() + _squares(b))


def _known(total: Tensor) -> Total:
    return lambda x: total


_LOW: Final[dict[str, Total]] = {
    "in a tree over neighbours": lambda x: _tree(_leaves_bf16(x)),
    "in a tree over neighbours, squares in float32": lambda x: _tree(_leaves_stored(x)),
    "in a tree over neighbours, fused": lambda x: _tree(_leaves_fused(x)),
    "in a tree over halves": lambda x: _halving(_leaves_bf16(x)),
    "in a tree over halves, squares in float32": lambda x: _halving(_leaves_stored(x)),
    "in a tree over all neighbours": lambda x: _tree(_squares(x)),
    "one by one": lambda x: _one_by_one(_squares(x)),
    "one by one, squares in float32": lambda x: _one_by_one(x.square()),
}


@hypothesis("bf16 accumulation", axis="total", ops=NORMS, alone=True)
def _accumulated(recipe: Norm, evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """the sum of squares kept in bf16, added {},"""
    width = recipe.x.shape[-1]
    if width & (width - 1):
        return
    for label, total in _LOW.items():
        made = total(recipe.x)
        yield label, replace(recipe, total=_known(made))


# --- the formula ----------------------------------------------------------------------------------


@hypothesis("mean subtracted", axis="centre", ops=NORMS)
def _centred(recipe: Norm, evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """the row's mean subtracted first{}, as in LayerNorm,"""
    width = recipe.x.shape[-1]
    centred = recipe.x - recipe.x.mean(dim=-1, keepdim=True)
    slack = (width * U) * recipe.x.abs().mean(dim=-1, keepdim=True) + U * centred.abs()
    yield "", replace(recipe, x=centred, slack=slack)
    variance = _sum_of_squares(centred)
    yield " in the squares only", replace(recipe, total=lambda x: variance)


@hypothesis("multiplied instead of divided", axis="multiply", ops=NORMS)
def _multiplied(recipe: Norm, evidence: Evidence) -> Norm:
    """a multiplication by the root mean square where the division belongs"""
    return replace(recipe, multiply=True)


@hypothesis("not normalised", axis="multiply", ops=NORMS)
def _not_normalised(recipe: Norm, evidence: Evidence) -> Norm:
    """the weight alone, without the division by the root mean square,"""
    ones = torch.ones(recipe.x.shape[0], 1, dtype=torch.float64)
    return replace(recipe, total=lambda x: ones, divisor=1.0, eps=0.0)


@hypothesis("root missing", axis="root", ops=NORMS)
def _root_missing(recipe: Norm, evidence: Evidence) -> Norm:
    """the mean square where its root belongs"""
    return replace(recipe, root=False)


@hypothesis("applied twice", axis="times", ops=NORMS, alone=True)
def _twice(recipe: Norm, evidence: Evidence) -> Norm:
    """the norm applied twice"""
    real, bound = recipe.whole()
    low, high = round_to_bf16(real - bound.strict), round_to_bf16(real + bound.strict)
    return replace(recipe, x=(low + high) / 2, slack=(high - low) / 2)


# --- the weight -----------------------------------------------------------------------------------


@hypothesis("weight plus one", axis="weight", ops=NORMS)
def _plus_one(recipe: Norm, evidence: Evidence) -> Norm:
    """1 + weight where the weight itself belongs"""
    return replace(recipe, weight=recipe.weight + 1)


@hypothesis("weight minus one", axis="weight", ops=NORMS)
def _minus_one(recipe: Norm, evidence: Evidence) -> Norm:
    """weight - 1 where the weight itself belongs"""
    return replace(recipe, weight=recipe.weight - 1)


@hypothesis("weight missing", axis="weight", ops=NORMS)
def _weightless(recipe: Norm, evidence: Evidence) -> Norm:
    """no weight"""
    return replace(recipe, weight=torch.ones_like(recipe.weight))


@hypothesis("weight applied twice", axis="weight", ops=NORMS)
def _squared(recipe: Norm, evidence: Evidence) -> Norm:
    """the weight multiplied twice"""
    return replace(recipe, weight=recipe.weight.square())


@hypothesis("another tensor", axis="weight", ops=NORMS)
def _another(recipe: Norm, evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """the weight {} in place of its own"""
    for name, tensor in same_shape(evidence):
        yield name, replace(recipe, weight=tensor().to(torch.float64))


@hypothesis("weight's halves", axis="weight", ops=NORMS)
def _half(recipe: Norm, evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """the weight's {}"""
    first, second = _halves(recipe.weight)
    yield "first half for both halves", replace(recipe, weight=torch.cat((first, first)))
    yield "second half for both halves", replace(recipe, weight=torch.cat((second, second)))
    yield "halves exchanged", replace(recipe, weight=torch.cat((second, first)))


@hypothesis("weight read as bf16", axis="weight", ops=NORMS)
def _reinterpreted(recipe: Norm, evidence: Evidence) -> Iterator[tuple[str, Norm]]:
    """{} weights read as bf16"""
    for kind, read in read_as_bf16(recipe.weight.to(torch.bfloat16)):
        yield kind, replace(recipe, weight=read.to(torch.float64))
