"""Recipes: ways to compute an op, right or wrong, that can be held against what was stored.

A recipe gives its real (float64, unrounded) result and how far float32 arithmetic may end from it,
for a few elements (`some`) or all (`whole`). An op's base recipe is the right one; a hypothesis
changes one thing about it. `Test` holds recipes against the evidence: first at a sample of the
elements, and whole only what survives that, by the rules of `harness.verdict` itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from harness.bounds import Bound, U, bound_of
from harness.hypotheses.evidence import Evidence
from harness.verdict import POISON, judge
from reference.rounding import from_bits, round_to_bf16

Store = Callable[[Tensor], Tensor]  # float64 to float64 on the bf16 grid, monotonic
Some = tuple[Tensor, Tensor]  # of the asked elements: the real result, and b

_ANCHORS: Final = 12  # places where a sample looks, 8 of them where the right op fails
_FIRST: Final = 6  # places tried before the sample, half of them failing
_SPREAD: Final = 6  # elements near each
_SEGMENT: Final = 64  # how near: within a head
_ASKED: Final = 4096  # elements whose allowance is asked for, to find failing ones
_MANY: Final = 8  # improbable elements that chance explains, and
_SHARE: Final = 1000  # one in so many (harness.verdict's rule)


def truncated(x: Tensor) -> Tensor:
    """A float32 cut to bf16: the low 16 bits dropped."""
    bits = x.to(torch.float32).view(torch.int32) & -65536
    return bits.view(torch.float32).to(torch.float64)


def ties_away(x: Tensor) -> Tensor:
    """A float32 rounded to the nearest bf16, ties away from zero: half a step added, then cut."""
    single = x.to(torch.float32)
    bits = single.view(torch.int32) + 0x8000
    rounded = (bits & -65536).view(torch.float32).to(torch.float64)
    return torch.where(single.isfinite(), rounded, x)


@dataclass(frozen=True)
class Recipe(ABC):
    """A way to compute an op. store: how the float32 result becomes bf16.

    unwritten: elements (bool, of the result's shape) that keep what was there before the op.
    """

    store: Store = field(default=round_to_bf16, kw_only=True)
    unwritten: Tensor | None = field(default=None, kw_only=True)

    @abstractmethod
    def some(self, flat: Tensor) -> Some:
        """The real result and b at flat indices (int64), float64."""

    @abstractmethod
    def whole(self) -> tuple[Tensor, Bound]:
        """The real result and its bound."""


@dataclass(frozen=True)
class Given(Recipe):
    """A result that is cheap to compute at once."""

    real: Tensor
    bound: Bound

    def some(self, flat: Tensor) -> Some:
        return self.real.reshape(-1)[flat], self.bound.at(flat)[0]

    def whole(self) -> tuple[Tensor, Bound]:
        return self.real, self.bound


@dataclass(frozen=True)
class Elsewhere(Recipe):
    """Another recipe's elements in other places. source: flat index there of each element here."""

    inner: Recipe
    source: Tensor

    def some(self, flat: Tensor) -> Some:
        return self.inner.some(self.source.reshape(-1)[flat])

    def whole(self) -> tuple[Tensor, Bound]:
        real, bound = self.inner.whole()
        return real.reshape(-1)[self.source], moved(bound, self.source)


@dataclass(frozen=True)
class Added(Recipe):
    """Another recipe's result, added in float32 to what the buffer held."""

    inner: Recipe
    held: Tensor

    def some(self, flat: Tensor) -> Some:
        real, b = self.inner.some(flat)
        held = self.held.reshape(-1)[flat]
        return real + held, b + U * (real.abs() + held.abs())

    def whole(self) -> tuple[Tensor, Bound]:
        real, bound = self.inner.whole()
        one = torch.ones((), dtype=torch.float64)
        return real + self.held, scaled(bound, one, U * (real.abs() + self.held.abs()))


def exactly(real: Tensor, **options: Any) -> Given:
    """A result of which every bit is known."""
    return Given(
        real, flat_bound(torch.zeros((), dtype=torch.float64).expand(real.shape)), **options
    )


def within(real: Tensor, b: Tensor) -> Given:
    """A result with its own allowance, of the same shape."""
    return Given(real, flat_bound(b.expand(real.shape)))


def judged(op: str, inputs: dict[str, Any], real: Tensor) -> Given:
    """A result with the op's own bound for these inputs."""
    return Given(real, bound_of(op, inputs, real))


def flat_bound(b: Tensor) -> Bound:
    """A bound that allows b, strictly and statistically."""
    flat = b.reshape(-1)
    return Bound(tuple(b.shape), lambda at: (flat[at], flat[at]))


def moved(bound: Bound, source: Tensor) -> Bound:
    """The bound of a result that is another one's elements in other places.

    source: flat index there of each element here, int64 of the new shape.
    """
    flat = source.reshape(-1)
    recheck = bound.recheck
    return Bound(
        tuple(source.shape),
        lambda at: bound.at(flat[at]),
        recheck=None if recheck is None else lambda at: recheck(flat[at]),
    )


def scaled(bound: Bound, factor: Tensor, extra: Tensor | None = None) -> Bound:
    """The bound of a result times `factor` (of its shape, or a scalar), plus `extra`."""
    size = torch.broadcast_to(factor.abs(), bound.shape).reshape(-1)
    more = None if extra is None else torch.broadcast_to(extra, bound.shape).reshape(-1)
    inner = bound.recheck

    def at(flat: Tensor) -> tuple[Tensor, Tensor]:
        b, d = bound.at(flat)
        add = 0.0 if more is None else more[flat]
        return b * size[flat] + add, d * size[flat] + add

    def recheck(flat: Tensor) -> Tensor:
        assert inner is not None
        return inner(flat) * size[flat] + (0.0 if more is None else more[flat])

    return Bound(bound.shape, at, bound.groups, None if inner is None else recheck)


# --- holding recipes against the evidence ---------------------------------------------------------


class Test:
    """One failing op, and whether a recipe explains all of what it stored."""

    __test__ = False  # not for pytest

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.got = np.ascontiguousarray(evidence.got)
        self.real = evidence.real
        self.integral = not evidence.real.is_floating_point()
        if self.integral:
            self.value = torch.from_numpy(self.got.astype(np.int64)).reshape(-1)
            self.bound = flat_bound(torch.zeros(self.real.shape, dtype=torch.float64))
            self.failing = torch.nonzero(self.value != self.real.reshape(-1)).squeeze(1)
        else:
            self.value = from_bits(self.got).reshape(-1)
            self.bound = bound_of(evidence.op, evidence.inputs, evidence.real)
            self.failing = self._failing()
        self.sample = self._sample()
        self.stages = self._stages()

    def _failing(self) -> Tensor:
        """Flat indices of elements that the right op can not give, or not likely; few of many."""
        r = self.real.reshape(-1)
        off = torch.nonzero(~_equal(self.value, round_to_bf16(r))).squeeze(1)
        if off.numel() > _ASKED:
            asked = off[_shuffled(off.numel())[:_ASKED]]
            found = self._outside(asked, 0)
            if found.numel() > _MANY:
                return found
        found = self._outside(off, 0)
        return found if found.numel() else self._outside(off, 1)

    def _outside(self, flat: Tensor, which: int) -> Tensor:
        allowed = self.bound.at(flat)[which]
        return flat[~possible(self.value[flat], self.real.reshape(-1)[flat], allowed)]

    def _sample(self) -> Tensor:
        """Where recipes are tried first: around failing elements, and anywhere."""
        size = self.value.numel()
        order = _shuffled(max(size, 1))
        bad = self.failing[_shuffled(self.failing.numel())[: _ANCHORS * 2 // 3]]
        anchors = torch.cat((bad, order[: _ANCHORS - bad.numel()]))
        near = anchors[:, None] // _SEGMENT * _SEGMENT + order[:_SPREAD] % _SEGMENT  # (12, 6)
        return torch.cat((anchors, near.reshape(-1).clamp(max=size - 1))).unique()

    def _stages(self) -> tuple[Tensor, ...]:
        """A failing element and one near it, a few more places, the whole sample.

        One more near each, because an element of the same head costs attention next to nothing.
        """
        bad = self.failing[_shuffled(self.failing.numel())[: _FIRST // 2]]
        others = self.sample[_shuffled(self.sample.numel())[: _FIRST - bad.numel()]]
        anchors = torch.cat((bad, others))
        near = anchors // _SEGMENT * _SEGMENT + (anchors + 17) % _SEGMENT
        near = near.clamp(max=self.value.numel() - 1)
        lead = torch.cat((anchors[:1], near[:1])).unique()
        return lead, torch.cat((anchors, near)).unique(), self.sample

    def explains(self, recipe: Recipe) -> bool:
        """Whether every element of the result is possible, and none too improbable, under it."""
        return self.survives(recipe) and self.verify(recipe)

    def survives(self, recipe: Recipe) -> bool:
        """Whether the sampled elements are possible: two, then a few, then all of the sample."""
        return all(self.all_possible(recipe, stage) for stage in self.stages)

    def all_possible(self, recipe: Recipe, flat: Tensor) -> bool:
        """Whether the elements at flat indices are possible under a recipe."""
        real, b = recipe.some(flat)
        value = self.value[flat]
        if self.integral:
            return bool((real == value).all())
        ok = possible(value, real, b, recipe.store) & ~self.untouched[flat]
        if recipe.unwritten is not None:
            hole = recipe.unwritten.reshape(-1)[flat]
            ok = torch.where(hole, self.kept[flat], ok)
        return bool(ok.all())

    @cached_property
    def untouched(self) -> Tensor:
        """Which elements (flat) hold poison that nobody wrote: a stored NaN has other bits."""
        return self.kept & torch.from_numpy((self.got == POISON).reshape(-1))

    @cached_property
    def kept(self) -> Tensor:
        """Which elements (flat) hold the very bits that were there before."""
        before = self.evidence.before
        if before is None:
            return torch.zeros(self.value.numel(), dtype=torch.bool)
        return torch.from_numpy((self.got == before).reshape(-1))

    def verify(self, recipe: Recipe) -> bool:
        """As `explains`, over all elements."""
        real, bound = recipe.whole()
        if self.integral:
            return bool((real.reshape(-1) == self.value).all())
        if recipe.unwritten is None and bool(self.untouched.any()):
            return False
        if recipe.unwritten is not None:
            hole = recipe.unwritten.reshape(-1)
            if bool((self.untouched & ~hole).any()) or not self.kept[hole].all():
                return False
            real, bound = _with_hole(real, bound, hole, self.value)
        if recipe.store is round_to_bf16:
            judgement = judge(self.got, real.reshape(self.real.shape), bound)
            return judgement.verdict in ("exact", "rounding")
        flat = real.reshape(-1)
        off = torch.nonzero(~_equal(self.value, recipe.store(flat))).squeeze(1)
        b, d = bound.at(off)
        if not possible(self.value[off], flat[off], b, recipe.store).all():
            return False
        unlikely = off[~possible(self.value[off], flat[off], d, recipe.store)]
        return unlikely.numel() <= max(_MANY, self.value.numel() / _SHARE)


def possible(value: Tensor, real: Tensor, b: Tensor, store: Store = round_to_bf16) -> Tensor:
    """Whether each value lies between store(real - b) and store(real + b); NaN only where real is.

    Infinite real results allow nothing else.
    """
    b = torch.where(real.isfinite(), b, 0.0)
    low, high = store(torch.stack((real - b, real + b)))
    inside = (low <= value) & (value <= high)
    return inside | (value.isnan() & real.isnan())


def _with_hole(real: Tensor, bound: Bound, hole: Tensor, value: Tensor) -> tuple[Tensor, Bound]:
    def at(flat: Tensor) -> tuple[Tensor, Tensor]:
        b, d = bound.at(flat)
        return torch.where(hole[flat], 0.0, b), torch.where(hole[flat], 0.0, d)

    patched = torch.where(hole, value, real.reshape(-1)).reshape(real.shape)
    return patched, replace(bound, at=at)


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _shuffled(count: int) -> Tensor:
    """Numbers below `count` in an order that is the same every time; at most 65536 of them."""
    generator = np.random.default_rng(count)
    if count > 65536:
        return torch.from_numpy(generator.integers(0, count, 65536))
    return torch.from_numpy(generator.permutation(count))
