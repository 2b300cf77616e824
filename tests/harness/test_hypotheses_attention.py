"""Prefill's and decode's attention gone wrong, each fault to be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from harness.hypotheses import Context
from reference.rounding import bf16_bits, round_to_bf16
from tests.harness.planted import (
    F32,
    attention_online,
    cut,
    f32,
    normal,
    store,
)
from tests.harness.test_hypotheses import Array, Fault, explained, poison

# --- softmax and mask -----------------------------------------------------------------------------


@cache
def masked(n: int = 17, spread: float = 2.0) -> dict[str, Any]:
    scores = normal(50 + n, 32, n, n, std=spread)
    return {"scores": scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)}


def merged(x: Array, pairs: Callable[[int], list[list[tuple[int, int]]]]) -> Array:
    """An online softmax without guards: pairs(n) are the merges (into, from), a barrier a list."""
    m, d = x.copy(), np.ones_like(x)
    for turn in pairs(x.shape[-1]):
        for a, b in turn:
            top = np.fmax(m[..., a], m[..., b])
            d[..., a] = d[..., a] * np.exp(m[..., a] - top) + d[..., b] * np.exp(m[..., b] - top)
            m[..., a] = top
    return np.exp(x - m[..., :1]) / d[..., :1]


def neighbours(n: int) -> list[list[tuple[int, int]]]:
    steps = [1 << i for i in range(n.bit_length()) if 1 << i < n]
    return [[(t, t + s) for t in range(0, n - s, 2 * s)] for s in steps]


def halving(n: int) -> list[list[tuple[int, int]]]:
    turns, step = [], 1 << (n - 1).bit_length()
    while step > 1:
        step //= 2
        turns.append([(t, t + step) for t in range(step) if t + step < min(n, 2 * step)])
    return turns


def _softmax_faults() -> Iterator[Fault]:
    ordinary, wild = masked(), masked(18, 70.0)

    def fault(name: str, make: Callable[[Array], Array], what: str = "", **more: Any) -> Fault:
        inputs = more.pop("inputs", ordinary)
        x = f32(inputs["scores"])
        before = bf16_bits(inputs["scores"])
        return Fault("softmax", name, inputs, lambda: store(make(x)), before, what, **more)

    def soft(x: Array, top: Any = None) -> Array:
        top = x.max(-1, keepdims=True) if top is None else top
        e = np.exp(x - top)
        return e / e.sum(-1, keepdims=True, dtype=F32)

    for n in (4, 5, 17, 33):
        yield fault(
            "unguarded online merge",
            lambda x: merged(x, neighbours),
            f"neighbours, n = {n}",
            inputs=masked(n),
        )
    yield fault("unguarded online merge", lambda x: merged(x, halving), "halves")
    yield fault("reads past the row", lambda x: x * np.nan)
    yield fault("no shift by the maximum", lambda x: soft(x, F32(0)), inputs=wild)
    yield fault("constant shift", lambda x: soft(x, x.max()), "tensor's maximum", inputs=wild)
    yield fault("constant shift", lambda x: soft(x, F32(10)), "10", inputs=wild)
    yield fault("no division", lambda x: np.exp(x - x.max(-1, keepdims=True)))
    yield fault("base 2", lambda x: soft(x * F32(np.log(2))))

    def short(x: Array, length: int, write: bool) -> Array:
        top = x[..., :length].max(-1, keepdims=True)
        e = np.exp(x - top)
        out = e / e[..., :length].sum(-1, keepdims=True)
        return np.concatenate((out[..., :length], x[..., length:]), -1) if write else out

    yield fault("row length off", lambda x: short(x, 16, False), "16 of 17")
    yield fault("row length off", lambda x: short(x, 1, False), "1 of 17")
    yield fault("row length off", lambda x: short(x, 16, True), "16 of 17, written too")

    def longer(x: Array) -> Array:
        n = x.shape[-1]
        after = np.append(x.reshape(-1, n)[1:, 0], F32(np.nan)).reshape(*x.shape[:-1], 1)
        return soft(np.concatenate((x, after), -1))[..., :n]

    yield fault("row length off", longer, "18 of 17")
    yield fault("softmax over queries", lambda x: soft(x.swapaxes(1, 2)).swapaxes(1, 2))

    def strided(x: Array, stride: int) -> Array:
        n, flat = x.shape[-1], x.reshape(-1).copy()
        for start in range(0, flat.size - n + 1, stride):
            flat[start : start + n] = soft(flat[start : start + n])
        return flat.reshape(x.shape)

    yield fault("other row stride", lambda x: strided(x, 512))
    unmasked = normal(67, 32, 17, 17, std=2.0)
    yield fault(
        "scores before the mask",
        lambda x: soft(f32(unmasked)),
        context=Context(taps={"scores": unmasked}),
    )
    yield fault("wrong queries", lambda x: soft(x)[:, [*range(14), 15, 15, 15]])
    yield fault("queries exchanged", lambda x: soft(x)[:, [*range(14), 16, 14, 15]])
    yield Fault(
        "softmax", "never written", ordinary, lambda: bf16_bits(ordinary["scores"]),
        bf16_bits(ordinary["scores"]),
    )  # fmt: skip
    yield Fault("softmax", "truncated store", ordinary, lambda: cut(soft(f32(ordinary["scores"]))))


def _mask_faults() -> Iterator[Fault]:
    inputs = {"scores": normal(70, 32, 18, 18)}
    n = 18
    before = bf16_bits(inputs["scores"])
    block, thread = np.arange(32 * n)[:, None], np.arange(n)

    def hide(
        hidden: Callable[[Array, Array], Array] = np.greater,
        row: Array = block % n,
        address: Array = block * n,
        value: float = -np.inf,
    ) -> Array:
        x = f32(inputs["scores"]).copy().reshape(-1)
        where = (address + thread)[hidden(thread, row) & (address + thread < x.size)]
        x[where] = value
        return store(x.reshape(32, n, n))

    def fault(name: str, **options: Any) -> Fault:
        return Fault("mask", name, inputs, lambda: hide(**options), before)

    yield fault("mask absent", hidden=lambda t, r: (t > r) & False)
    yield fault("diagonal masked", hidden=np.greater_equal)
    yield fault("mask shifted by one", hidden=lambda t, r: t > r + 1)
    yield fault("mask shifted by minus two", hidden=lambda t, r: t > r - 2)
    yield fault("mask transposed", hidden=np.less)
    yield fault("mask transposed with diagonal", hidden=np.less_equal)
    yield fault("mask per block of 16", hidden=lambda t, r: t // 16 > r // 16)
    yield fault("mask per block of 16, diagonal block too", hidden=lambda t, r: t // 16 >= r // 16)
    yield fault("all masked", hidden=lambda t, r: (t >= 0) & (r >= 0))
    yield fault("all but the diagonal masked", hidden=np.not_equal)
    yield fault("row from block / heads", row=block // 32)
    yield fault("row from block modulo heads", row=block % 32)
    yield fault("row from block / n", row=block // n)
    yield fault("row of the block itself", row=block)
    yield fault("rows reversed", row=n - 1 - block % n)
    yield fault("address without row stride", address=block)
    yield fault("wrong row stride", address=block * 32)
    yield fault("finite mask value", value=-10.0)
    yield fault("masked with NaN", value=np.nan)
    yield fault("masked with infinity", value=np.inf)
    yield fault(
        "row from block / heads + address without row stride", row=block // 32, address=block
    )
    yield fault("mask transposed + finite mask value", hidden=np.less, value=-10000.0)


# --- scores and attn_v ----------------------------------------------------------------------------

RIGHT = np.arange(32) // 4
KV_HEADS = {
    "kv head h % 8": np.arange(32) % 8,
    "kv head h / 8": np.arange(32) // 8,
    "kv head h % 4": np.arange(32) % 4,
    "kv head 0": np.zeros(32, int),
    "kv heads reversed": 7 - RIGHT,
    "kv head one on": (RIGHT + 1) % 8,
}
SCALES = {
    "scale missing": 1.0,
    "scale twice": 1 / 64,
    "scale of the wrong side": 8.0,
    "scale of width 2048": 2048**-0.5,
    "scale of width 512": 512**-0.5,
    "scale of width 128": 128**-0.5,
    "scale of width 32": 32**-0.5,
}


def heads_of(x: Array) -> Array:
    return x.reshape(len(x), -1, 64).swapaxes(0, 1)


def scored(
    q: Array, k: Array, kv: Array = RIGHT, scale: float = 0.125, d: Any = slice(None)
) -> Array:
    return heads_of(q)[..., d] @ heads_of(k)[kv][..., d].swapaxes(1, 2) * F32(scale)


def _scores_faults() -> Iterator[Fault]:
    n = 18
    inputs = {"q": normal(71, n, 2048), "k": normal(72, n, 512)}
    q, k = f32(inputs["q"]), f32(inputs["k"])

    def fault(name: str, make: Callable[[], Array], what: str = "", **more: Any) -> Fault:
        return Fault("scores", name, inputs, lambda: store(make()), poison(32, n, n), what, **more)

    for name, kv in KV_HEADS.items():
        yield fault(name, lambda kv=kv: scored(q, k, kv))
    for name, scale in SCALES.items():
        yield fault(name, lambda scale=scale: scored(q, k, scale=scale))
    yield fault("part of each dot product", lambda: scored(q, k, d=slice(0, 32)))
    yield fault("queries and keys exchanged", lambda: scored(q, k).swapaxes(1, 2))

    def by_head(x: Array) -> Array:
        return x.reshape(-1, n, 64).swapaxes(0, 1).reshape(n, -1)

    yield fault("key stride", lambda: scored(q, by_head(k)), "head by head")
    flat = k.reshape(-1)
    near = np.stack([flat[r * 64 : r * 64 + 512] for r in range(n)])
    yield fault("key stride", lambda: scored(q, near), "64")
    yield fault("query stride", lambda: scored(by_head(q), k), "head by head")
    yield fault("zeros", lambda: scored(q, k) * 0)
    yield Fault("scores", "truncated store", inputs, lambda: cut(scored(q, k)))
    taps = {
        "k_proj": normal(73, n, 512),
        "q_proj": normal(74, n, 2048),
        "v_proj": normal(75, n, 512),
    }
    context = Context(taps=taps)
    yield fault("unrotated keys", lambda: scored(q, f32(taps["k_proj"])), context=context)
    yield fault("unrotated queries", lambda: scored(f32(taps["q_proj"]), k), context=context)
    yield fault("values read as keys", lambda: scored(q, f32(taps["v_proj"])), context=context)
    yield fault("kv head h % 8 + scale missing", lambda: scored(q, k, KV_HEADS["kv head h % 8"], 1))


def _attn_v_faults() -> Iterator[Fault]:
    n = 18
    scores = normal(76, 32, n, n).masked_fill(
        torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf
    )
    inputs = {"probs": round_to_bf16(scores.softmax(-1)), "v": normal(77, n, 512)}
    p, v = f32(inputs["probs"]), f32(inputs["v"])

    def summed(p: Array = p, v: Array = v, kv: Array = RIGHT) -> Array:
        return (p @ heads_of(v)[kv]).swapaxes(0, 1).reshape(n, -1)

    def fault(name: str, make: Callable[[], Array], what: str = "", **more: Any) -> Fault:
        return Fault("attn_v", name, inputs, lambda: store(make()), poison(n, 2048), what, **more)

    for name, kv in KV_HEADS.items():
        yield fault(name, lambda kv=kv: summed(kv=kv))
    yield fault("probabilities transposed", lambda: summed(p.swapaxes(1, 2)))
    yield fault("weighted sum scaled", lambda: summed(p / 8))
    yield fault("keys left out", lambda: summed(p * (np.arange(n) < 16)), "whole pages")
    yield fault("keys left out", lambda: summed(p * (np.arange(n) < 1)), "first key")
    by_head = v.reshape(-1, n, 64).swapaxes(0, 1).reshape(n, -1)
    yield fault("value stride", lambda: summed(v=by_head))
    stored = summed().reshape(n, 32, 64).swapaxes(0, 1).reshape(n, -1)
    yield fault("result stored head by head", lambda: stored)
    yield fault("zeros", lambda: summed() * 0)
    taps = {"k_rope": normal(78, n, 512), "k_proj": normal(79, n, 512)}
    taps |= {"scores": normal(80, 32, n, n), "mask": normal(81, 32, n, n)}
    context = Context(taps=taps)
    other = {key: f32(value) for key, value in taps.items()}
    yield fault("keys read as values", lambda: summed(v=other["k_rope"]), context=context)
    yield fault("unrotated keys read as values", lambda: summed(v=other["k_proj"]), context=context)
    yield fault("scores read as probabilities", lambda: summed(other["scores"]), context=context)
    yield fault(
        "masked scores read as probabilities", lambda: summed(other["mask"]), context=context
    )


# --- decode attention -----------------------------------------------------------------------------


@cache
def cached(*lengths: int, spread: float = 1.0) -> dict[str, Any]:
    return {
        "q": normal(82, len(lengths), 2048, std=spread),
        "keys": [normal(83 + n, n, 512) for n in lengths],
        "values": [normal(183 + n, n, 512) for n in lengths],
    }


Weigh = Callable[[Array], tuple[Array, Array]]


def soft_weights(s: Array) -> tuple[Array, Array]:
    e = np.exp(s - s.max(-1, keepdims=True))
    return e, e.sum(-1, keepdims=True)


def attended(
    q: Array,
    keys: list[Array],
    values: list[Array],
    kv: Array = RIGHT,
    scale: float = 0.125,
    d: Any = slice(None),
    weigh: Weigh = soft_weights,
) -> Array:
    rows = []
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
        e, total = weigh(scored(q[row : row + 1], k, kv, scale, d)[:, 0])
        rows.append(((e[:, None] @ heads_of(v)[kv])[:, 0] / total).reshape(-1))
    return np.stack(rows)


def _attention_faults() -> Iterator[Fault]:
    inputs = cached(35, 50)
    q, keys, values = f32(inputs["q"]), *([f32(r) for r in inputs[w]] for w in ("keys", "values"))
    assert isinstance(keys, list)

    def fault(name: str, make: Callable[[], Array], what: str = "", **more: Any) -> Fault:
        own = more.pop("inputs", inputs)
        before = bf16_bits(own["q"])
        return Fault(
            "attention", name, own, lambda: store(make()), before, what, phase="decode", **more
        )

    def reading(rows: Callable[[Array], Array]) -> Array:
        return attended(q, [rows(k) for k in keys], [rows(v) for v in values])

    def padded(rows: Array, length: int) -> Array:
        more = np.full((max(0, length - len(rows)), 512), np.nan, F32)
        return np.concatenate((rows, more))[:length]

    for name, kv in KV_HEADS.items():
        yield fault(name, lambda kv=kv: attended(q, keys, values, kv))
    for name, scale in SCALES.items():
        yield fault(name, lambda scale=scale: attended(q, keys, values, scale=scale))
    yield fault("part of each dot product", lambda: attended(q, keys, values, d=slice(0, 32)))
    for less in (1, 16):
        yield fault("length off", lambda less=less: reading(lambda r: r[:-less]), f"-{less}")
    for more in (1, 16):
        yield fault(
            "length off", lambda more=more: reading(lambda r: padded(r, len(r) + more)), f"+{more}"
        )
    swapped = [padded(keys[0], 50), keys[1][:35]], [padded(values[0], 50), values[1][:35]]
    yield fault("length off", lambda: attended(q, *swapped), "the other row's")
    yield fault("part of the sequence", lambda: reading(lambda r: r[:1]), "first token")
    yield fault("part of the sequence", lambda: reading(lambda r: r[: len(r) // 16 * 16]), "pages")
    uneven = cached(32, 50)
    uneven_rows = [[f32(r) for r in uneven[w]] for w in ("keys", "values")]
    yield fault(
        "stale last page",
        lambda: attended(
            f32(uneven["q"]), *([padded(r, -(-len(r) // 16) * 16) for r in w] for w in uneven_rows)
        ),
        inputs=uneven,
    )
    finite = Context(poison=3.0)

    def filled(rows: Array) -> Array:
        return np.nan_to_num(padded(rows, -(-len(rows) // 16) * 16), nan=3.0)

    yield fault("stale last page", lambda: reading(filled), "finite poison", context=finite)
    yield fault("pages never written", lambda: reading(lambda r: r * np.nan))
    other = (
        [padded(keys[0], 35), padded(keys[0], 50)],
        [padded(values[0], 35), padded(values[0], 50)],
    )
    yield fault("other pages", lambda: attended(q, *other), "the first row's")
    layer = normal(90, 50, 512), normal(91, 50, 512)
    one = cached(40)
    yield fault(
        "other pages",
        lambda: attended(f32(one["q"]), [f32(layer[0])[:40]], [f32(layer[1])[:40]]),
        "layer 0",
        inputs=one,
        context=Context(other_slots={"layer 0": layer}),
    )

    def paged(rows: Array, order: Callable[[int], list[int]]) -> Array:
        count = -(-len(rows) // 16)
        pages = padded(rows, count * 16).reshape(count, 16, 512)
        return pages[order(count)].reshape(-1, 512)[: len(rows)]

    for what, order in (
        ("reverse", lambda c: list(range(c))[::-1]),
        ("always the first", lambda c: [0] * c),
    ):
        yield fault("page order", lambda o=order: reading(lambda r: paged(r, o)), what)
    yield fault("place within the page", lambda: reading(lambda r: r[np.arange(len(r)) // 16 * 16]))

    def strided(rows: Array) -> Array:
        count = -(-len(rows) // 16)
        pages = padded(rows, count * 16).reshape(count, -1)
        near = [p[t * 64 : t * 64 + 512] for p in pages for t in range(16)]
        return np.stack(near)[: len(rows)]

    yield fault("row stride", lambda: reading(strided))
    yield fault("K and V exchanged", lambda: attended(q, values, keys))
    yield fault("values read from the key page", lambda: attended(q, keys, keys))
    yield fault("keys read from the value page", lambda: attended(q, values, values))
    unrotated = [normal(92, 35, 512), normal(93, 50, 512)]
    yield fault(
        "unrotated keys",
        lambda: attended(q, [f32(k) for k in unrotated], values),
        context=Context(unrotated=unrotated),
    )
    newest = normal(94, 2, 512)
    late = [np.concatenate((k[:-1], f32(newest)[r : r + 1])) for r, k in enumerate(keys)]
    yield fault(
        "unrotated keys",
        lambda: attended(q, late, values),
        "newest",
        context=Context(taps={"k_proj": newest}),
    )
    fresh = Context(taps={"q_proj": normal(95, 2, 2048)})
    yield fault(
        "unrotated queries",
        lambda: attended(f32(fresh.taps["q_proj"]), keys, values),
        context=fresh,
    )
    yield fault("first row's query", lambda: attended(q[[0, 0]], keys, values))

    def running(s: Array) -> Array:
        return np.exp(s - np.maximum.accumulate(s, -1))

    weights: dict[str, Weigh] = {
        "denominator of the first token": lambda s: (soft_weights(s)[0], soft_weights(s)[0][:, :1]),
        "no division": lambda s: (soft_weights(s)[0], np.ones_like(s[:, :1])),
        "last token missing from the denominator": lambda s: (
            soft_weights(s)[0],
            soft_weights(s)[0][:, :-1].sum(-1, keepdims=True),
        ),
        "nothing rescaled": lambda s: (running(s), running(s).sum(-1, keepdims=True)),
        "accumulator not rescaled": lambda s: (running(s), soft_weights(s)[1]),
        "denominator not rescaled": lambda s: (
            soft_weights(s)[0],
            running(s).sum(-1, keepdims=True),
        ),
        "base 2": lambda s: soft_weights(s * F32(np.log(2))),
        "no softmax": lambda s: (s, np.ones_like(s[:, :1])),
        "equal weights": lambda s: soft_weights(s * 0),
    }
    for name, weigh in weights.items():
        yield fault(name, lambda w=weigh: attended(q, keys, values, weigh=w))
    wild = cached(35, 50, spread=30.0)
    loud = f32(wild["q"])

    def from_zero(s: Array) -> tuple[Array, Array]:
        e = np.exp(s - np.maximum(s.max(-1, keepdims=True), F32(0)))
        return e, e.sum(-1, keepdims=True)

    def unshifted(s: Array) -> tuple[Array, Array]:
        return np.exp(s), np.exp(s).sum(-1, keepdims=True)

    # Some heads have only scores below -104, others do not.
    strength = torch.arange(1, 33, dtype=torch.float64).repeat_interleave(64)
    low = {**wild, "keys": [-k.abs() for k in wild["keys"]]}
    low["q"] = round_to_bf16(normal(96, 2, 2048).abs() * strength)
    low_keys = [f32(k) for k in low["keys"]]
    yield fault(
        "maximum starts at 0",
        lambda: attended(f32(low["q"]), low_keys, values, weigh=from_zero),
        inputs=low,
    )
    yield fault(
        "no shift by the maximum",
        lambda: attended(loud, keys, values, weigh=unshifted),
        inputs=wild,
    )
    yield fault("zeros", lambda: q * 0)
    yield Fault(
        "attention",
        "truncated store",
        inputs,
        lambda: cut(attention_online(inputs)),
        phase="decode",
    )
    yield fault("constant ratio", lambda: attention_online(inputs) * F32(1.001))


FAULTS = (
    *_softmax_faults(),
    *_mask_faults(),
    *_scores_faults(),
    *_attn_v_faults(),
    *_attention_faults(),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_named(fault: Fault) -> None:
    row = explained(fault)
    assert fault.name in row.found, row.sentences
