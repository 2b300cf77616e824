"""Fits: explanations that need no list, because they are measured from the result itself.

`plain` have no freedom: nothing written, part of it written, another tap's result.
`of_one_number` find rows, heads or pages in other places, or one number for all of the result,
where no listed change explains; `of_many_numbers` measure one a row, channel, head or frequency and
come last: so much freedom explains what it does not know.
A measured number is one that makes every element possible, never a mere best fit.
To add one: a generator of `Fit` here, and its place in one of the three lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from harness.bounds import HEAD
from harness.hypotheses.angles import angles, positions
from harness.hypotheses.fit import Fit, rounded_from
from harness.hypotheses.recipe import Given, Test, exactly, moved, possible, scaled
from harness.hypotheses.registry import base_recipe
from harness.verdict import POISON
from reference.rounding import bf16_bits, round_to_bf16

_PAGE: Final = 16
_PROBED: Final = 64  # columns by which rows are recognised
_HEADED: Final = ("q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "attn_v", "attention")
_LOOKED_AT: Final = 4096  # elements that are looked at before all of them
_SLACK: Final = 1e-3  # by which likely ratios may miss each other, and possible ones still meet
_MEASURED: Final = 8  # elements that a measured number must explain at least


def plain(test: Test) -> Iterator[Fit]:
    """Fits without a free number."""
    yield from _never_written(test)
    if test.integral:
        return
    yield from _partly_written(test)
    yield from _zeros(test)
    yield from _equals(test)


def of_one_number(test: Test) -> Iterator[Fit]:
    """Fits of other places, or of one number for the whole result."""
    if not test.integral:
        yield from _moved(test)
        yield from _one_ratio(test)
        yield from _one_eps(test)


def of_many_numbers(test: Test) -> Iterator[Fit]:
    """The first that explains of the fits of a number a row, channel, head or frequency."""
    if not test.integral:
        yield from islice(chain(_many_ratios(test), positions(test), angles(test)), 1)


# --- what was written -----------------------------------------------------------------------------


def _never_written(test: Test) -> Iterator[Fit]:
    before = test.evidence.before
    if before is None or not bool(test.kept.all()):
        return
    held = "poison" if bool((before == POISON).all()) else "what was there before"
    where = _elsewhere(test)
    if where:
        yield Fit("written elsewhere", where, whole=f"the result was written elsewhere: {where}")
    yield Fit(
        "never written",
        "an output that was never written",
        whole=f"the output was never written: it still holds {held}",
    )


def _elsewhere(test: Test) -> str | None:
    """Where in the cache the rows went, seen from where they belong."""
    context, layer = test.evidence.context, test.evidence.layer
    changes = [change for change in context.changes if change.buffer == "kv_cache"]
    if test.evidence.op != "kv_write" or not changes or context.table is None or layer is None:
        return None
    block_bytes, row_bytes = 2 * _PAGE * 1024, 1024
    found = changes[0].offset
    block, row = found // block_bytes, found % block_bytes // row_bytes
    page = "key" if row < _PAGE else "value"
    place = f"block {block}, {page} row {row % _PAGE}"
    owners = np.argwhere(context.table == block)
    if len(owners):
        slot, of_layer, logical = owners[0]
        place += f", which is position {logical * _PAGE + row % _PAGE} of slot {slot}"
        place += f", layer {of_layer}"
    if context.slots and context.positions:
        place += f", where position {context.positions[0]} of slot {context.slots[0]}"
        place += f", layer {layer}, belongs"
    return place


def _partly_written(test: Test) -> Iterator[Fit]:
    if not bool(test.kept[test.failing].all()) or bool(test.kept.all()):
        return
    recipe = base_recipe(test.evidence)
    real, bound = recipe.whole()
    flat = real.reshape(-1)
    off = torch.nonzero(~(test.value == round_to_bf16(flat))).squeeze(1)
    wrong = off[~possible(test.value[off], flat[off], bound.at(off)[0])]
    hole = torch.zeros(flat.numel(), dtype=torch.bool)
    hole[wrong] = True
    if not wrong.numel() or not bool(test.kept[wrong].all()):
        return
    region, filled = _region(hole, test)
    holes = Given(real, bound, unwritten=filled.reshape(real.shape))
    if test.verify(holes):
        poisoned = bool((test.got.reshape(-1)[filled.numpy()] == POISON).all())
        held = "hold poison" if poisoned else "are as they were before"
        yield Fit(
            "partly written",
            f"{region} not written",
            whole=f"{region} never written ({int(filled.sum()):,} elements {held}), "
            f"the other {int((~filled).sum()):,} possible",
        )


def _region(hole: Tensor, test: Test) -> tuple[str, Tensor]:
    """Words for the elements of a hole, and the hole filled up to them where all of it is kept."""
    shape = tuple(test.real.shape)
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    grid, kept = hole.reshape(rows, columns), test.kept.reshape(rows, columns)
    bad_rows, bad_columns = grid.any(1), grid.any(0)
    filled = bad_rows[:, None] & bad_columns[None, :]
    if not bool(kept[filled].all()):
        return f"{int(hole.sum()):,} elements", hole
    if len(shape) == 3:
        described = _span("(head, row)" if shape[0] == 32 else "row", bad_rows)
    else:
        described = _span("row", bad_rows)
    # Columns whose old value happens to be right make no hole: what is kept to the end counts.
    wide = kept[bad_rows].all(0)
    if bool(wide.all()):
        return described, (bad_rows[:, None] & torch.ones_like(bad_columns)[None, :]).reshape(-1)
    edge = torch.nonzero(bad_columns).squeeze(1)
    span = torch.zeros_like(bad_columns)
    span[int(edge[0]) : int(edge[-1]) + 1] = True
    if bool((wide | ~span).all()):
        bad_columns, filled = span, bad_rows[:, None] & span[None, :]
    text = _span("column", bad_columns)
    if not bool(bad_rows.all()):
        text = f"{text} of {described}"
    return text, filled.reshape(-1)


def _span(what: str, chosen: Tensor) -> str:
    """Such as "rows 1-16" or "3 columns"."""
    index = torch.nonzero(chosen).squeeze(1)
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 != len(index):
        return f"{len(index):,} {what}s"
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def _zeros(test: Test) -> Iterator[Fit]:
    if not bool(test.value.any()):
        yield Fit("zeros", "nothing but zeros, as from an operand of zeros,")


# --- other tensors --------------------------------------------------------------------------------


def _equals(test: Test) -> Iterator[Fit]:
    """The very bits of another tap, or of this tap at an earlier step."""
    context = test.evidence.context
    for tap, value in context.taps.items():
        if tap != test.evidence.op and _same(test, value):
            yield Fit("equals another tap", f"the result of {tap} in place of its own")
    earlier: Any = context.earlier.get(test.evidence.op)
    steps = [earlier] if isinstance(earlier, Tensor) else list(earlier or ())
    for back, value in enumerate(reversed(steps), start=1):
        if _same(test, value):
            step = "the step before" if back == 1 else f"{back} steps before"
            yield Fit("equals an earlier step", f"its own result of {step}")


def _same(test: Test, value: Tensor) -> bool:
    if value.dim() != test.real.dim() or value.shape[1:] != test.real.shape[1:]:
        return False
    if len(value) < len(test.real):
        return False
    return test.explains(exactly(value[: len(test.real)].to(torch.float64)))


# --- other places ---------------------------------------------------------------------------------


def _moved(test: Test) -> Iterator[Fit]:
    """Rows, heads or pages of the right result in other places."""
    shape = tuple(test.real.shape)
    index = torch.arange(test.real.numel()).reshape(shape)
    views: list[tuple[str, Tensor]] = []  # what moves, and the flat indices as (things, elements)
    if len(shape) == 2:
        views.append(("row", index))
        if test.evidence.op in _HEADED and shape[1] % HEAD == 0:
            views.append(("head", index.unflatten(1, (-1, HEAD)).transpose(0, 1).flatten(1)))
    elif shape[0] == 2:
        views.append(("row", index.transpose(0, 1).flatten(1)))  # kv_write: keys and values
    else:
        views.append(("head", index.flatten(1)))
        views.append(("query", index.transpose(0, 1).flatten(1)))
    want = bf16_bits(round_to_bf16(test.real)).reshape(-1)
    got = test.got.reshape(-1)
    for what, things in views:
        source = _matching(things, got, want)
        if source is None:
            continue
        flat = torch.empty(index.numel(), dtype=torch.int64)
        flat[things.reshape(-1)] = things[source].reshape(-1)
        places = flat.reshape(shape)
        made = Given(test.real.reshape(-1)[places], moved(test.bound, places))
        if test.explains(made):
            yield _told(what, source)


def _matching(things: Tensor, got: np.ndarray, want: np.ndarray) -> Tensor | None:
    """For each thing of the result, the thing of the right result that it looks most like."""
    count, size = things.shape
    if count < 2:
        return None
    probe = np.random.default_rng(size).permutation(size)[:_PROBED]
    mine, theirs = got[things.numpy()[:, probe]], want[things.numpy()[:, probe]]
    source = np.empty(count, dtype=np.int64)
    for i in range(count):
        alike = (mine[i] == theirs).sum(axis=1)  # (things,)
        best = int(alike.argmax())
        if alike[best] * 2 < len(probe):
            return None
        source[i] = i if alike[i] == alike[best] else best
    if (source == np.arange(count)).all():
        return None
    return torch.from_numpy(source)


def _told(what: str, source: Tensor) -> Fit:
    places = source.tolist()
    plural = "queries" if what == "query" else f"{what}s"
    others = [i for i, s in enumerate(places) if i != s]
    example = f"{what} {others[0]} is the right {what} {places[others[0]]}"
    if len(set(places)) < len(places):
        return Fit(
            f"wrong {plural}", f"{plural} of the right result in the wrong places ({example})"
        )
    name = f"{plural} exchanged"
    pages, rest = divmod(len(places), _PAGE)
    if what == "row" and pages > 1 and not rest:
        by_page = [places[i * _PAGE] for i in range(pages)]
        if places == [start + j for start in by_page for j in range(_PAGE)]:
            moved_pages = [start // _PAGE for start in by_page]
            return Fit("pages exchanged", f"pages of 16 rows in the order {moved_pages}")
    return Fit(name, f"{plural} of the right result in other places ({example})")


# --- ratios ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ratios:
    """For each group, ratios to the right result that make all of its elements possible."""

    low: Tensor
    high: Tensor

    @property
    def middle(self) -> Tensor:
        return (self.low + self.high) / 2


def _ratios(test: Test, group: Tensor, count: int) -> _Ratios | None:
    """group: number of each flat element's group. None where no ratio can explain."""
    everything = torch.arange(test.real.numel())
    if (
        everything.numel() > _LOOKED_AT
    ):  # some elements of few groups tell mostly that there is none
        few = everything[group < max(1, count // 64)]
        few = few[torch.from_numpy(np.random.default_rng(0).permutation(len(few))[:_LOOKED_AT])]
        if _ratios_at(test, torch.cat((few, test.sample)), group, count) is None:
            return None
    return _ratios_at(test, everything, group, count)


def _ratios_at(test: Test, flat: Tensor, group: Tensor, count: int) -> _Ratios | None:
    """As _ratios, of the elements `flat`."""
    real, value, group = test.real.reshape(-1)[flat], test.value[flat], group[flat]
    used = (real != 0) & real.isfinite()
    if not bool(value[used].isfinite().all()) or not bool((value[~used] == real[~used]).all()):
        return None
    r, v, g = real[used], value[used], group[used]
    low, high = rounded_from(v)
    weight = torch.zeros(count, dtype=torch.float64)
    weight.index_add_(0, g, v * r).div_(
        torch.zeros(count, dtype=torch.float64).index_add_(0, g, r * r)
    )
    _, d = test.bound.at(flat[used])
    off = d * weight.abs().nan_to_num(1.0)[g]
    one, two = (low - off) / r, (high + off) / r
    one, two = torch.where(r < 0, (high + off) / r, one), torch.where(r < 0, (low - off) / r, two)
    least = torch.full((count,), -torch.inf, dtype=torch.float64)
    most = torch.full((count,), torch.inf, dtype=torch.float64)
    least.scatter_reduce_(0, g, one, "amax")
    most.scatter_reduce_(0, g, two, "amin")
    least, most = torch.where(least.isinf(), 1.0, least), torch.where(most.isinf(), 1.0, most)
    if bool((least - most > _SLACK * (least.abs() + most.abs())).any()):
        return None
    return _Ratios(least, most)


def _scaled_by(test: Test, ratio: Tensor) -> bool:
    """Whether the right result times `ratio` (of its shape, or a scalar) explains everything."""
    ratio = torch.broadcast_to(ratio, test.real.shape)
    return test.explains(Given(test.real * ratio, scaled(test.bound, ratio)))


def _one_ratio(test: Test) -> Iterator[Fit]:
    if test.real.numel() < _MEASURED:
        return
    found = _ratios(test, torch.zeros(test.real.numel(), dtype=torch.int64), 1)
    if found is None or float(found.low) <= 1 <= float(found.high):
        return
    low, high = sorted((float(found.low), float(found.high)))
    ratio = simplest(low, high)
    if _scaled_by(test, torch.tensor(ratio, dtype=torch.float64)):
        yield Fit("constant ratio", f"a constant factor of {told(ratio)}, on the right result,")


def simplest(low: float, high: float) -> float:
    """The number of an interval with the fewest decimals, or a small fraction."""
    for digits in range(1, 12):
        found = float(f"{(low + high) / 2:.{digits}g}")
        if low <= found <= high:
            break
    for denominator in range(1, 65):
        over = Fraction(round((low + high) / 2 * denominator), denominator)
        if low <= float(over) <= high and len(f"{found:g}") > 3:
            return float(over)
    return found


def told(ratio: float) -> str:
    """A ratio as it reads best: 1/8, 8, 1.001."""
    fraction = Fraction(ratio).limit_denominator(2048)
    if float(fraction) == ratio and fraction.denominator > 1 and fraction.numerator == 1:
        return f"{fraction.numerator}/{fraction.denominator}"
    return f"{ratio:.9g}"


def _many_ratios(test: Test) -> Iterator[Fit]:
    shape = tuple(test.real.shape)
    index = torch.arange(test.real.numel())
    width = shape[-1]
    rows = index.numel() // width
    groups: list[tuple[str, Tensor, int]] = []
    if len(shape) == 3:
        groups.append(("head", index // (shape[1] * width), shape[0]))
    elif test.evidence.op in _HEADED and width % HEAD == 0:
        groups.append(("head", index % width // HEAD, width // HEAD))
    groups += [("row", index // width, rows), ("channel", index % width, width)]
    for what, group, count in groups:
        if index.numel() < _MEASURED * count or count < 2:
            continue
        found = _ratios(test, group, count)
        if found is None:
            continue
        trivial = (found.low <= 1) & (found.high >= 1)
        ratio = torch.where(trivial, 1.0, found.middle)
        if bool(trivial.all()) or not _scaled_by(test, ratio[group].reshape(shape)):
            continue
        yield Fit(f"ratio per {what}", _ratio_phrase(what, ratio, trivial))


def _ratio_phrase(what: str, ratio: Tensor, trivial: Tensor) -> str:
    least, most = float(ratio.min()), float(ratio.max())
    phrase = f"one factor a {what} on the right result, from {least:.6g} to {most:.6g},"
    wrong = int((~trivial).sum())
    if wrong < len(ratio):
        phrase += f" 1 in all but {_span(what, ~trivial)},"
    if 0.98 < least <= most < 1.02 and what == "row":
        phrase += " as of a sum kept in too few bits,"
    return phrase


# --- eps ------------------------------------------------------------------------------------------


def _one_eps(test: Test) -> Iterator[Fit]:
    """The eps of a norm, from the ratio of each row: (mean + 1e-5) / (mean + eps) = ratio^2."""
    if not test.evidence.op.endswith("norm"):
        return
    x = test.evidence.inputs["x"]
    rows, width = x.shape
    found = _ratios(test, torch.arange(rows * width) // width, rows)
    if found is None or not bool((found.low > 0).all()):
        return
    mean = x.square().mean(dim=-1) + 1e-5
    least, most = (mean / found.high.square() - mean), (mean / found.low.square() - mean)
    low, high = float(least.max()) + 1e-5, float(most.min()) + 1e-5
    if not low <= high or low <= 1e-5 <= high:
        return
    eps = simplest(max(low, 0.0), high)
    recipe: Any = base_recipe(test.evidence)
    if test.explains(replace(recipe, eps=eps)):
        yield Fit("other eps", f"an eps of {eps:.3g} where it must be 1e-5")


def every_name() -> Sequence[str]:
    """The names that fits may give."""
    return (
        *("never written", "written elsewhere", "partly written", "zeros"),
        "equals another tap",
        *("equals an earlier step", "rows exchanged", "heads exchanged", "queries exchanged"),
        *("pages exchanged", "wrong rows", "wrong heads", "wrong queries", "constant ratio"),
        *("other eps", "ratio per row", "ratio per channel", "ratio per head"),
        *("measured positions", "measured angles"),
    )
