"""Norms and GEMMs that are wrong, each to be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from harness.hypotheses import Context
from harness.verdict import POISON
from reference.rounding import bf16_bits, from_bits, round_to_bf16
from tests.harness.planted import (
    F32,
    cut,
    f32,
    narrow,
    normal,
    store,
)
from tests.harness.test_hypotheses import Array, Fault, explained, poison

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
    halves = [
        f32(round_to_bf16(torch.from_numpy(np.float64(x[:, half] @ w[:, half].T))))
        for half in (slice(0, x.shape[1] // 2), slice(x.shape[1] // 2, None))
    ]
    yield fault("bf16 partial sums", lambda: halves[0] + halves[1])
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


FAULTS = (
    *_norm_faults(),
    *_gemm_faults(),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_named(fault: Fault) -> None:
    row = explained(fault)
    assert fault.name in row.found, row.sentences
