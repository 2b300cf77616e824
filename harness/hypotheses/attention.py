"""Decode attention over paged keys and values: which rows, which heads, which weights.

Rows that were never written hold `Context.poison`; what reads them gives NaN, and that pattern is
part of a prediction. To add a way to weigh: a function in `WEIGHTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from harness.bounds import HEAD, SCALE, TINY, Bound, U
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe, Some
from harness.hypotheses.registry import base, hypothesis
from harness.hypotheses.scores import HEADS
from harness.hypotheses.softmax import float32_range

ATTENTION: Final = ("attention",)
PAGE: Final = 16
_PAGE_ELEMENTS: Final = PAGE * 512  # of keys, then as many of values

# Scores (heads, len) -> the weight of each value before the division, and what is divided by
Weigh = Callable[[Tensor], tuple[Tensor, Tensor]]


def _soft(s: Tensor) -> tuple[Tensor, Tensor]:
    e = torch.exp(s - s.amax(dim=-1, keepdim=True))
    return e, e.sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Attention(Recipe):
    """Each row of q (m, 2048) with its own sequence's rows, (len, 512) each."""

    q: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    heads: Tensor = field(default_factory=lambda: torch.arange(HEADS) // 4)
    scale: float = SCALE
    part: slice = field(default_factory=lambda: slice(None))
    weigh: Weigh = _soft

    def some(self, flat: Tensor) -> Some:
        width = self.q.shape[1]
        real = torch.empty(len(flat), dtype=torch.float64)
        b = torch.empty(len(flat), dtype=torch.float64)
        for row in (flat // width).unique().tolist():
            here = flat // width == row
            heads, where = (flat[here] % width // HEAD).unique(return_inverse=True)
            made, allowed, _ = self._row(row, heads, strict=True)  # (heads, 64) each
            real[here] = made[where, flat[here] % HEAD]
            b[here] = allowed[where, flat[here] % HEAD]
        return real, b

    def whole(self) -> tuple[Tensor, Bound]:
        rows = [self._row(row, torch.arange(len(self.heads))) for row in range(len(self.q))]
        real, b, d = (torch.stack(parts) for parts in zip(*rows, strict=True))  # (m, 32, 64)
        b, d = b.reshape(-1), d.reshape(-1)
        real = real.flatten(1)
        return real, Bound(tuple(real.shape), lambda at: (b[at], d[at]))

    def _row(self, row: int, heads: Tensor, strict: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The real result of some heads of one row, b and d (if strict, b again), (heads, 64) each.

        As bounds._attention, whose sums of p|v| become sums of weights over the denominator; where
        that is not the weights' own sum, its error counts for the whole of |r|.
        """
        q = self.q[row].reshape(-1, HEAD)[heads][:, None, self.part]  # (heads, 1, 64)
        k = self._of(self.keys[row], heads)[..., self.part]  # (heads, len, 64)
        v = self._of(self.values[row], heads)  # (heads, len, 64)
        length = k.shape[1]
        s = (q @ k.transpose(1, 2))[:, 0] * self.scale  # (heads, len)
        weight, total = self.weigh(s)
        p = weight / total  # (heads, len)
        real = float32_range((weight[:, None] @ v)[:, 0]) / total  # (heads, 64)
        absolute = (q.abs() @ k.abs().transpose(1, 2))[:, 0] * self.scale
        norm = (q.square() @ k.square().transpose(1, 2))[:, 0].sqrt() * self.scale
        error = 2 * U * HEAD / (1 - 2 * U * HEAD) * absolute + 2 * U * s.abs()
        worst = 2 * error.amax(dim=-1, keepdim=True) + (4 * length + 8) * U  # (heads, 1)
        # What underflows counts for more where the denominator is small itself.
        lost = TINY * (1 + v.abs().sum(dim=1)) * (1 / total).clamp(min=1.0).nan_to_num(1.0, 1.0)
        b = (p[:, None].abs() @ v.abs())[:, 0] * worst + lost
        if self.weigh is not _soft:
            b = b + real.abs() * worst
        if strict:
            return real, b, b
        away = (s.amax(dim=-1, keepdim=True) - s).abs()
        delta = HEAD / 2 * U * (s.abs() + norm) + 4 * U + U * away
        moved = (p * delta).square()[:, None]  # (heads, 1, len)
        around = 2 * real[:, None] * (moved @ v) - real.square()[:, None] * moved.sum(-1, True)
        spread = (moved @ v.square() - (around if self.weigh is _soft else 0.0))[:, 0]
        rest = 3 * spread.clamp(min=0).sqrt()
        if self.weigh is not _soft:
            rest = rest + 3 * real.abs() * delta.amax(dim=-1, keepdim=True)
        walk = U * length / 2 * (real.abs() + (p.square()[:, None] @ v.square())[:, 0].sqrt())
        return real, b, walk + rest + 2 * U * real.abs() + lost

    def _of(self, rows: Tensor, heads: Tensor) -> Tensor:
        """(len, 512) as the given query heads see it: (heads, len, 64)."""
        return rows.unflatten(1, (-1, HEAD))[:, self.heads[heads]].transpose(0, 1)


@base(*ATTENTION)
def _attention(evidence: Evidence) -> Attention:
    inputs = evidence.inputs
    return Attention(inputs["q"], list(inputs["keys"]), list(inputs["values"]))


# --- which rows of the cache ----------------------------------------------------------------------

Rows = Callable[[Tensor], Tensor | None]  # (len, 512) -> the rows read; None: not applicable


def _reading(recipe: Attention, rows: Rows) -> Attention | None:
    """Keys and values both read through `rows`."""
    keys = [made for made in map(rows, recipe.keys) if made is not None and len(made)]
    values = [made for made in map(rows, recipe.values) if made is not None]
    if len(keys) < len(recipe.keys):
        return None
    return replace(recipe, keys=keys, values=values)


def _longer(rows: Tensor, length: int, evidence: Evidence) -> Tensor | None:
    """With rows that were never written, up to `length`."""
    if evidence.context.poison is None:
        return None
    more = torch.full((length - len(rows), rows.shape[1]), evidence.context.poison)
    return torch.cat((rows, more.to(torch.float64)))


def _to_length(rows: Tensor, length: int, evidence: Evidence) -> Tensor | None:
    return rows[:length] if length <= len(rows) else _longer(rows, length, evidence)


def _lengthened(by: int, evidence: Evidence) -> Rows:
    return lambda rows: _to_length(rows, max(0, len(rows) + by), evidence)


@hypothesis("length off", axis="length", ops=ATTENTION)
def _length(recipe: Attention, evidence: Evidence) -> Iterator[tuple[str, Attention]]:
    """a length of {}"""
    for by in (-1, -2, -PAGE, 1, PAGE):
        made = _reading(recipe, _lengthened(by, evidence))
        if made is not None:
            yield f"{abs(by)} too {'much (rows never written)' if by > 0 else 'little'}", made
    lengths = [len(k) for k in recipe.keys]
    if len(set(lengths)) > 1:
        both = [
            [_to_length(rows, n, evidence) for rows, n in zip(some, lengths[::-1], strict=True)]
            for some in (recipe.keys, recipe.values)
        ]
        keys, values = ([rows for rows in some if rows is not None] for some in both)
        if len(keys) == len(lengths):
            yield "the other row's sequence", replace(recipe, keys=keys, values=values)


@hypothesis("part of the sequence", axis="length", ops=ATTENTION)
def _part(recipe: Attention, evidence: Evidence) -> Iterator[tuple[str, Attention]]:
    """attention over {}"""
    parts: dict[str, Rows] = {
        "the first token only": lambda rows: rows[:1],
        "the newest token only": lambda rows: rows[-1:],
        "all tokens but the first": lambda rows: rows[1:],
        "the first page only": lambda rows: rows[:PAGE],
        "the last page only": lambda rows: rows[(len(rows) - 1) // PAGE * PAGE :],
        "whole pages only, without the last tokens,": lambda rows: rows[: len(rows) // PAGE * PAGE],
        "all pages but the first": lambda rows: rows[PAGE:],
        "the first 64 tokens": lambda rows: rows[:64],
        "the newest 64 tokens": lambda rows: rows[-64:],
    }
    for label, rows in parts.items():
        made = _reading(recipe, rows)
        if made is not None:
            yield label, made


@hypothesis("stale last page", axis="length", ops=ATTENTION)
def _tail(recipe: Attention, evidence: Evidence) -> Attention | None:
    """the last page read to its end, past the length,"""
    return _reading(recipe, lambda rows: _longer(rows, -(-len(rows) // PAGE) * PAGE, evidence))


@hypothesis("pages never written", axis="pages", ops=ATTENTION, alone=True)
def _nowhere(recipe: Attention, evidence: Evidence) -> Attention | None:
    """pages that were never written (another layer's, another slot's, or a wrong block number)"""
    poison = evidence.context.poison
    if poison is None:
        return None
    return _reading(recipe, lambda rows: torch.full_like(rows, poison))


@hypothesis("other pages", axis="pages", ops=ATTENTION, alone=True)
def _other_pages(recipe: Attention, evidence: Evidence) -> Iterator[tuple[str, Attention]]:
    """the pages of {}"""
    count = len(recipe.keys)

    def taken(pages: Sequence[tuple[Tensor, Tensor]]) -> Attention | None:
        both: list[list[Tensor]] = [[], []]
        for row in range(count):
            for which, own in enumerate((recipe.keys[row], recipe.values[row])):
                made = _to_length(pages[row][which], len(own), evidence)
                if made is None:
                    return None
                both[which].append(made)
        return replace(recipe, keys=both[0], values=both[1])

    own = list(zip(recipe.keys, recipe.values, strict=True))
    if count > 1:
        sources = {"the first row's sequence": own[:1] * count, "the other row's": own[::-1]}
    else:
        sources = {}
    sources |= {label: [pages] * count for label, pages in evidence.context.other_slots.items()}
    for label, pages in sources.items():
        made = taken(pages)
        if made is not None:
            yield label, made


Order = Callable[[int], list[int]]  # number of pages -> the page read for each


ORDERS: Final[dict[str, Order]] = {
    "in reverse": lambda count: list(range(count))[::-1],
    "one place on": lambda count: [(i + 1) % count for i in range(count)],
    "one place back": lambda count: [(i - 1) % count for i in range(count)],
    "always the first one": lambda count: [0] * count,
    "always the last one": lambda count: [count - 1] * count,
}


def _paged(rows: Tensor, order: Order, evidence: Evidence) -> Tensor | None:
    count = -(-len(rows) // PAGE)
    if count < 2:
        return None
    full = _longer(rows, count * PAGE, evidence)
    if full is None:
        return None
    return full.unflatten(0, (count, PAGE))[order(count)].flatten(0, 1)[: len(rows)]


@hypothesis("page order", axis="order", ops=ATTENTION, alone=True)
def _page_order(recipe: Attention, evidence: Evidence) -> Iterator[tuple[str, Attention]]:
    """pages read in another order than they were written, {}"""
    for label, order in ORDERS.items():

        def read(rows: Tensor, order: Order = order) -> Tensor:
            paged = _paged(rows, order, evidence)
            return rows if paged is None else paged  # one page has no order

        made = _reading(recipe, read)
        if made is not None:
            yield label, made
        keys = [read(k) for k in recipe.keys]
        yield f"{label} (keys only)", replace(recipe, keys=keys)


@hypothesis("place within the page", axis="order", ops=ATTENTION, alone=True)
def _place(recipe: Attention, evidence: Evidence) -> Iterator[tuple[str, Attention]]:
    """{}"""
    first: Rows = lambda rows: rows[torch.arange(len(rows)) // PAGE * PAGE]  # noqa: E731
    made = _reading(recipe, first)
    if made is not None:
        yield "each page's first row read for all its tokens", made
    poison = _longer(recipe.keys[0][:0], 1, evidence)
    if poison is not None:
        made = _reading(recipe, lambda rows: torch.cat((rows[1:], poison)))
        if made is not None:
            yield "each token's next row read in place of its own", made


@hypothesis("row stride", axis="order", ops=ATTENTION, alone=True)
def _stride(recipe: Attention, evidence: Evidence) -> Iterator[tuple[str, Attention]]:
    """rows of a page {} elements apart where they are 512"""

    def read(rows: Tensor, stride: int) -> Tensor | None:
        count = -(-len(rows) // PAGE)
        full = _longer(rows, count * PAGE, evidence)
        if full is None:
            return None
        pages = full.reshape(count, _PAGE_ELEMENTS)
        token, column = torch.arange(PAGE)[:, None], torch.arange(rows.shape[1])
        return pages[:, token * stride + column].flatten(0, 1)[: len(rows)]

    def reading(stride: int) -> Rows:
        return lambda rows: read(rows, stride)

    for stride in (64, 128, 256):
        made = _reading(recipe, reading(stride))
        if made is not None:
            yield f"{stride}", made


# --- which operand --------------------------------------------------------------------------------


@hypothesis("K and V exchanged", axis="operands", ops=ATTENTION)
def _exchanged(recipe: Attention, evidence: Evidence) -> Attention:
    """keys read as values and values as keys"""
    return replace(recipe, keys=recipe.values, values=recipe.keys)


@hypothesis("values read from the key page", axis="operands", ops=ATTENTION)
def _keys_twice(recipe: Attention, evidence: Evidence) -> Attention:
    """values read from the key page (its offset missing)"""
    return replace(recipe, values=recipe.keys)


@hypothesis("keys read from the value page", axis="operands", ops=ATTENTION)
def _values_twice(recipe: Attention, evidence: Evidence) -> Attention:
    """keys read from the value page"""
    return replace(recipe, keys=recipe.values)


@hypothesis("unrotated keys", axis="operands", ops=ATTENTION)
def _unrotated(recipe: Attention, evidence: Evidence) -> Iterator[tuple[str, Attention]]:
    """{} as they were before RoPE"""
    before = evidence.context.unrotated
    if before is not None and [len(k) for k in before] == [len(k) for k in recipe.keys]:
        yield "keys", replace(recipe, keys=list(before))
    newest = evidence.context.taps.get("k_proj")
    if newest is not None and len(newest) == len(recipe.keys):
        keys = [torch.cat((k[:-1], newest[r : r + 1])) for r, k in enumerate(recipe.keys)]
        yield "the newest keys", replace(recipe, keys=keys)


@hypothesis("first row's query", axis="query", ops=ATTENTION, alone=True)
def _first_query(recipe: Attention, evidence: Evidence) -> Iterator[tuple[str, Attention]]:
    """{} query for every row"""
    if len(recipe.q) > 1:
        yield "the first row's", replace(recipe, q=recipe.q[:1].expand(recipe.q.shape))
        yield "the other row's", replace(recipe, q=recipe.q.flip(0))


# --- weights --------------------------------------------------------------------------------------


def _running(s: Tensor) -> Tensor:
    """exp(s - the maximum so far): what a token adds before later maxima rescale it."""
    return torch.exp(s - s.cummax(dim=-1).values)


def _first_only(s: Tensor) -> tuple[Tensor, Tensor]:
    e, _ = _soft(s)
    return e, e[..., :1]


def _first_uncorrected(s: Tensor) -> tuple[Tensor, Tensor]:
    e, total = _soft(s)
    return e, torch.ones_like(total)


def _from_zero(s: Tensor) -> tuple[Tensor, Tensor]:
    e = float32_range(torch.exp(s - s.amax(dim=-1, keepdim=True).clamp(min=0.0)))
    return e, e.sum(dim=-1, keepdim=True)


def _unshifted(s: Tensor) -> tuple[Tensor, Tensor]:
    e = float32_range(torch.exp(s))
    return e, float32_range(e.sum(dim=-1, keepdim=True))


WEIGHTS: Final[dict[str, tuple[str, Weigh]]] = {
    "denominator of the first token": (
        "a denominator of the first token alone, rescaled as the maximum moves,",
        _first_only,
    ),
    "no division": (
        "no division by the sum (or by the first token's part of it, 1, alone)",
        _first_uncorrected,
    ),
    "last token missing from the denominator": (
        "a denominator without the newest token",
        lambda s: (_soft(s)[0], _soft(s)[0][..., :-1].sum(dim=-1, keepdim=True)),
    ),
    "nothing rescaled": (
        "neither sum rescaled when the maximum moves",
        lambda s: (_running(s), _running(s).sum(dim=-1, keepdim=True)),
    ),
    "accumulator not rescaled": (
        "the weighted sum not rescaled when the maximum moves",
        lambda s: (_running(s), _soft(s)[1]),
    ),
    "denominator not rescaled": (
        "the denominator not rescaled when the maximum moves",
        lambda s: (_soft(s)[0], _running(s).sum(dim=-1, keepdim=True)),
    ),
    "maximum starts at 0": ("a maximum that starts at 0, not at -infinity,", _from_zero),
    "no shift by the maximum": ("no maximum subtracted before exp", _unshifted),
    "base 2": (
        "powers of 2 where exponentials belong",
        lambda s: _soft(s * 0.6931471805599453),
    ),
    "no softmax": (
        "raw scores as weights, without a softmax,",
        lambda s: (s, torch.ones_like(s[..., :1])),
    ),
    "equal weights": (
        "equal weights for all tokens",
        lambda s: _soft(torch.zeros_like(s)),
    ),
}


def _weighing(weigh: Weigh) -> Callable[[Attention, Evidence], Attention]:
    return lambda recipe, evidence: replace(recipe, weigh=weigh)


for _name, (_says, _weigh) in WEIGHTS.items():
    hypothesis(_name, axis="weights", ops=ATTENTION, says=_says)(_weighing(_weigh))
