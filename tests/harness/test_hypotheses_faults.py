"""Every hypothesis, tested by planting its own fault in a float32 emulation of the op.

From the repository's root, `python -m tests.harness.test_hypotheses_faults` prints the explanation
table: each fault beside all that explains it on that input, the fault's own name marked.
To add a fault: an entry in one of the `_..._faults` generators, named as its hypothesis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from harness.hypotheses import Context, Evidence, diagnose, families
from harness.verdict import POISON
from reference.rounding import bf16_bits, from_bits, round_to_bf16
from tests.harness.planted import (
    F32,
    attention_online,
    cut,
    f32,
    inv_freq,
    narrow,
    normal,
    real_of,
    store,
)

Array = np.ndarray


@dataclass(frozen=True)
class Fault:
    """A wrong result of `op`: bits, or what `make` gives for its inputs, expected to be `name`."""

    op: str
    name: str
    inputs: Mapping[str, Any]
    make: Callable[[], Array]
    before: Array | None = None
    what: str = ""
    context: Context = field(default_factory=Context)
    phase: str = "prefill"
    layer: int | None = 1

    def evidence(self) -> Evidence:
        with np.errstate(all="ignore"):
            got = self.make()
        real = real_of(self.op, self.inputs)
        return Evidence(
            self.phase, self.op, self.layer, self.inputs, real, got, self.before, None, self.context
        )

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.what}".rstrip("-").replace(" ", "_")


def poison(*shape: int) -> Array:
    return np.full(shape, POISON, dtype=np.uint16)


# --- rope -----------------------------------------------------------------------------------------


def rotated(
    x: Array,
    angle: Array,
    adjacent: bool = False,
    head: int = 64,
    signs: tuple[int, int] = (-1, 1),
    table: Callable[[Array], Array] = lambda t: t,
    swap: bool = False,
    early: bool = False,
) -> Array:
    """x (n, width) by float32 angles (n, heads or 1, head / 2)."""
    shape = (len(x), -1, head // 2, 2) if adjacent else (len(x), -1, 2, head // 2)
    axis = 3 if adjacent else 2
    first, second = (np.take(x.reshape(shape), i, axis) for i in (0, 1))
    cos, sin = table(np.cos(angle.astype(F32))), table(np.sin(angle.astype(F32)))
    if swap:
        cos, sin = sin, cos
    one = first * cos + signs[0] * second * sin
    two = second * cos + signs[1] * (narrow(one) if early else first) * sin
    return np.stack((one, two), axis=axis).reshape(x.shape)


@cache
def rope_inputs(width: int, *positions: int) -> dict[str, Any]:
    from reference.ops import llama3_inv_freq

    return {
        "x": normal(width + len(positions), len(positions), width),
        "positions": torch.tensor(positions),
        "inv_freq": llama3_inv_freq(),
    }


def _frequencies() -> dict[str, Array]:
    i = np.arange(32, dtype=np.float64)
    plain = 500000.0 ** -(2 * i / 64)
    wave = 2 * np.pi / plain
    keep = np.clip((8192 / wave - 1) / 3, 0, 1)
    medium = (keep > 0) & (keep < 1)
    scaled = inv_freq().astype(np.float64)
    of_8 = (1 - keep) * plain / 8 + keep * plain
    low = 10000.0 ** -(2 * i / 64)
    keep_low = np.clip((8192 / (2 * np.pi / low) - 1) / 3, 0, 1)
    return {
        "plain frequencies": plain,
        "theta 10000": (1 - keep_low) * low / 32 + keep_low * low,
        "plain frequencies of theta 10000": low,
        "scaling factor 8": of_8,
        "scaling factor 8, theta 10000": (1 - keep_low) * low / 8 + keep_low * low,
        "blend reversed": np.where(medium, keep * plain / 32 + (1 - keep) * plain, scaled),
        "blend missing": np.where(wave > 8192, plain / 32, plain),
        "scaling of short waves": np.where(
            medium, plain * plain / 32 / scaled, np.where(wave > 8192, plain, plain / 32)
        ),
        "every frequency scaled": plain / 32,
        "equal frequencies": np.ones(32),
        "inverted frequencies": 1 / plain,
        "inverted frequencies of theta 10000": 1 / low,
        "exponent halved": np.sqrt(plain),
        "exponent doubled": plain**2,
        "exponent over the row's width": 500000.0 ** -(2 * i / 512),
        "table index halved": scaled[np.arange(32) // 2],
        "table index doubled": scaled[np.arange(32) * 2 % 32],
        "table index reversed": scaled[::-1],
    }


def _rope_faults() -> Iterator[Fault]:
    inputs = rope_inputs(512, 5, 23, 300, 1501)
    x, at = f32(inputs["x"]), inputs["positions"].numpy().astype(F32)
    scaled = inv_freq()

    def angle(positions: Array = at, frequencies: Array = scaled) -> Array:
        return positions.reshape(len(positions), -1, 1) * frequencies.astype(F32)

    def fault(name: str, what: str = "", op: str = "k_rope", **options: Any) -> Fault:
        turn = options.pop("angle", angle())
        return Fault(
            op,
            name,
            inputs,
            lambda: store(rotated(x, turn, **options)),
            bf16_bits(inputs["x"]),
            what,
            phase="decode",
        )

    for name, frequencies in _frequencies().items():
        yield fault(name, angle=angle(at, frequencies))
    yield fault("adjacent pairing", adjacent=True, op="q_rope")
    yield fault("not rotated", angle=angle(at * 0))
    yield fault("position +1", angle=angle(at + 1))
    yield fault("position -1", angle=angle(at - 1))
    heads = np.broadcast_to(np.arange(8, dtype=F32), (len(x), 8))
    yield fault("head number as position", angle=angle(heads))
    yield fault("position of the first row", angle=angle(at[:1].repeat(len(at))))
    yield fault("row number as position", angle=angle(np.arange(len(at), dtype=F32)))
    yield fault("positions of the other rows", angle=angle(at[::-1].copy()))
    yield fault("position doubled", angle=angle(at * 2))
    yield fault("angle negated", signs=(1, -1))
    yield fault("both terms added", signs=(1, 1))
    yield fault("both terms subtracted", signs=(-1, -1))
    yield fault("cosine and sine exchanged", swap=True)
    yield fault("second half reads the first one's result", early=True)
    yield Fault(
        "k_rope",
        "rotated twice",
        inputs,
        lambda: store(rotated(narrow(rotated(x, angle())), angle())),
        phase="decode",
    )

    def half(a: Array) -> Array:
        return a.astype(np.float16).astype(F32)

    for kind, low in (("bf16", narrow), ("fp16", half)):
        if kind == "bf16":  # below 2048 every whole number is one of fp16
            yield fault(f"position in {kind}", angle=angle(low(at)))
        yield fault(f"frequencies in {kind}", angle=angle(at, low(scaled)))
        yield fault(f"angle in {kind}", angle=low(angle()))
        yield fault(f"cosine and sine in {kind}", table=low)
    far = rope_inputs(512, 2047, 2049)
    far_angle = half(np.array([2047, 2049], F32))[:, None, None] * scaled
    yield Fault("k_rope", "position in fp16", far, lambda: store(rotated(f32(far["x"]), far_angle)))
    for head in (32, 128):
        i = np.arange(0, head, 2) / head
        plain = 500000.0**-i
        keep = np.clip((8192 / (2 * np.pi / plain) - 1) / 3, 0, 1)
        own = (1 - keep) * plain / 32 + keep * plain
        yield fault("other head width", f"{head}", head=head, angle=angle(at, own))
    yield fault("other head width", "128, own table", head=128, angle=angle(at, np.tile(scaled, 2)))
    # Pairs, among them what decode really does, and a combination of three.
    plain = _frequencies()["plain frequencies"]
    yield fault(
        "adjacent pairing + plain frequencies", adjacent=True, angle=angle(at, plain), op="q_rope"
    )
    yield fault("adjacent pairing + position +1", adjacent=True, angle=angle(at + 1))
    yield fault(
        "adjacent pairing + plain frequencies + position +1",
        adjacent=True,
        angle=angle(at + 1, plain),
    )
    yield (
        fault("adjacent pairing + truncated store", adjacent=True)
        if False
        else Fault(
            "k_rope",
            "adjacent pairing + truncated store",
            inputs,
            lambda: cut(rotated(x, angle(), adjacent=True)),
        )
    )
    # What no list holds is measured.
    yield fault("measured positions", angle=angle(at + np.array([3, 0, 40, -7], F32)))
    yield fault("measured angles", angle=angle(at, scaled * np.linspace(0.8, 1.3, 32)))


# --- norm -----------------------------------------------------------------------------------------


@cache
def norm_inputs() -> dict[str, Any]:
    x = normal(31, 6, 2048)
    x = torch.cat((x[:2] * 1e-3, x[2:3] * 300, x[3:] + 0.5))
    return {"x": round_to_bf16(x), "weight": normal(32, 2048, std=0.1, mean=0.7)}


def _norm_faults() -> Iterator[Fault]:
    inputs = norm_inputs()
    x, w = f32(inputs["x"]), f32(inputs["weight"])
    d = x.shape[1]

    def root(
        squares: Array = x * x, divisor: float = d, eps: float = 1e-5, outside: bool = False
    ) -> Array:
        mean = squares.sum(1, dtype=np.float64) / divisor
        made = np.sqrt(mean) + eps if outside else np.sqrt(mean + eps)
        return made.astype(F32)[:, None]

    def fault(
        name: str, make: Callable[[], Array], what: str = "", rounding: Any = store, **more: Any
    ) -> Fault:
        op = more.pop("op", "attn_norm")
        return Fault(op, name, inputs, lambda: rounding(make()), poison(*x.shape), what, **more)

    for name, eps in (
        ("eps 1e-6", 1e-6),
        ("no eps", 0.0),
        ("eps 1e-8", 1e-8),
        ("eps 1e-4", 1e-4),
        ("eps 1e-3", 1e-3),
        ("other eps", 3e-5),
    ):
        yield fault(name, lambda eps=eps: x / root(eps=eps) * w)
    yield fault("eps outside the root", lambda: x / root(outside=True) * w)
    yield fault("sum instead of mean", lambda: x / root(divisor=1) * w, op="mlp_norm")
    yield fault("divided by the wrong width", lambda: x / root(divisor=1024) * w)
    yield fault("part of the row summed", lambda: x / root(x[:, :1024] ** 2) * w, "first half")
    yield fault(
        "part of the row summed", lambda: x / root(x[:, :1024] ** 2, 1024) * w, "and its mean"
    )
    yield fault("another row's sum", lambda: x / root()[:1] * w)
    magnitude = np.abs(x).mean(1, dtype=np.float64).astype(F32)[:, None]
    yield fault("mean of magnitudes", lambda: x / np.sqrt(magnitude**2 + F32(1e-5)) * w)
    centred = x - x.mean(1, dtype=np.float64).astype(F32)[:, None]
    yield fault("mean subtracted", lambda: centred / root(centred**2) * w, "LayerNorm")
    yield fault("mean subtracted", lambda: x / root(centred**2) * w, "squares only")
    yield fault("multiplied instead of divided", lambda: x * root() * w)
    yield fault("not normalised", lambda: x * w)
    yield fault("root missing", lambda: x / root() ** 2 * w)
    yield fault("weight plus one", lambda: x / root() * (w + 1))
    yield fault("weight minus one", lambda: x / root() * (w - 1))
    yield fault("weight missing", lambda: x / root())
    yield fault("weight applied twice", lambda: x / root() * w * w)
    turned = np.roll(w, 1024)
    yield fault("weight's halves", lambda: x / root() * turned)
    once = narrow(x / root() * w)
    twice = np.sqrt((once**2).sum(1, dtype=np.float64) / d + 1e-5).astype(F32)[:, None]
    yield fault("applied twice", lambda: once / twice * w, op="final_norm")
    yield fault("zeros", lambda: x * 0)
    yield fault("truncated store", lambda: x / root() * w, rounding=cut)
    for what, values in _low_sums(x).items():
        low = np.sqrt(values / F32(d) + F32(1e-5))[:, None]
        yield fault("bf16 accumulation", lambda low=low: x / low * w, what)
    stored = {
        "model.layers.1.post_attention_layernorm.weight": normal(33, 2048, mean=1).bfloat16(),
        "model.layers.3.input_layernorm.weight": normal(34, 2048, mean=1).bfloat16(),
    }
    stored |= {f"model.layers.{i}.input_layernorm.weight": inputs["weight"] for i in (0, 1, 2)}
    for name in tuple(stored)[:2]:
        other = f32(stored[name])
        yield fault(
            "another tensor",
            lambda other=other: x / root() * other,
            name.split(".")[3],
            context=Context(weight=stored.get),
        )
    half = inputs["weight"].to(torch.float16).view(torch.bfloat16)
    yield fault("weight read as bf16", lambda: x / root() * f32(half), "fp16")
    wide = inputs["weight"][:1024].to(torch.float32).view(torch.bfloat16)
    yield fault("weight read as bf16", lambda: x / root() * f32(wide), "fp32")

    def half_written() -> Array:
        bits = store(x / root() * w)
        bits[:, 1024:] = POISON
        return bits

    yield fault("partly written", half_written, rounding=lambda bits: bits)
    yield fault("never written", lambda: poison(*x.shape), rounding=lambda bits: bits)
    factors = np.linspace(0.994, 1.005, len(x), dtype=F32)[:, None]
    yield fault("ratio per row", lambda: x / root() * w * factors)
    channel = np.linspace(0.5, 2, d, dtype=F32)
    many = dict(inputs, x=normal(35, 12, 2048))
    y = f32(many["x"])
    rooted = np.sqrt((y**2).sum(1, dtype=np.float64) / d + 1e-5).astype(F32)[:, None]
    yield Fault("attn_norm", "ratio per channel", many, lambda: store(y / rooted * w * channel))
    yield fault("constant ratio", lambda: x / root() * w * F32(1.01))
    tapped = Context(taps={"attn_residual": normal(36, 6, 2048)})
    z = f32(tapped.taps["attn_residual"])
    rooted_z = np.sqrt((z**2).sum(1, dtype=np.float64) / d + 1e-5).astype(F32)[:, None]
    yield fault("wrong operand", lambda: z / rooted_z * w, context=tapped)
    stale = Context(earlier={"mlp_residual": tapped.taps["attn_residual"]})
    yield fault("stale input", lambda: z / rooted_z * w, context=stale)


def _low_sums(x: Array) -> dict[str, Array]:
    squares = narrow(x * x)
    a, b = x[:, :1024], x[:, 1024:]

    def tree(slots: Array) -> Array:
        while slots.shape[1] > 1:
            slots = narrow(slots[:, ::2] + slots[:, 1::2])
        return slots[:, 0]

    total = np.zeros(len(x), F32)
    for column in squares.T:
        total = narrow(total + column)
    return {
        "tree": tree(narrow(squares[:, :1024] + squares[:, 1024:])),
        "tree, float32 squares": tree(narrow(a * a + b * b)),
        "one by one": total,
    }


# --- GEMMs ----------------------------------------------------------------------------------------


@cache
def gemm_inputs(out: int = 256, terms: int = 256, rows: int = 5) -> dict[str, Any]:
    return {
        "x": normal(41, rows, terms),
        "weight": normal(42, out, terms, std=0.05).to(torch.bfloat16),
    }


def _gemm_faults() -> Iterator[Fault]:
    inputs = gemm_inputs()
    x, w = f32(inputs["x"]), f32(inputs["weight"])
    n, out = len(x), len(w)

    def fault(
        name: str, make: Callable[[], Array], what: str = "", rounding: Any = store, **more: Any
    ) -> Fault:
        op = more.pop("op", "q_proj")
        before = more.pop("before", poison(n, out))
        return Fault(op, name, inputs, lambda: rounding(make()), before, what, **more)

    flat = w.reshape(-1)

    def strided(values: Array, rows: int, columns: int, stride: int) -> Array:
        return np.stack([values[r * stride : r * stride + columns] for r in range(rows)])

    yield fault("transposed weight", lambda: x @ w)
    wide = gemm_inputs(128, 256)
    wide_x, wide_w = f32(wide["x"]), f32(wide["weight"])
    yield Fault(
        "k_proj",
        "transposed weight",
        wide,
        lambda: store(wide_x @ wide_w.reshape(256, 128)),
        what="not square",
    )
    yield fault("weight's leading dimension", lambda: x @ strided(flat, out, 256, 64).T)
    stored = {
        "model.layers.1.self_attn.o_proj.weight": normal(43, 256, 256).bfloat16(),
        "model.layers.2.self_attn.q_proj.weight": normal(44, 256, 256).bfloat16(),
        "model.layers.0.self_attn.q_proj.weight": normal(45, 256, 256).bfloat16(),
    }
    for name, tensor in stored.items():
        yield fault(
            "another tensor",
            lambda tensor=tensor: x @ f32(tensor).T,
            ".".join(name.split(".")[2:5]),
            context=Context(weight=stored.get),
        )
    half = inputs["weight"].to(torch.float16).view(torch.bfloat16)
    yield fault("weight read as bf16", lambda: x @ f32(half).T, "fp16")
    interleaved = inputs["weight"].reshape(-1)[: w.size // 2].to(torch.float32)
    as_bf16 = f32(interleaved.view(torch.bfloat16).reshape(w.shape))
    yield fault("weight read as bf16", lambda: x @ as_bf16.T, "fp32", op="logits")
    yield fault("zeros", lambda: x @ w.T * 0, op="logits")
    for alpha in (2.0, 0.125):
        yield fault("alpha", lambda alpha=alpha: x @ w.T * F32(alpha), f"{alpha}")
    held = bf16_bits(normal(46, n, out))
    yield fault("beta 1", lambda: x @ w.T + f32(from_bits(held)), before=held)
    yield fault("part of the sum", lambda: x[:, :128] @ w[:, :128].T, "first half")
    yield fault("part of the sum", lambda: x[:, :-1] @ w[:, :-1].T, "not the last")
    yield fault("activation's leading dimension", lambda: strided(x.reshape(-1), n, 256, 64) @ w.T)
    yield fault("wrong row", lambda: np.roll(x, 1, 0) @ w.T)

    def spaced() -> Array:
        bits, right = poison(n * out), store(x @ w.T)
        for r in range(n):
            bits[r * 512 : r * 512 + out] = right[r][: max(0, n * out - r * 512)]
        return bits.reshape(n, out)

    yield fault("result's leading dimension", spaced, rounding=lambda bits: bits)
    yield fault("truncated store", lambda: x @ w.T, rounding=cut)
    yield fault("transposed weight + truncated store", lambda: x @ w, rounding=cut)
    yield fault("alpha + part of the sum", lambda: 2 * x[:, :128] @ w[:, :128].T)
    yield fault("constant ratio", lambda: x @ w.T * F32(1.003))
    tapped = Context(taps={"mlp_norm": normal(47, n, 256)})
    z = f32(tapped.taps["mlp_norm"])
    yield fault("wrong operand", lambda: z @ w.T, context=tapped)
    stale = Context(earlier={"attn_norm": [tapped.taps["mlp_norm"]]})
    yield fault("stale input", lambda: z @ w.T, context=stale)
    shown = Context(taps={"k_proj": normal(48, n, out)})
    yield fault("equals another tap", lambda: f32(shown.taps["k_proj"]), context=shown)
    before = Context(earlier={"q_proj": normal(49, n, out)})
    yield fault("equals an earlier step", lambda: f32(before.earlier["q_proj"]), context=before)
    yield fault("never written", lambda: poison(n, out), rounding=lambda bits: bits)

    def one_row() -> Array:
        bits = store(x @ w.T)
        bits[1:] = POISON
        return bits

    yield fault("partly written", one_row, rounding=lambda bits: bits)
    heads = np.concatenate([(x @ w.T)[:, h * 64 : h * 64 + 64] for h in (1, 0, 3, 2)], axis=1)
    yield fault("heads exchanged", lambda: heads)
    copied = np.concatenate([(x @ w.T)[:, h * 64 : h * 64 + 64] for h in (0, 0, 2, 3)], axis=1)
    yield fault("wrong heads", lambda: copied)
    yield fault("rows exchanged", lambda: (x @ w.T)[[0, 3, 2, 1, 4]])
    yield fault("wrong rows", lambda: (x @ w.T)[[0, 1, 2, 2, 4]])
    paged = gemm_inputs(64, 128, 48)
    right = f32(paged["x"]) @ f32(paged["weight"]).T
    yield Fault(
        "gate_proj",
        "pages exchanged",
        paged,
        lambda: store(right.reshape(3, 16, 64)[[1, 0, 2]].reshape(48, 64)),
    )
    factor = np.repeat(np.array([1, 1.02, 0.9, 3], F32), 64)
    yield fault("ratio per head", lambda: x @ w.T * factor)


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


# --- the small ops --------------------------------------------------------------------------------


def _pointwise_faults() -> Iterator[Fault]:
    inputs = {"gate": normal(101, 2, 1024, std=3), "up": normal(102, 2, 1024)}
    a, b = f32(inputs["gate"]), f32(inputs["up"])

    def silu(x: Array) -> Array:
        return x * (F32(1) / (F32(1) + np.exp(-x)))

    def sigmoid(x: Array) -> Array:
        return F32(1) / (F32(1) + np.exp(-x))

    def gelu(x: Array) -> Array:
        inner = F32(0.7978845608) * (x + F32(0.044715) * x * x * x)
        return F32(0.5) * x * (F32(1) + np.tanh(inner))

    def gelu_erf(x: Array) -> Array:
        return F32(0.5) * x * (F32(1) + torch.erf(torch.from_numpy(x * F32(0.5**0.5))).numpy())

    zero = F32(0)
    wrong: dict[str, Callable[[], Array]] = {
        "GELU, tanh form": lambda: gelu(a) * b,
        "GELU, erf form": lambda: gelu_erf(a) * b,
        "quick GELU": lambda: a * sigmoid(F32(1.702) * a) * b,
        "ReLU": lambda: np.maximum(a, zero) * b,
        "squared ReLU": lambda: np.maximum(a, zero) ** 2 * b,
        "no activation": lambda: a * b,
        "sigmoid alone": lambda: sigmoid(a) * b,
        "tanh": lambda: np.tanh(a) * b,
        "exponent's sign": lambda: a * sigmoid(-a) * b,
        "up missing": lambda: silu(a),
        "gate and up added": lambda: silu(a) + b,
        "activation of the product": lambda: silu(a * b),
        "operands exchanged": lambda: silu(b) * a,
        "gate twice": lambda: silu(a) * a,
        "up twice": lambda: silu(b) * b,
        "zeros": lambda: a * zero,
        "GELU, tanh form + operands exchanged": lambda: gelu(b) * a,
        "constant ratio": lambda: silu(a) * b * F32(1.7),
    }
    for name, make in wrong.items():
        before = bf16_bits(inputs["gate"])
        yield Fault("swiglu", name, inputs, lambda make=make: store(make()), before)
    yield Fault("swiglu", "truncated store", inputs, lambda: cut(silu(a) * b))

    sums = {"x": normal(103, 3, 1024), "y": normal(104, 3, 1024)}
    x, y = f32(sums["x"]), f32(sums["y"])
    taps = {"mlp_norm": normal(105, 3, 1024)}
    added: dict[str, Callable[[], Array]] = {
        "block's output missing": lambda: x,
        "residual missing": lambda: y,
        "residual added to itself": lambda: x + x,
        "output added to itself": lambda: y + y,
        "output added twice": lambda: narrow(x + y) + y,
        "residual added twice": lambda: narrow(x + y) + x,
        "output subtracted": lambda: x - y,
        "operands multiplied": lambda: x * y,
        "zeros": lambda: x * zero,
        "wrong operand": lambda: x + f32(taps["mlp_norm"]),
    }
    for name, make in added.items():
        yield Fault(
            "attn_residual",
            name,
            sums,
            lambda make=make: store(make()),
            bf16_bits(sums["x"]),
            context=Context(taps=taps),
        )
    yield Fault("mlp_residual", "truncated store", sums, lambda: cut(x + y))
    ties = {"x": (torch.arange(128, dtype=torch.float64) / 128 + 1)[None]}
    ties["y"] = torch.full_like(ties["x"], 2.0**-8)
    yield Fault(
        "mlp_residual",
        "ties away from zero",
        ties,
        lambda: (((f32(ties["x"]) + f32(ties["y"])).view(np.uint32) + 0x8000) >> 16).astype(
            np.uint16
        ),
    )
    first = store(x + y)
    first[1:] = bf16_bits(sums["x"])[1:]
    yield Fault("mlp_residual", "partly written", sums, lambda: first, bf16_bits(sums["x"]))


def _copy_faults() -> Iterator[Fault]:
    table = normal(111, 128, 256, std=0.02).to(torch.bfloat16)
    ids = torch.tensor([5, 17, 3, 90, 2])
    big = torch.tensor([5, 65541, 98304 + 3, 90, 2])  # the table is asked for small ids only

    def rows(name: str, which: torch.Tensor) -> torch.Tensor | None:
        return table[which % 128] if name == "model.embed_tokens.weight" else None

    context = Context(rows=rows)

    def embedded(name: str, made: torch.Tensor, what: str = "") -> Fault:
        inputs = {"tokens": ids, "table": table}
        return Fault(
            "embed", name, inputs, lambda: bf16_bits(made.double()), poison(5, 256), what,
            context=context, layer=None,
        )  # fmt: skip

    del big
    yield embedded("another token's row", table[ids + 1], "id + 1")
    yield embedded("another token's row", table[torch.arange(5)], "row number")
    yield embedded("another row of the prompt", table[ids].roll(-1, 0))
    yield embedded("embedding scaled", round_to_bf16(table[ids].double() * 2048**0.5))
    fp16 = table.to(torch.float16).view(torch.bfloat16)
    yield embedded("weight read as bf16", fp16[ids], "fp16")
    fp32 = table[:64].to(torch.float32).view(torch.bfloat16).reshape(128, 256)
    yield embedded("weight read as bf16", fp32[ids], "fp32")

    n = 35
    inputs = {"k": normal(112, n, 512), "v": normal(113, n, 512)}
    k, v = bf16_bits(inputs["k"]), bf16_bits(inputs["v"])
    both = np.stack((k, v))

    def written(name: str, bits: Array, what: str = "", **more: Any) -> Fault:
        return Fault("kv_write", name, inputs, lambda: bits, poison(2, n, 512), what, **more)

    at = np.arange(n)

    def only(keep: Array) -> Array:
        return np.where(keep[None, :, None], both, np.uint16(POISON))

    yield written("K and V exchanged", both[::-1].copy())
    yield written("keys in both pages", np.stack((k, k)))
    yield written("values in both pages", np.stack((v, v)))
    yield written("one token of a span copied", only(at % 16 == 0), "each page's")
    yield written("one token of a span copied", only(at == 0), "the prompt's")
    yield written("only whole pages copied", only(at < 32))
    yield written("every page from the prompt's start", both[:, at % 16])
    late = np.roll(both, 1, 1)
    late[:, 0] = POISON
    yield written("rows shifted", late)
    yield written("other rows' tokens", both[:, [0] * n])
    unrotated = normal(114, n, 512)
    yield written(
        "unrotated keys",
        np.stack((bf16_bits(unrotated), v)),
        context=Context(taps={"k_proj": unrotated}),
    )
    angle = np.arange(n, dtype=F32)[:, None, None] * inv_freq()
    yield written(
        "values rotated",
        np.stack((k, store(rotated(f32(inputs["v"]), angle)))),
        context=Context(positions=tuple(range(n))),
    )
    yield written("partly written", only(at < 20), "only 20 rows")
    changed = Context(
        changes=[_Change("kv_cache", 65535 * 32768 + 6 * 1024, 2048)],
        table=np.full((2, 16, 128), 65535, np.int32),
        slots=(0,),
        positions=(5,),
    )
    yield written("written elsewhere", poison(2, n, 512), context=changed)

    z = -1 - normal(121, 2, 4096).abs()
    negative = {"logits": z}
    ordinary = {"logits": normal(122, 2, 4096)}
    tied = {"logits": ordinary["logits"].clone()}
    tied["logits"][:, [7, 99, 2000]] = 50.0
    best = ordinary["logits"].argmax(1).numpy()

    def chosen(name: str, inputs: dict[str, Any], got: Any, **more: Any) -> Fault:
        made = np.asarray(got, dtype=np.int64)
        return Fault("argmax", name, inputs, lambda: made, layer=None, **more)

    yield chosen("starts at 0.0", negative, [0, 0])
    yield chosen("last of equals", tied, [2000, 2000])
    yield chosen("least logit", ordinary, ordinary["logits"].argmin(1))
    yield chosen("greatest magnitude", negative, z.abs().argmax(1))
    yield chosen("second best", ordinary, ordinary["logits"].topk(2).indices[:, 1])
    yield chosen("index off by one", ordinary, best + 1)
    at_first = {"logits": ordinary["logits"].clone()}
    at_first["logits"][:, 0] = 50
    yield chosen("first index skipped", at_first, best)
    at_last = {"logits": ordinary["logits"].clone()}
    at_last["logits"][:, -1] = 50
    yield chosen("last index skipped", at_last, best)
    wide = {"logits": torch.zeros(1, 128256, dtype=torch.float64)}
    for place, value in ((11, 1.0), (40000, 2.0), (70000, 3.0), (128100, 4.0)):
        wide["logits"][0, place] = value
    yield chosen("ordinary tokens only", wide, [70000])
    yield chosen("first 65536 only", wide, [40000])
    yield chosen("first 32000 only", wide, [11])
    yield chosen("index modulo 65536", wide, [128100 - 65536])
    nan = {"logits": ordinary["logits"].clone()}
    nan["logits"][:, 17] = torch.nan
    yield chosen("NaN wins", nan, [17, 17])
    yield chosen("always 0", ordinary, [0, 0])
    yield chosen("wrong row", ordinary, best[::-1])
    every = normal(123, 5, 4096)
    yield chosen(
        "wrong row",
        {"logits": every[-1:]},
        every[:1].argmax(1),
        context=Context(taps={"logits": every}),
    )
    old = normal(124, 2, 4096)
    yield chosen(
        "logits of an earlier step",
        ordinary,
        old.argmax(1),
        context=Context(earlier={"logits": old}),
    )


@dataclass(frozen=True)
class _Change:
    buffer: str
    offset: int
    bytes: int


# --- the table ------------------------------------------------------------------------------------


@cache
def faults() -> tuple[Fault, ...]:
    makers = (
        *(_rope_faults, _norm_faults, _gemm_faults, _softmax_faults, _mask_faults),
        *(_scores_faults, _attn_v_faults, _attention_faults, _pointwise_faults, _copy_faults),
    )
    return tuple(fault for make in makers for fault in make())


@dataclass(frozen=True)
class Row:
    fault: Fault
    found: tuple[str, ...]  # names, each once
    sentences: tuple[str, ...]
    seconds: float


@cache
def explained(fault_number: int) -> Row:
    fault = faults()[fault_number]
    start = time.perf_counter()
    evidence = fault.evidence()
    start = time.perf_counter()
    made = diagnose(evidence)
    names = tuple(dict.fromkeys(d.hypothesis for d in made))
    return Row(fault, names, tuple(d.sentence for d in made), time.perf_counter() - start)


def explanation_table() -> Iterator[Row]:
    """Every planted fault, and all that explains it."""
    return (explained(i) for i in range(len(faults())))


@pytest.mark.parametrize("number", range(len(faults())), ids=[str(f) for f in faults()])
def test_planted_fault_is_named(number: int) -> None:
    row = explained(number)
    assert row.fault.name in row.found, row.sentences


def test_every_hypothesis_has_a_planted_fault() -> None:
    planted = {name for fault in faults() for name in fault.name.split(" + ")}
    assert set(families.names()) - planted == set()


def main() -> None:
    seconds = 0.0
    for row in explanation_table():
        fault, seconds = row.fault, seconds + row.seconds
        others = ", ".join(name for name in row.found if name != fault.name)
        mark = "  " if fault.name in row.found else "! "
        what = f"{fault.name}, {fault.what}" if fault.what else fault.name
        print(f"{mark}{fault.op:14}{what:62}{row.seconds:5.2f} s  {others}", flush=True)
    print(f"{len(faults())} faults, {seconds:.1f} s")


if __name__ == "__main__":
    main()
