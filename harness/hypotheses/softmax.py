"""Softmax over the rows of (32, n, n) masked scores, and what goes wrong in one.

Faults of the maximum show only through float32's range, which is simulated: exp of more than 88.72
is infinity, of less than -103.97 zero. The NaN of an unguarded merge follow from the order in which
parts of a row are merged: where two parts are masked entirely, -inf - -inf is NaN.
To add an order of merging: a function in `ORDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from harness.bounds import TINY, Bound, U
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Elsewhere, Recipe, Some, flat_bound, judged
from harness.hypotheses.registry import base, hypothesis
from reference import ops as reference

SOFTMAX: Final = ("softmax",)
_GREATEST: Final = 2.0**128 * (1 - 2.0**-25)  # float32 is infinity from here on
_LEAST: Final = 2.0**-150  # and zero up to here
_LN2: Final = 0.6931471805599453

# Rows (R, n), their numbers (R,) -> the real result and b of each element, (R, n)
Rows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Softmax(Recipe):
    """A softmax a row: `compute` gives the real result and b of the rows it is given."""

    scores: Tensor  # (32, n, n)
    compute: Rows

    def some(self, flat: Tensor) -> Some:
        n = self.scores.shape[-1]
        rows, where = (flat // n).unique(return_inverse=True)
        real, b = self.compute(self.scores.reshape(-1, n)[rows], rows)
        return real[where, flat % n], b[where, flat % n]

    def whole(self) -> tuple[Tensor, Bound]:
        n = self.scores.shape[-1]
        flat = self.scores.reshape(-1, n)
        real, b = self.compute(flat, torch.arange(flat.shape[0]))
        return real.reshape(self.scores.shape), flat_bound(b.reshape(self.scores.shape))


def float32_range(x: Tensor) -> Tensor:
    """Infinity and zero where a float32 would become so; the rest as it is."""
    x = torch.where(x.abs() >= _GREATEST, x.sign() * torch.inf, x)
    return torch.where(x.abs() <= _LEAST, torch.zeros_like(x), x)


def shifted(x: Tensor, shift: Tensor, base_: float = 1.0, divide: bool = True) -> Some:
    """exp((x - shift) * base_) over its sum, in float32's range, and b.

    As bounds._softmax, with |x - shift| for |x - max|, and for exponentials below float32's normal
    range the absolute error TINY, relative to the sum.
    """
    masked = x == -torch.inf
    away = (x - shift).masked_fill(masked, 0.0)
    e = float32_range(torch.exp(away * base_)).masked_fill(masked, 0.0)
    total = float32_range(e.sum(dim=-1, keepdim=True)) if divide else torch.ones_like(shift)
    real = float32_range(e / total) if divide else e
    relative = (x.shape[-1] + 8) * U + 2 * U * away.abs()
    lost = TINY / total * (1 + x.shape[-1] * real)
    # An exponential at the very edge of the range may fall on either side of it: no allowance is
    # made for that, since exp(88.72) needs a score that hits it to five digits.
    b = torch.where(masked, 0.0, real * relative + 2 * TINY + lost.nan_to_num(0.0, 0.0, 0.0))
    return real, torch.where(real.isfinite(), b, 0.0)


def _top(x: Tensor) -> Tensor:
    return x.amax(dim=-1, keepdim=True)


@base(*SOFTMAX)
def _softmax(evidence: Evidence) -> Softmax:
    def compute(x: Tensor, rows: Tensor) -> Some:
        made = judged("softmax", {"scores": x}, reference.softmax(x))
        return made.real, made.bound.strict

    return Softmax(evidence.inputs["scores"], compute)


# --- merging --------------------------------------------------------------------------------------

Merge = Callable[[Tensor, Tensor], Tensor]


def _spoilt(a: Tensor, b: Tensor) -> Tensor:
    """Of two parts of a row, as how masked each is: 0 no, 1 entirely, 2 NaN."""
    return torch.where((a == 2) | (b == 2) | ((a == 1) & (b == 1)), 2, torch.minimum(a, b))


def _neighbours(state: Tensor, merge: Merge) -> Tensor:
    """Parts of 1, 2, 4 .. neighbours; what has no neighbour within the row waits."""
    state, n, step = state.clone(), state.shape[-1], 1
    while step < n:
        at = torch.arange(0, n - step, 2 * step)
        state[..., at] = merge(state[..., at], state[..., at + step])
        step *= 2
    return state[..., 0]


def _halves(state: Tensor, merge: Merge) -> Tensor:
    """Entry i with entry i + step, step halving from the greatest power of two below n."""
    state, n = state.clone(), state.shape[-1]
    step = 1
    while step * 2 < n:
        step *= 2
    while step and n > 1:
        at = torch.arange(min(step, n - step))
        state[..., at] = merge(state[..., at], state[..., at + step])
        n, step = min(n, step), step // 2
    return state[..., 0]


def _padded(state: Tensor, to: int) -> Tensor:
    """With entries that hold nothing (-infinity), up to a multiple of `to`."""
    return torch.nn.functional.pad(state, (0, -state.shape[-1] % to), value=1)


def _warps(state: Tensor, merge: Merge) -> Tensor:
    """Warps of 32, the last one padded with -infinity, then the warps' results."""
    lanes = _padded(state, 32).unflatten(-1, (-1, 32))
    warps = _halves(lanes, merge)
    return _halves(_padded(warps, 32), merge) if warps.shape[-1] > 1 else warps[..., 0]


def _padded_tree(state: Tensor, merge: Merge) -> Tensor:
    size = 1 << (state.shape[-1] - 1).bit_length()
    return _neighbours(_padded(state, size), merge)


def _from_nothing(state: Tensor, merge: Merge) -> Tensor:
    """One by one, beginning with -infinity."""
    total = torch.ones_like(state[..., 0])
    for i in range(state.shape[-1]):
        total = merge(total, state[..., i])
    return total


ORDERS: Final[dict[str, Callable[[Tensor, Merge], Tensor]]] = {
    "of neighbours in a tree": _neighbours,
    "of halves in a tree": _halves,
    "of a warp's lanes": _warps,
    "in a tree padded to a power of two": _padded_tree,
    "one by one, from -infinity on": _from_nothing,
}


@hypothesis("unguarded online merge", axis="merge", ops=SOFTMAX)
def _unguarded(recipe: Softmax, evidence: Evidence) -> Iterator[tuple[str, Softmax]]:
    """an online merge {} without a guard for two parts that are both -infinity"""
    for label, order in ORDERS.items():

        def compute(
            x: Tensor, rows: Tensor, order: Callable[[Tensor, Merge], Tensor] = order
        ) -> Some:
            real, b = recipe.compute(x, rows)
            nan = order((x == -torch.inf).to(torch.int64), _spoilt) == 2  # (R,)
            return torch.where(nan[:, None], torch.nan, real), b

        yield label, replace(recipe, compute=compute)


@hypothesis("reads past the row", axis="merge", ops=SOFTMAX)
def _past(recipe: Softmax, evidence: Evidence) -> Softmax | None:
    """a tree that reads entries past the row, never written,"""
    n = recipe.scores.shape[-1]
    if n & (n - 1) == 0:
        return None
    return replace(
        recipe, compute=lambda x, rows: (torch.full_like(x, torch.nan), torch.zeros_like(x))
    )


# --- the shift ------------------------------------------------------------------------------------


@hypothesis("no shift by the maximum", axis="shift", ops=SOFTMAX)
def _no_shift(recipe: Softmax, evidence: Evidence) -> Softmax:
    """no maximum subtracted, so that float32 overflows above 88.7 and vanishes below -104,"""
    return replace(recipe, compute=lambda x, rows: shifted(x, torch.zeros_like(x[:, :1])))


@hypothesis("constant shift", axis="shift", ops=SOFTMAX, alone=True)
def _constant_shift(recipe: Softmax, evidence: Evidence) -> Iterator[tuple[str, Softmax]]:
    """a shift by {} in place of the row's maximum"""
    finite = recipe.scores.masked_fill(recipe.scores == -torch.inf, torch.nan).nan_to_num(-1e30)
    n = finite.shape[-1]
    heads = finite.flatten(1).amax(dim=1).repeat_interleave(finite.shape[1])  # (32 n,)
    everything = finite.max().expand(heads.shape)
    shifts = {"the tensor's maximum": everything, "the head's maximum": heads}
    shifts |= {
        f"the constant {c:g}": torch.full_like(heads, c) for c in (-100.0, -10.0, 1.0, 10.0, 100.0)
    }
    rows = recipe.scores.reshape(-1, n)
    top = _top(rows)[:, 0]
    shifts["the first entry"] = rows[:, 0]
    shifts["the row before's maximum"] = top.roll(1)
    for label, shift in shifts.items():

        def compute(x: Tensor, rows: Tensor, shift: Tensor = shift) -> Some:
            return shifted(x, shift[rows, None])

        yield label, replace(recipe, compute=compute)


# --- the rest -------------------------------------------------------------------------------------


@hypothesis("no division", axis="division", ops=SOFTMAX)
def _no_division(recipe: Softmax, evidence: Evidence) -> Softmax:
    """exponentials that are not divided by their sum"""
    return replace(recipe, compute=lambda x, rows: shifted(x, _top(x), divide=False))


@hypothesis("base 2", axis="base", ops=SOFTMAX)
def _base_two(recipe: Softmax, evidence: Evidence) -> Softmax:
    """powers of 2 where exponentials belong"""
    return replace(recipe, compute=lambda x, rows: shifted(x, _top(x), base_=_LN2))


@hypothesis("row length off", axis="length", ops=SOFTMAX)
def _length(recipe: Softmax, evidence: Evidence) -> Iterator[tuple[str, Softmax]]:
    """a row length of {} in maximum and sum"""
    n = recipe.scores.shape[-1]
    power = 1 << (n.bit_length() - 1)
    lengths = (1, n - 1, n - 2, n - 16, n // 16 * 16, power, power // 2, 32, 64, n // 2)
    for length in dict.fromkeys(lengths):
        if not 0 < length < n:
            continue
        for label, own in ((f"{length}", False), (f"{length}, as written too,", True)):

            def compute(x: Tensor, rows: Tensor, length: int = length, own: bool = own) -> Some:
                part = x[:, :length]
                top = _top(part)
                masked = x == -torch.inf
                away = (x - top).masked_fill(masked, 0.0)
                e = float32_range(torch.exp(away)).masked_fill(masked, 0.0)
                total = e[:, :length].sum(dim=-1, keepdim=True)
                real = float32_range(e / total)
                b = real * ((x.shape[-1] + 8) * U + 2 * U * away.abs()) + 2 * TINY
                b = torch.where(masked | ~real.isfinite(), 0.0, b)
                if own:  # the threads that are missing do not write either
                    real = torch.cat((real[:, :length], x[:, length:]), dim=1)
                    b = torch.cat((b[:, :length], torch.zeros_like(x[:, length:])), dim=1)
                return real, b

            yield label, replace(recipe, compute=compute)
    flat = recipe.scores.reshape(-1)

    def longer(x: Tensor, rows: Tensor) -> Some:
        following = (rows + 1) * n
        inside = following < flat.numel()
        value = flat[following.clamp(max=flat.numel() - 1)]
        more = torch.where(inside, value, torch.nan)[:, None]
        real, b = shifted(torch.cat((x, more), dim=1), torch.maximum(_top(x), more))
        return real[:, :n], b[:, :n]

    yield f"{n + 1}", replace(recipe, compute=longer)


@hypothesis("softmax over queries", axis="axis", ops=SOFTMAX, alone=True)
def _over_queries(recipe: Softmax, evidence: Evidence) -> Recipe:
    """a softmax over columns (queries) where it must be over rows (keys)"""
    shape = recipe.scores.shape
    turned = replace(recipe, scores=recipe.scores.transpose(1, 2).contiguous())
    source = torch.arange(recipe.scores.numel()).reshape(shape).transpose(1, 2).contiguous()
    return Elsewhere(turned, source)


@dataclass(frozen=True)
class Strided(Softmax):
    """Rows of n entries that begin `stride` entries apart; the entries between stay as they are."""

    stride: int = 0

    def some(self, flat: Tensor) -> Some:
        n, entries = self.scores.shape[-1], self.scores.reshape(-1)
        rows, where = (flat // self.stride).unique(return_inverse=True)
        whole = rows * self.stride + n <= entries.numel()
        at = (rows[:, None] * self.stride + torch.arange(n)).clamp(max=entries.numel() - 1)
        real, b = self.compute(entries[at], rows)  # (rows, n)
        place = flat % self.stride
        inside = (place < n) & whole[where]
        place = place.clamp(max=n - 1)
        kept = torch.where(inside, real[where, place], entries[flat])
        return kept, torch.where(inside, b[where, place], 0.0)

    def whole(self) -> tuple[Tensor, Bound]:
        real, b = self.some(torch.arange(self.scores.numel()))
        return real.reshape(self.scores.shape), flat_bound(b.reshape(self.scores.shape))


@hypothesis("other row stride", axis="stride", ops=SOFTMAX, alone=True)
def _stride(recipe: Softmax, evidence: Evidence) -> Iterator[tuple[str, Recipe]]:
    """rows {} entries apart where they must be n apart"""
    n = recipe.scores.shape[-1]
    for stride in dict.fromkeys((2048, 512, 1024, n + 1, -(-n // 16) * 16, -(-n // 32) * 32)):
        if stride > n:
            yield f"{stride:,}", Strided(recipe.scores, recipe.compute, stride=stride)
