"""Prefill attention's two batched GEMMs: scores (queries, keys) and attn_v (weights, values).

What decode attention shares with them, the heads and the scale, is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from harness.bounds import HEAD, SCALE, TINY, Bound, U, bound_of
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Elsewhere, Recipe, Some
from harness.hypotheses.registry import base, hypothesis

SCORES: Final = ("scores",)
ATTN_V: Final = ("attn_v",)
GROUPED: Final = ("scores", "attn_v", "attention")  # ops whose query heads share key/value heads
HEADS: Final = 32
_RIGHT: Final = torch.arange(HEADS) // 4

# Key/value head of each query head: name -> (phrase, heads)
KV_HEADS: Final[dict[str, tuple[str, Tensor]]] = {
    "kv head h % 8": ("key/value head h % 8 where it must be h / 4", torch.arange(HEADS) % 8),
    "kv head h / 8": ("key/value head h / 8 where it must be h / 4", torch.arange(HEADS) // 8),
    "kv head h % 4": ("key/value head h % 4 where it must be h / 4", torch.arange(HEADS) % 4),
    "kv head 0": ("key/value head 0 for every query head", torch.zeros(HEADS, dtype=torch.int64)),
    "kv heads reversed": ("key/value heads counted from the last", 7 - torch.arange(HEADS) // 4),
    "kv head one on": (
        "the next key/value head, h / 4 + 1,",
        (torch.arange(HEADS) // 4 + 1) % 8,
    ),
}

# What scores are multiplied by: name -> (phrase, factor)
SCALES: Final[dict[str, tuple[str, float]]] = {
    "scale missing": ("scores without the scale 1/8", 1.0),
    "scale twice": ("the scale 1/8 applied twice", SCALE * SCALE),
    "scale of the wrong side": ("a multiplication by 8 where scores are divided by 8", 8.0),
    "scale of width 2048": ("the scale 1/sqrt(2048), of the row's width,", 2048**-0.5),
    "scale of width 512": ("the scale 1/sqrt(512), of a key row's width,", 512**-0.5),
    "scale of width 128": ("the scale 1/sqrt(128) of another head width", 128**-0.5),
    "scale of width 32": ("the scale 1/sqrt(32) of another head width", 32**-0.5),
}


def _heads(x: Tensor) -> Tensor:
    """(n, heads * 64) -> (heads, n, 64)."""
    return x.unflatten(1, (-1, HEAD)).transpose(0, 1)


def _spread(x: Tensor, heads: Tensor) -> Tensor:
    """Key or value rows (n, 512) as each query head sees them: (n, 2048)."""
    return x.unflatten(1, (-1, HEAD))[:, heads].flatten(1)


@dataclass(frozen=True)
class Scores(Recipe):
    """q (m, 2048) . k (n, 512) * scale, (32, m, n). heads: key head of each query head."""

    q: Tensor
    k: Tensor
    heads: Tensor = field(default_factory=lambda: _RIGHT)
    scale: float = SCALE
    part: slice = field(default_factory=lambda: slice(None))

    def some(self, flat: Tensor) -> Some:
        m, n = len(self.q), len(self.k)
        head = flat // (m * n)
        q = self.q.unflatten(1, (-1, HEAD))[flat // n % m, head][:, self.part]  # (., 64)
        k = self.k.unflatten(1, (-1, HEAD))[flat % n, self.heads[head]][:, self.part]
        products = q * k * self.scale
        # As bounds._Gemm.bound, of 64 terms.
        worst = 2 * U * HEAD / (1 - 2 * U * HEAD)
        return products.sum(1), products.abs().sum(1) * worst + HEAD * TINY

    def whole(self) -> tuple[Tensor, Bound]:
        q, k = torch.zeros_like(self.q), _spread(self.k, self.heads)
        by_head = q.unflatten(1, (-1, HEAD))
        by_head[:, :, self.part] = self.q.unflatten(1, (-1, HEAD))[:, :, self.part]
        real = _heads(q) @ _heads(k).transpose(1, 2) * self.scale
        return real, bound_of("scores", {"q": q * (self.scale / SCALE), "k": k}, real)


@dataclass(frozen=True)
class Weighted(Recipe):
    """probs (32, m, n) @ v (n, 512) * factor, (m, 2048). heads: value head of each query head."""

    probs: Tensor
    v: Tensor
    heads: Tensor = field(default_factory=lambda: _RIGHT)
    factor: float = 1.0
    keys: slice = field(default_factory=lambda: slice(None))

    def products(self, flat: Tensor) -> Tensor:
        """The terms of the sums at flat indices, (m, n)."""
        width = len(self.heads) * HEAD
        row, head, column = flat // width, flat // HEAD % len(self.heads), flat % HEAD
        probs = self.probs[head, row][:, self.keys]  # (m, n)
        v = self.v.unflatten(1, (-1, HEAD))[:, self.heads[head], column].T[:, self.keys]
        return probs * v * self.factor

    def some(self, flat: Tensor) -> Some:
        products = self.products(flat)
        terms = self.v.shape[0]
        worst = 2 * U * terms / (1 - 2 * U * terms)
        return products.sum(1), products.abs().sum(1) * worst + terms * TINY

    def whole(self) -> tuple[Tensor, Bound]:
        v = _spread(self.v, self.heads)[self.keys]
        probs = self.probs[:, :, self.keys] * self.factor
        real = (probs @ _heads(v)).transpose(0, 1).flatten(1)
        return real, bound_of("attn_v", {"probs": probs, "v": v}, real)


@base(*SCORES)
def _scores(evidence: Evidence) -> Scores:
    return Scores(evidence.inputs["q"], evidence.inputs["k"])


@base(*ATTN_V)
def _attn_v(evidence: Evidence) -> Weighted:
    return Weighted(evidence.inputs["probs"], evidence.inputs["v"])


# --- heads and scale, also of decode attention ----------------------------------------------------


def _with(**changed: object) -> Callable[..., Recipe]:
    return lambda recipe, evidence: replace(recipe, **changed)


for _name, (_says, _kv) in KV_HEADS.items():
    hypothesis(_name, axis="heads", ops=GROUPED, says=_says)(_with(heads=_kv))
for _name, (_says, _factor) in SCALES.items():
    hypothesis(_name, axis="scale", ops=("scores", "attention"), says=_says)(_with(scale=_factor))


@hypothesis("part of each dot product", axis="part", ops=("scores", "attention"))
def _part(recipe: Scores, evidence: Evidence) -> Iterator[tuple[str, Recipe]]:
    """scores of only {} of each head"""
    yield "the first half (one warp)", replace(recipe, part=slice(0, HEAD // 2))
    yield "the second half (one warp)", replace(recipe, part=slice(HEAD // 2, HEAD))


# --- scores ---------------------------------------------------------------------------------------


@hypothesis("queries and keys exchanged", axis="result", ops=SCORES, alone=True)
def _turned(recipe: Scores, evidence: Evidence) -> Recipe | None:
    """scores stored as (key, query) where they must be (query, key)"""
    shape = tuple(evidence.real.shape)
    source = torch.arange(evidence.real.numel()).reshape(shape).transpose(1, 2)
    return Elsewhere(recipe, source.contiguous()) if shape[1] == shape[2] else None


@hypothesis("key stride", axis="stride", ops=SCORES)
def _key_stride(recipe: Scores, evidence: Evidence) -> Iterator[tuple[str, Scores]]:
    """keys {}"""
    flat, n = recipe.k.contiguous(), len(recipe.k)
    for stride in (64, 128, 256):
        rows = flat.as_strided((n, flat.shape[1]), (stride, 1)) if n > 1 else flat
        reach = (n - 1) * stride + flat.shape[1]
        if n > 1 and reach <= flat.numel():
            yield f"read {stride} elements apart (lda) where a row has 512", replace(recipe, k=rows)
    if n > 1:
        by_head = flat.reshape(-1, n, HEAD).transpose(0, 1).flatten(1)
        yield "read as if stored head by head", replace(recipe, k=by_head)


@hypothesis("query stride", axis="stride", ops=SCORES)
def _query_stride(recipe: Scores, evidence: Evidence) -> Iterator[tuple[str, Scores]]:
    """queries {}"""
    flat, n = recipe.q.contiguous(), len(recipe.q)
    if n < 2:
        return
    for stride in (64, 512, 1024):
        rows = flat.as_strided((n, flat.shape[1]), (stride, 1))
        yield f"read {stride:,} elements apart (ldb) where a row has 2,048", replace(recipe, q=rows)
    by_head = flat.reshape(-1, n, HEAD).transpose(0, 1).flatten(1)
    yield "read as if stored head by head", replace(recipe, q=by_head)


# --- attn_v ---------------------------------------------------------------------------------------


@hypothesis("probabilities transposed", axis="probs", ops=ATTN_V)
def _transposed(recipe: Weighted, evidence: Evidence) -> Weighted | None:
    """probabilities read as (key, query) where they are (query, key)"""
    if recipe.probs.shape[1] != recipe.probs.shape[2]:
        return None
    return replace(recipe, probs=recipe.probs.transpose(1, 2))


@hypothesis("weighted sum scaled", axis="factor", ops=ATTN_V)
def _factor_of(recipe: Weighted, evidence: Evidence) -> Iterator[tuple[str, Weighted]]:
    """alpha {} where it must be 1"""
    for factor in (SCALE, 8.0, 0.5, 2.0):
        yield f"{factor:g}", replace(recipe, factor=factor)


@hypothesis("keys left out", axis="keys", ops=ATTN_V)
def _left_out(recipe: Weighted, evidence: Evidence) -> Iterator[tuple[str, Weighted]]:
    """a weighted sum over {}"""
    n = len(recipe.v)
    parts = {
        "the first key only": slice(0, 1),
        "all keys but the last": slice(0, n - 1),
        "all keys but the first": slice(1, n),
        "whole pages of 16 keys": slice(0, n // 16 * 16),
        "the first page of 16 keys": slice(0, 16),
        "64 keys": slice(0, 64),
    }
    for label, keys in parts.items():
        if 0 < len(range(n)[keys]) < n:
            yield label, replace(recipe, keys=keys)


@hypothesis("value stride", axis="stride", ops=ATTN_V)
def _value_stride(recipe: Weighted, evidence: Evidence) -> Iterator[tuple[str, Weighted]]:
    """values {}"""
    flat, n = recipe.v.contiguous(), len(recipe.v)
    if n < 2:
        return
    for stride in (64, 128, 256):
        if (n - 1) * stride + flat.shape[1] <= flat.numel():
            rows = flat.as_strided((n, flat.shape[1]), (stride, 1))
            yield f"read {stride} elements apart (lda) where a row has 512", replace(recipe, v=rows)
    by_head = flat.reshape(-1, n, HEAD).transpose(0, 1).flatten(1)
    yield "read as if stored head by head", replace(recipe, v=by_head)


@hypothesis("result stored head by head", axis="result", ops=ATTN_V, alone=True)
def _head_by_head(recipe: Weighted, evidence: Evidence) -> Recipe | None:
    """a result stored (head, token) where it must be (token, head)"""
    n, width = evidence.real.shape
    if n < 2:
        return None
    source = torch.arange(n * width).reshape(n, -1, HEAD).transpose(0, 1).reshape(n, width)
    return Elsewhere(recipe, source.contiguous())
