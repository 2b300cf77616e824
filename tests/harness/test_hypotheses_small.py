"""SwiGLU, residual, embed, kv_write and argmax gone wrong, each fault to be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from harness.hypotheses import Context
from harness.verdict import POISON
from reference.rounding import bf16_bits, round_to_bf16
from tests.harness.planted import (
    F32,
    cut,
    f32,
    inv_freq,
    narrow,
    normal,
    store,
)
from tests.harness.test_hypotheses import Array, Fault, explained, poison
from tests.harness.test_hypotheses_rope import rotated

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


@dataclass(frozen=True)
class _Change:
    buffer: str
    offset: int
    bytes: int


FAULTS = (
    *_pointwise_faults(),
    *_copy_faults(),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_named(fault: Fault) -> None:
    row = explained(fault)
    assert fault.name in row.found, row.sentences
