"""The verdict on one tap: is every element a possible rounding of the real result?

`judge` knows no op. It compares bf16 bits with the interval [RNE(r - b), RNE(r + b)] around the
real result r, b from `bounds`; infinities and NaN are compared before any subtraction, +0 and -0
are equal. Where several verdicts hold, the one that says most about the cause wins:

1. some element impossible: `unchanged` (nothing was written at all, so the numbers mean nothing),
   else `poisoned` (NaN or infinity where the ideal is finite: it spreads, and hides the other
   errors), else `equivalent` if a harmless variant explains every element, else `diverged`;
2. every element possible: `systematic` (or `equivalent`) if too many are improbable;
3. otherwise `stray` if something else was written, else `exact` or `rounding`.

A stray write beside a failing output is told in the note: the output's own verdict is the one that
hypotheses explain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from harness.bounds import Bound, Group
from harness.result import FAILURES, Worst
from reference.rounding import from_bits, round_to_bf16

POISON: Final = 0xFFFF  # bf16 bits of memory that was never written; a stored NaN is 0x7FFF

_MANY: Final = 8  # improbable elements that chance explains
_SHARE: Final = 1000  # or one in so many
_BATCH: Final = 512  # elements rechecked before looking whether that settles it


@dataclass(frozen=True)
class Judgement:
    """What became of one tap. True unless it is a failure; `equivalent` is one only where `strict`.

    The figures compare got with want, the correctly rounded real result. max_abs, rel_l2 and cosine
    are over the elements where both are finite, max_ulp over those where neither is NaN (infinity
    is one step beyond the greatest number); passing_tolerance is max |got - want| with NaN and
    infinity counted: infinite if a finite number meets none. All are None for argmax, whose indices
    have no distance. worst is the impossible (else improbable, else merely rounded) element that
    uses up its allowance and the half step of the rounding most, None if every bit is correctly
    rounded. first_nan is the first element that is NaN or infinity where the ideal is finite.
    """

    verdict: str
    impossible: int
    improbable: int
    elements: int
    worst: Worst | None
    first_nan: tuple[int, ...] | None
    passing_tolerance: float | None
    max_abs: float | None
    rel_l2: float | None
    cosine: float | None
    max_ulp: int | None
    note: str | None = None
    strict: bool = False

    def __bool__(self) -> bool:
        return self.verdict not in FAILURES and not (self.strict and self.verdict == "equivalent")


def judge(
    got: np.ndarray,
    real: Tensor,
    bound: Bound,
    *,
    want: Tensor | None = None,
    unchanged: bool = False,
    stray: bool = False,
    recheck: Callable[[Tensor], Tensor] | None = None,
    equivalents: Callable[[Tensor], str | None] | None = None,
    strict: bool = False,
) -> Judgement:
    """Judge bf16 bits (uint16; for argmax int64 indices) against the real result of that shape.

    want: real rounded once to bf16, if the caller has it. unchanged: the output holds the very bits
    it held before the op. stray: the op changed something that is not its output. recheck:
    allowance of the elements with the given flat indices, the bound's own by default. equivalents:
    names a harmless variant that explains all of got (float64), if any.
    """
    if tuple(got.shape) != tuple(real.shape):
        raise ValueError(f"got must be of shape {tuple(real.shape)} (got {tuple(got.shape)})")
    if not real.is_floating_point():
        return _judge_indices(got, real, stray=stray, strict=strict)
    value = from_bits(np.ascontiguousarray(got)).reshape(-1)
    real = real.reshape(-1)
    want = round_to_bf16(real) if want is None else want.reshape(-1)
    # Everything beyond the first comparison looks only at the few elements not correctly rounded.
    off = torch.nonzero(~_equal(value, want)).squeeze(1)  # flat indices, int64
    b, d = bound.at(off)
    r = real[off]
    lo, hi = _interval(r, b)
    mine = value[off]
    outside = ~_inside(mine, r, lo, hi)
    unlikely = outside if d is b else outside | ~_within(mine, r, d)
    finite = want[off].isfinite()
    poisoned = off[outside & finite & ~mine.isfinite()]

    notes: list[str] = []
    verdict = "exact" if not off.numel() else "rounding"
    if outside.any():
        poison = int(np.count_nonzero(got == POISON)) if poisoned.numel() else 0
        if unchanged or poison == got.size:
            verdict = "unchanged"
            notes.append("the output was never written")
        elif poisoned.numel():
            verdict = "poisoned"
            notes.append(_poison_note(poisoned.numel(), poison, got.size))
        else:
            verdict = "diverged"
    elif found := _systematic(
        off[unlikely], d[unlikely], real, value, bound, recheck or bound.recheck
    ):
        verdict = "systematic"
        notes.append(found)
    if verdict in ("diverged", "systematic") and equivalents is not None:
        variant = equivalents(value.reshape(got.shape))
        if variant is not None:
            verdict = "equivalent"
            notes = [variant]
    if stray:
        verdict = verdict if verdict in FAILURES else "stray"
        notes.append("something that is not the op's output was written")

    worst = None
    if off.numel():
        kind = (
            outside if outside.any() else unlikely if unlikely.any() else torch.ones_like(outside)
        )
        at = _worst(mine, want[off], r, b, kind)
        worst = Worst(
            _index(off[at], got.shape),
            mine[at].item(),
            want[off[at]].item(),
            (lo[at].item(), hi[at].item()),
        )
    figures = _figures(value, want, off)
    return Judgement(
        verdict=verdict,
        impossible=int(outside.sum()),
        improbable=int(unlikely.sum()),
        elements=got.size,
        worst=worst,
        first_nan=_index(poisoned[0], got.shape) if poisoned.numel() else None,
        passing_tolerance=figures[0],
        max_abs=figures[1],
        rel_l2=figures[2],
        cosine=figures[3],
        max_ulp=figures[4],
        note="; ".join(notes) or None,
        strict=strict,
    )


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """bf16 steps (int64) between values on the bf16 grid (float64, no NaN).

    +0 and -0 are one value; infinity is one step beyond the greatest number.
    """
    return (_order(a) - _order(b)).abs()


def _order(x: Tensor) -> Tensor:
    bits = x.to(torch.bfloat16).view(torch.int16).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _judge_indices(got: np.ndarray, real: Tensor, *, stray: bool, strict: bool) -> Judgement:
    """Indices (argmax) are right or wrong; nothing is between."""
    value = torch.from_numpy(np.ascontiguousarray(got).astype(np.int64)).reshape(-1)
    want = real.reshape(-1)
    wrong = torch.nonzero(value != want).squeeze(1)
    worst = None
    if wrong.numel():
        first = wrong[0]
        right = float(want[first].item())
        worst = Worst(_index(first, got.shape), float(value[first].item()), right, (right, right))
    verdict = "diverged" if wrong.numel() else "stray" if stray else "exact"
    return Judgement(
        verdict=verdict,
        impossible=wrong.numel(),
        improbable=wrong.numel(),
        elements=got.size,
        worst=worst,
        first_nan=None,
        passing_tolerance=None,
        max_abs=None,
        rel_l2=None,
        cosine=None,
        max_ulp=None,
        note="something that is not the op's output was written" if stray else None,
        strict=strict,
    )


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Equal as results: +0 equals -0, any NaN equals any NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def _interval(r: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """RNE(r - b) and RNE(r + b); r itself where it is not finite, because inf - inf is NaN."""
    b = torch.where(r.isfinite(), b, 0.0)
    return round_to_bf16(r - b), round_to_bf16(r + b)


def _inside(value: Tensor, r: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Whether each value lies in its interval. NaN does only where the real result is NaN."""
    return ((lo <= value) & (value <= hi)) | (value.isnan() & r.isnan())


def _within(value: Tensor, r: Tensor, b: Tensor) -> Tensor:
    return _inside(value, r, *_interval(r, b))


def _systematic(
    improbable: Tensor,
    d: Tensor,
    real: Tensor,
    value: Tensor,
    bound: Bound,
    recheck: Callable[[Tensor], Tensor] | None,
) -> str | None:
    """Why the improbable elements (flat indices, and their d) are too many; None if they are not.

    Before saying so, each is rechecked with a finer allowance; the recheck stops when those that
    still stand are enough.
    """
    if _excess(improbable, bound) is None or recheck is None:
        return _excess(improbable, bound)
    standing = improbable[:0]
    for part, allowed in zip(improbable.split(_BATCH), d.split(_BATCH), strict=True):
        e = torch.maximum(recheck(part), allowed)
        standing = torch.cat((standing, part[~_within(value[part], real[part], e)]))
        if _excess(standing, bound) is not None:
            return _excess(improbable, bound)  # with the counts that the row reports
    return None


def _excess(improbable: Tensor, bound: Bound) -> str | None:
    """In words, of what too many elements are improbable: of all, or of a row, column or head."""
    count, elements = improbable.numel(), _size(bound.shape)
    if count > max(_MANY, elements / _SHARE):
        return f"{100 * count / elements:.2g} % of the elements are improbable"
    if count < _MANY:
        return None
    hit = torch.zeros(elements, dtype=torch.bool)
    hit[improbable] = True
    for group in bound.groups:
        size = _size(tuple(group.view[axis] for axis in group.over))
        counts = hit.reshape(group.view).sum(dim=group.over)
        most = int(counts.max())
        if most >= _MANY and 2 * most >= size:
            return f"{_name(group, counts)}: {most} of {size} elements are improbable"
    return None


def _name(group: Group, counts: Tensor) -> str:
    """Such as "column 7", or "row (3, 12)" where each head has its own rows."""
    index = _index(counts.argmax(), tuple(counts.shape))
    return f"{group.name} {index[0] if len(index) == 1 else index}"


def _worst(value: Tensor, want: Tensor, r: Tensor, b: Tensor, kind: Tensor) -> Tensor:
    """Position of the element, among `kind`, farthest from r in units of what it may be off."""
    step = torch.maximum(want.abs(), torch.tensor(2.0**-126, dtype=torch.float64))
    half = torch.exp2(step.clamp(max=2.0**127).log2().floor() - 8)
    excess = (value - r).abs() / (b.nan_to_num(0.0) + half)
    excess = torch.where(_equal(value, r), 0.0, excess.nan_to_num(torch.inf))
    return torch.where(kind, excess, -1.0).argmax()


def _figures(value: Tensor, want: Tensor, off: Tensor) -> tuple[float, float, float, float, int]:
    """passing_tolerance, max_abs, rel_l2, cosine and max_ulp of the elements `off` that differ."""
    both = value.isfinite() & want.isfinite()
    if not off.numel():
        return 0.0, 0.0, 0.0, 1.0, 0
    x, y = (value, want) if both.all() else (value[both], want[both])
    differs = off[both[off]]
    gap = (value[differs] - want[differs]).abs()
    largest = gap.max().item() if gap.numel() else 0.0
    base = torch.linalg.vector_norm(y).item()
    error = torch.linalg.vector_norm(gap).item()
    size = torch.linalg.vector_norm(x).item()
    rel_l2 = error / base if base else (torch.inf if error else 0.0)
    cosine = torch.dot(x / (size or 1.0), y / (base or 1.0)).item() if error else 1.0
    numbers = off[~(value[off].isnan() | want[off].isnan())]
    steps = ulp_distance(value[numbers], want[numbers])
    return (
        largest if differs.numel() == off.numel() else torch.inf,
        largest,
        rel_l2,
        cosine,
        int(steps.max()) if steps.numel() else 0,
    )


def _poison_note(poisoned: int, poison: int, elements: int) -> str:
    note = f"{poisoned} of {elements} elements are NaN or infinity where the ideal is finite"
    return f"{note}; {poison} of them were never written" if poison else note


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _index(flat: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(flat), shape))
