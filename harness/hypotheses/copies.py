"""Ops that copy or choose: embed, kv_write and argmax. Every bit of theirs is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from harness.bounds import Bound, bound_of
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Given, Recipe, Some, exactly, flat_bound
from harness.hypotheses.registry import base, hypothesis
from harness.hypotheses.weights import read_as_bf16
from reference import ops as reference
from reference.config import EMBED

_PAGE: Final = 16  # tokens
_ROUNDING_UP: Final = 45.25483399593904  # sqrt(2048)

# --- embed ----------------------------------------------------------------------------------------


@base("embed")
def _embed(evidence: Evidence) -> Given:
    return exactly(evidence.real)


@hypothesis("another token's row", axis="token", ops=("embed",))
def _token(recipe: Given, evidence: Evidence) -> Iterator[tuple[str, Given]]:
    """the embedding of {} in place of the token's own"""
    ids = evidence.inputs["tokens"]
    others = {
        "token id + 1": ids + 1,
        "token id - 1": ids - 1,
        "token id modulo 65536": ids % 65536,
        "token id modulo 32768": ids % 32768,
        "the row's number": torch.arange(len(ids)),
        "token 0": torch.zeros_like(ids),
        "the end token 128009": torch.full_like(ids, 128009),
    }
    for label, other in others.items():
        rows = evidence.context.weight_rows(EMBED, other.clamp(0, 128255))
        if rows is not None:
            yield label, exactly(rows.to(torch.float64))


@hypothesis("another row of the prompt", axis="token", ops=("embed",))
def _neighbour(recipe: Given, evidence: Evidence) -> Iterator[tuple[str, Given]]:
    """the embedding of {} in place of the token's own"""
    real = evidence.real
    if len(real) > 1:
        yield "the token before", exactly(real.roll(1, 0))
        yield "the token after", exactly(real.roll(-1, 0))
        yield "the first token", exactly(real[:1].expand(real.shape))


@hypothesis("embedding scaled", axis="factor", ops=("embed",))
def _scaled(recipe: Given, evidence: Evidence) -> Given:
    """embeddings multiplied by sqrt(2048), as other models do,"""
    real = evidence.real * _ROUNDING_UP
    return replace(recipe, real=real, bound=flat_bound(real.abs() * 2.0**-23))


@hypothesis("weight read as bf16", axis="token", ops=("embed",))
def _reinterpreted(recipe: Given, evidence: Evidence) -> Iterator[tuple[str, Given]]:
    """{} weights read as bf16"""
    own = evidence.real.to(torch.bfloat16)
    yield "fp16", exactly(dict(read_as_bf16(own))["fp16"].to(torch.float64))
    ids = evidence.inputs["tokens"]
    rows = evidence.context.weight_rows(EMBED, ids // 2)
    if rows is not None:  # row r takes half of row r / 2, zeros between
        half = rows.shape[1] // 2
        part = torch.where((ids % 2 == 1)[:, None], rows[:, half:], rows[:, :half]).double()
        yield "fp32", exactly(torch.stack((torch.zeros_like(part), part), dim=2).flatten(1))


# --- kv_write -------------------------------------------------------------------------------------


@base("kv_write")
def _kv_write(evidence: Evidence) -> Given:
    return exactly(reference.kv_write(evidence.inputs["k"], evidence.inputs["v"]))


@hypothesis("K and V exchanged", axis="halves", ops=("kv_write",))
def _swapped(recipe: Given, evidence: Evidence) -> Given:
    """keys in the value page and values in the key page"""
    return exactly(recipe.real.flip(0))


@hypothesis("keys in both pages", axis="halves", ops=("kv_write",))
def _keys_twice(recipe: Given, evidence: Evidence) -> Given:
    """keys in the value page too"""
    return exactly(recipe.real[:1].expand(recipe.real.shape))


@hypothesis("values in both pages", axis="halves", ops=("kv_write",))
def _values_twice(recipe: Given, evidence: Evidence) -> Given:
    """values in the key page too"""
    return exactly(recipe.real[1:].expand(recipe.real.shape))


@hypothesis("one token of a span copied", axis="rows", ops=("kv_write",))
def _one_token(recipe: Given, evidence: Evidence) -> Iterator[tuple[str, Given]]:
    """only the first token of {} copied"""
    rows = torch.arange(recipe.real.shape[1])
    for label, first in (("each page", rows % _PAGE == 0), ("the prompt", rows == 0)):
        hole = (~first)[:, None].expand(recipe.real.shape)
        if hole.any():
            yield label, replace(recipe, unwritten=hole)


@hypothesis("only whole pages copied", axis="rows", ops=("kv_write",))
def _whole_pages(recipe: Given, evidence: Evidence) -> Given | None:
    """whole pages copied and the last one's rows left out"""
    rows = torch.arange(recipe.real.shape[1])
    hole = (rows >= len(rows) // _PAGE * _PAGE)[:, None].expand(recipe.real.shape)
    return replace(recipe, unwritten=hole) if hole.any() else None


@hypothesis("every page from the prompt's start", axis="rows", ops=("kv_write",))
def _same_page(recipe: Given, evidence: Evidence) -> Given:
    """every page filled from the first page's rows"""
    rows = torch.arange(recipe.real.shape[1]) % _PAGE
    return exactly(recipe.real[:, rows])


@hypothesis("rows shifted", axis="rows", ops=("kv_write",))
def _shifted(recipe: Given, evidence: Evidence) -> Iterator[tuple[str, Given]]:
    """rows written one place too {}"""
    first = torch.zeros(recipe.real.shape, dtype=torch.bool)
    first[:, 0] = True
    yield "late", replace(exactly(recipe.real.roll(1, 1)), unwritten=first)
    yield "early", replace(exactly(recipe.real.roll(-1, 1)), unwritten=first.roll(-1, 1))


@hypothesis("other rows' tokens", axis="rows", ops=("kv_write",))
def _other_slot(recipe: Given, evidence: Evidence) -> Iterator[tuple[str, Given]]:
    """the row of {} written in place of each row's own"""
    if recipe.real.shape[1] > 1:
        yield "the first slot or token", exactly(recipe.real[:, :1].expand(recipe.real.shape))
        yield "the other slot", exactly(recipe.real.flip(1))


@hypothesis("values rotated", axis="values", ops=("kv_write",))
def _rotated(recipe: Given, evidence: Evidence) -> Given | None:
    """values rotated like keys"""
    v, positions = recipe.real[1], evidence.context.positions
    if len(positions) != len(v):
        return None
    inputs = {
        "x": v,
        "positions": torch.tensor(positions),
        "inv_freq": reference.llama3_inv_freq(),
    }
    real = reference.rope(**inputs)
    b = bound_of("k_rope", inputs, real).strict
    bound = flat_bound(torch.stack((torch.zeros_like(b), b)))
    return replace(recipe, real=torch.stack((recipe.real[0], real)), bound=bound)


# --- argmax ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice(Recipe):
    """An index a row (rows,), int64, of logits (rows, vocabulary)."""

    logits: Tensor
    choose: Callable[[Tensor], Tensor] = reference.argmax

    def some(self, flat: Tensor) -> Some:
        return self.whole()[0][flat], torch.zeros(len(flat), dtype=torch.float64)

    def whole(self) -> tuple[Tensor, Bound]:
        real = self.choose(self.logits)
        return real, flat_bound(torch.zeros(real.shape, dtype=torch.float64))


@base("argmax")
def _argmax(evidence: Evidence) -> Choice:
    return Choice(evidence.inputs["logits"])


def _from_zero(logits: Tensor) -> Tensor:
    best = reference.argmax(logits)
    return torch.where(logits.gather(1, best[:, None])[:, 0] > 0, best, 0)


def _last_of_equals(logits: Tensor) -> Tensor:
    return logits.shape[1] - 1 - reference.argmax(logits.flip(1))


def _nan_wins(logits: Tensor) -> Tensor:
    return torch.where(
        logits.isnan().any(1), logits.isnan().int().argmax(1), reference.argmax(logits)
    )


CHOICES: Final[dict[str, tuple[str, Callable[[Tensor], Tensor]]]] = {
    "starts at 0.0": ("a search that starts at 0.0, not at the first logit,", _from_zero),
    "last of equals": ("the last of equal logits where the first counts", _last_of_equals),
    "least logit": ("the least logit", lambda x: reference.argmax(-x)),
    "greatest magnitude": ("the logit of greatest magnitude", lambda x: reference.argmax(x.abs())),
    "second best": (
        "the second greatest logit",
        lambda x: x.topk(2, dim=1).indices[:, 1],
    ),
    "index off by one": ("an index one too great", lambda x: reference.argmax(x) + 1),
    "first index skipped": (
        "the first logit never looked at",
        lambda x: reference.argmax(x[:, 1:]) + 1,
    ),
    "last index skipped": (
        "the last logit never looked at",
        lambda x: reference.argmax(x[:, :-1]),
    ),
    "ordinary tokens only": (
        "only the 128,000 ordinary tokens looked at",
        lambda x: reference.argmax(x[:, :128000]),
    ),
    "first 65536 only": (
        "only the first 65,536 logits looked at",
        lambda x: reference.argmax(x[:, :65536]),
    ),
    "first 32000 only": (
        "only the first 32,000 logits looked at",
        lambda x: reference.argmax(x[:, :32000]),
    ),
    "index modulo 65536": ("the index cut to 16 bits", lambda x: reference.argmax(x) % 65536),
    "NaN wins": ("a NaN taken for the greatest", _nan_wins),
    "always 0": ("index 0 whatever the logits", lambda x: torch.zeros(len(x), dtype=torch.int64)),
}


def _choosing(choose: Callable[[Tensor], Tensor]) -> Callable[[Choice, Evidence], Choice]:
    return lambda recipe, evidence: replace(recipe, choose=choose)


for _name, (_says, _choose) in CHOICES.items():
    hypothesis(_name, axis="choose", ops=("argmax",), says=_says)(_choosing(_choose))


@hypothesis("wrong row", axis="row", ops=("argmax",))
def _row(recipe: Choice, evidence: Evidence) -> Iterator[tuple[str, Choice]]:
    """the logits of {} in place of its own"""
    logits, count = recipe.logits, len(recipe.logits)
    every = evidence.context.taps.get("logits")
    if every is not None and every.shape[0] > count:  # prefill: argmax looks at the last row only
        for label, row in (("the first row", 0), ("the row before the last", -2)):
            yield label, replace(recipe, logits=every[row][None])
    if count > 1:
        yield "the first row", replace(recipe, logits=logits[:1].expand(logits.shape))
        yield "the other row", replace(recipe, logits=logits.flip(0))


@hypothesis("logits of an earlier step", axis="row", ops=("argmax",))
def _stale(recipe: Choice, evidence: Evidence) -> Iterator[tuple[str, Choice]]:
    """the logits of an earlier step{}"""
    found: Any = evidence.context.earlier.get("logits")
    for logits in [found] if isinstance(found, Tensor) else (found or []):
        if logits.shape == recipe.logits.shape:
            yield "", replace(recipe, logits=logits)
