"""The ops in float32: right in any summation order, or with a fault planted; and their verdicts.

NumPy stands in for the kernels: `kernel(op, inputs, order)` gives the bf16 bits a correct kernel
could store, each of `FAULTS` those of a wrong one. From the repository's root,
`python -m tests.harness.planted` prints the detection table that README.md quotes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from harness.battery import PASSES, Pass, battery_inputs
from harness.bounds import bound_of
from harness.equivalents import equivalents_of
from harness.verdict import POISON, Judgement, judge
from reference import ops
from reference.rounding import bf16_bits, round_to_bf16

F32 = np.float32
NORMS = ("attn_norm", "mlp_norm", "final_norm")
PROJECTIONS = {  # inputs, outputs (a few of them: every column is computed alike)
    "q_proj": (2048, 128),
    "k_proj": (2048, 128),
    "v_proj": (2048, 128),
    "o_proj": (2048, 96),
    "gate_proj": (2048, 96),
    "up_proj": (2048, 96),
    "down_proj": (8192, 48),
    "logits": (2048, 96),
}

# --- float32 sums over the last axis, in many orders ----------------------------------------------


def sequential(x: np.ndarray) -> np.ndarray:
    return np.add.accumulate(x, axis=-1, dtype=F32)[..., -1]


def pairwise(x: np.ndarray) -> np.ndarray:
    """A tree over neighbours, as the norm's."""
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = np.concatenate((x, np.zeros_like(x[..., :1])), axis=-1)
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def blocked(x: np.ndarray) -> np.ndarray:
    """Lanes of 32 that each take every 32nd term, added up by a tree: a warp."""
    x = np.concatenate((x, np.zeros((*x.shape[:-1], -x.shape[-1] % 32), F32)), axis=-1)
    lanes = x.reshape(*x.shape[:-1], -1, 32).swapaxes(-1, -2)
    return pairwise(sequential(lanes))


def truncating(x: np.ndarray) -> np.ndarray:
    """Blocks of 16 added exactly, then into a sum that is cut to float32: a tensor core at its
    worst.
    """
    x = np.concatenate((x, np.zeros((*x.shape[:-1], -x.shape[-1] % 16), F32)), axis=-1)
    blocks = x.reshape(*x.shape[:-1], -1, 16).astype(np.float64).sum(-1)
    total = np.zeros(blocks.shape[:-1], F32)
    for i in range(blocks.shape[-1]):
        exact = total + blocks[..., i]
        total = exact.astype(F32)
        over = np.abs(total) > np.abs(exact)
        total = np.where(over, np.nextafter(total, F32(0)), total)
    return total


def permuted(seed: int) -> Callable[[np.ndarray], np.ndarray]:
    def total(x: np.ndarray) -> np.ndarray:
        return sequential(x[..., np.random.default_rng(seed).permutation(x.shape[-1])])

    return total


Order = Callable[[np.ndarray], np.ndarray]
ORDERS: dict[str, Order] = {
    "sequential": sequential,
    "reversed": lambda x: sequential(x[..., ::-1]),
    "pairwise": pairwise,
    "blocked": blocked,
    "sorted": lambda x: sequential(np.sort(x, axis=-1)),
    "truncating": truncating,
    "permuted": permuted(7),
}

# --- stores ---------------------------------------------------------------------------------------


def store(x: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits, nearest even; a NaN is 0x7FFF."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    near = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), near)


def cut(x: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits by dropping the rest."""
    return (np.ascontiguousarray(x, F32).view(np.uint32) >> 16).astype(np.uint16)


def narrow(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bf16, still float32."""
    return (store(x).astype(np.uint32) << 16).view(F32)


def f32(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float32).numpy()


# --- correct kernels ------------------------------------------------------------------------------


def gemm(a: np.ndarray, w: np.ndarray, order: Order = sequential) -> np.ndarray:
    """a (n, K), w (m, K) -> (n, m), a row at a time."""
    return np.stack([order(row * w) for row in a])


def norm(inputs: Any, order: Order = pairwise, eps: float = 1e-5, mean: bool = True) -> np.ndarray:
    x, weight = f32(inputs["x"]), f32(inputs["weight"])
    total = order(x * x).astype(np.float64) / (x.shape[-1] if mean else 1)
    root = np.sqrt(total + eps).astype(F32)[:, None]
    return x / root * weight


def inv_freq(scaled: bool = True, theta: float = 500000.0) -> np.ndarray:
    """float32 (32,), by the steps of the engine's own table."""
    plain = F32(1) / np.power(F32(theta), np.arange(0, 64, 2, dtype=F32) / F32(64))
    wave = (2 * np.pi / plain.astype(np.float64)).astype(F32)
    blend = (F32(8192) / wave - F32(1)) / F32(3)
    middle = (F32(1) - blend) * plain / F32(32) + blend * plain
    slow = np.where(wave > 8192, plain / F32(32), np.where(wave >= 2048, middle, plain))
    return slow if scaled else plain


def rope(
    inputs: Any,
    frequencies: np.ndarray | None = None,
    adjacent: bool = False,
    table: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    product: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    position: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """`table` and `product` say what becomes of cos and sin, and of each product."""
    x = f32(inputs["x"])
    frequencies = inv_freq() if frequencies is None else frequencies
    angle = position(inputs["positions"].numpy().astype(F32))[:, None, None] * frequencies
    cos, sin = table(np.cos(angle)), table(np.sin(angle))  # (n, 1, 32)
    pairs = x.reshape(len(x), -1, 32, 2) if adjacent else x.reshape(len(x), -1, 2, 32)
    axis = 3 if adjacent else 2
    first, second = np.take(pairs, 0, axis), np.take(pairs, 1, axis)
    turned = (
        product(first * cos) - product(second * sin),
        product(second * cos) + product(first * sin),
    )
    return np.stack(turned, axis=axis).reshape(x.shape)


def scores(inputs: Any, order: Order = sequential) -> np.ndarray:
    q = f32(inputs["q"]).reshape(len(inputs["q"]), 32, 64)
    k = f32(inputs["k"]).reshape(len(inputs["k"]), 8, 64)
    return np.stack([gemm(q[:, h], k[:, h // 4], order) for h in range(32)]) * F32(0.125)


def softmax(inputs: Any, order: Order = sequential) -> np.ndarray:
    x = f32(inputs["scores"])
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / order(e)[..., None]


def attn_v(inputs: Any, order: Order = sequential) -> np.ndarray:
    probs, v = f32(inputs["probs"]), f32(inputs["v"])
    heads = [gemm(probs[h], v[:, h // 4 * 64 : h // 4 * 64 + 64].T, order) for h in range(32)]
    return np.concatenate(heads, axis=1)


def attention(
    inputs: Any,
    order: Order = sequential,
    weigh: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Two passes over the keys in any order; `weigh` says what becomes of the probabilities."""
    rows = []
    for row, (keys, values) in enumerate(zip(inputs["keys"], inputs["values"], strict=True)):
        s = scores({"q": inputs["q"][row : row + 1], "k": keys}, order)[:, 0]  # (32, len)
        e = np.exp(s - s.max(-1, keepdims=True))
        v = f32(values).reshape(-1, 8, 64).repeat(4, axis=1).transpose(1, 2, 0)  # (32, 64, len)
        if weigh is None:
            rows.append(order(e[:, None] * v) / order(e)[:, None])
        else:
            rows.append(order(weigh(e / order(e)[:, None])[:, None] * v))
    return np.stack(rows).reshape(len(rows), -1)


def attention_online(inputs: Any) -> np.ndarray:
    """As the engine: token by token, rescaled when the maximum moves."""
    rows = []
    for row, (keys, values) in enumerate(zip(inputs["keys"], inputs["values"], strict=True)):
        s = scores({"q": inputs["q"][row : row + 1], "k": keys}, pairwise)[:, 0]
        v = f32(values).reshape(-1, 8, 64).repeat(4, axis=1)  # (len, 32, 64)
        top, d = np.full(32, -np.inf, F32), np.zeros(32, F32)
        acc = np.zeros((32, 64), F32)
        for t in range(len(v)):
            new = np.maximum(top, s[:, t])
            shrink, e = np.exp(top - new), np.exp(s[:, t] - new)
            d, acc, top = d * shrink + e, acc * shrink[:, None] + e[:, None] * v[t], new
        rows.append((acc / d[:, None]).reshape(-1))
    return np.stack(rows)


def swiglu(inputs: Any, act: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
    gate, up = f32(inputs["gate"]), f32(inputs["up"])
    with np.errstate(over="ignore"):
        return (act(gate) if act else gate * (F32(1) / (F32(1) + np.exp(-gate)))) * up


def mask(
    inputs: Any,
    row: Callable[[np.ndarray, int], np.ndarray] = lambda block, n: block % n,
    address: Callable[[np.ndarray, int], np.ndarray] = lambda block, n: block * n,
    hidden: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.greater,
    value: float = -np.inf,
) -> np.ndarray:
    """Block by block as the engine: thread T of block B stores at address(B) + T if T > row(B)."""
    x = f32(inputs["scores"]).copy()
    n = x.shape[-1]
    flat = x.reshape(-1)
    block, thread = np.arange(32 * n)[:, None], np.arange(n)
    flat[(address(block, n) + thread)[hidden(thread, row(block, n))]] = value
    return x


def kernel(op: str, inputs: Any, order: str = "sequential") -> np.ndarray:
    """The bits that a correct kernel stores (int64 indices for argmax)."""
    total = ORDERS[order]
    if op in PROJECTIONS:
        return store(gemm(f32(inputs["x"]), f32(inputs["weight"]), total))
    if op in NORMS:
        return store(norm(inputs, total))
    if op.endswith("rope"):
        return store(rope(inputs))
    if op.endswith("residual"):
        return store(f32(inputs["x"]) + f32(inputs["y"]))
    if op == "argmax":
        return f32(inputs["logits"]).argmax(1)
    if op in ("embed", "kv_write"):
        return bf16_bits(real_of(op, inputs))
    summed = {"scores": scores, "softmax": softmax, "attn_v": attn_v, "attention": attention}
    if op in summed:
        return store(summed[op](inputs, total))
    return store({"swiglu": swiglu, "mask": mask}[op](inputs))


# --- judging --------------------------------------------------------------------------------------


REAL: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(NORMS, ops.rms_norm),
    **dict.fromkeys(PROJECTIONS, ops.linear),
    **dict.fromkeys(("q_rope", "k_rope"), ops.rope),
    **dict.fromkeys(("attn_residual", "mlp_residual"), ops.residual),
    **{op: getattr(ops, op) for op in ("embed", "kv_write", "scores", "mask", "softmax")},
    **{op: getattr(ops, op) for op in ("attn_v", "attention", "swiglu", "argmax")},
}


def real_of(op: str, inputs: Any) -> torch.Tensor:
    """The real float64 result."""
    return REAL[op](*inputs.values())


def verdict_of(op: str, inputs: Any, got: np.ndarray, **flags: bool) -> Judgement:
    real = real_of(op, inputs)
    variants = equivalents_of(op, inputs, real)
    return judge(got, real, bound_of(op, inputs, real), equivalents=variants, **flags)


def normal(seed: int, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    z = np.random.default_rng(seed).standard_normal(shape)
    return round_to_bf16(torch.from_numpy(z * std + mean))


@cache
def weights(op: str) -> dict[str, torch.Tensor]:
    """A model's weights for an op, with fewer output columns than the model has."""
    if op in NORMS:
        return {"weight": normal(1, 2048, std=0.05, mean=0.5)}
    if op in PROJECTIONS:
        terms, out = PROJECTIONS[op]
        return {"weight": normal(2, out, terms, std=0.02).to(torch.bfloat16)}
    if op.endswith("rope"):
        return {"inv_freq": ops.llama3_inv_freq()}
    if op == "embed":
        table = normal(3, 512, 64, std=0.02).to(torch.bfloat16)
        return {"weight": table[torch.arange(128256) % 512]}
    return {}


@cache
def stressed(name: str, op: str) -> dict[str, Any]:
    """The battery's inputs of a pass, by the end of its name, such as "prefill-33"."""
    return battery_inputs(the_pass(name), op, weights(op))


def the_pass(name: str) -> Pass:
    return next(p for p in PASSES if p.name == "battery-" + name)


# --- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One wrong kernel on one input. `figure`: the share outside d measured before this project."""

    id: str
    op: str
    what: str
    input: str
    make: Callable[[], tuple[Any, np.ndarray]]  # inputs, stored bits
    figure: str = ""
    expect: str = "failure"  # or "equivalent"


@dataclass(frozen=True)
class Row:
    """A line of the detection table: shares in percent of all elements."""

    fault: Fault
    verdict: str
    outside_b: float
    outside_d: float
    judgement: Judgement

    @property
    def right(self) -> bool:
        return (self.verdict == "equivalent") == (self.fault.expect == "equivalent") and (
            bool(self.judgement) == (self.fault.expect == "equivalent")
        )


@cache
def gauss_gemm(terms: int, out: int = 96, rows: int = 33) -> dict[str, torch.Tensor]:
    x, weight = normal(11, rows, terms), normal(12, out, terms, std=0.02)
    return {"x": x, "weight": weight.to(torch.bfloat16)}


@cache
def gauss_attention(lengths: tuple[int, ...] = (258, 1024)) -> dict[str, Any]:
    return {
        "q": normal(13, len(lengths), 2048),
        "keys": [normal(14 + n, n, 512) for n in lengths],
        "values": [normal(15 + n, n, 512) for n in lengths],
    }


def split_k(x: np.ndarray, parts: int = 4) -> np.ndarray:
    """Each part of K is added in float32 and stored as bf16, then the parts are added."""
    return sequential(np.stack([narrow(pairwise(p)) for p in np.array_split(x, parts, -1)], -1))


def six_bits(weight: np.ndarray) -> np.ndarray:
    """Weights of 6 significant bits, where bf16 has 8."""
    mantissa, exponent = np.frexp(weight)
    return np.ldexp(np.round(mantissa * 64) / 64, exponent).astype(F32)


def flipped(weight: np.ndarray, column: int = 17) -> np.ndarray:
    """The sign of one column's largest weight flipped."""
    weight = weight.copy()
    weight[column, np.abs(weight[column]).argmax()] *= -1
    return weight


def _gemm_faults() -> Iterator[Fault]:
    def faulty(terms: int, how: str) -> tuple[Any, np.ndarray]:
        inputs = gauss_gemm(terms)
        x, w = f32(inputs["x"]), f32(inputs["weight"])
        if how == "truncated store":
            return inputs, cut(gemm(x, w))
        if how.startswith("factor"):
            return inputs, store(gemm(x, w) * F32(how.split()[1]))
        if how == "bf16 split-K":
            return inputs, store(gemm(x, w, split_k))
        return inputs, store(gemm(x, six_bits(w) if how == "6-bit weights" else flipped(w)))

    figures = {
        "truncated store": "33 %",
        "bf16 split-K": "26-40 %",
        "6-bit weights": "73 %",
        "factor 1.001": "6 %",
        "factor 1.01": "",
        "a column's largest weight: sign": "that column",
    }
    for how, figure in figures.items():
        for op, terms in (("gate_proj", 2048), ("down_proj", 8192)):
            make = partial(faulty, terms, how)
            yield Fault("GEMM", op, how, f"Gaussian, 33 x {terms}", make, figure)


def _norm_faults() -> Iterator[Fault]:
    def halved(inputs: Any) -> np.ndarray:
        bits = store(norm(inputs))
        bits[:, 1024:] = POISON
        return bits

    def low(inputs: Any) -> np.ndarray:
        squares = narrow(f32(inputs["x"]) ** 2)
        slots = narrow(squares[:, :1024] + squares[:, 1024:])
        while slots.shape[1] > 1:
            slots = narrow(slots[:, ::2] + slots[:, 1::2])
        root = np.sqrt(slots / F32(2048) + F32(1e-5))
        return store(f32(inputs["x"]) / root * f32(inputs["weight"]))

    def outside(inputs: Any) -> np.ndarray:
        x = f32(inputs["x"])
        root = np.sqrt((x * x).mean(1, keepdims=True)) + F32(1e-5)
        return store(x / root * f32(inputs["weight"]))

    def before_weight(inputs: Any) -> np.ndarray:
        one = {**inputs, "weight": torch.ones_like(inputs["weight"])}
        return store(narrow(norm(one)) * f32(inputs["weight"]))

    for phase in ("prefill-33", "decode-0-257"):
        inputs = partial(stressed, phase, "attn_norm")
        for id_, what, wrong in (
            ("H04", "second half not written", halved),
            ("H06", "squares and sum in bf16", low),
            ("P20", "eps 1e-6", lambda i: store(norm(i, eps=1e-6))),
            ("P20", "no eps", lambda i: store(norm(i, eps=0.0))),
            ("P21", "eps outside the root", outside),
            ("P23", "sum in place of mean", lambda i: store(norm(i, mean=False))),
        ):
            yield Fault(id_, "attn_norm", what, phase, partial(_with, inputs, wrong))
        what, make = "rounded before the weight", partial(_with, inputs, before_weight)
        yield Fault("N3", "attn_norm", what, phase, make, expect="equivalent")


def _rope_faults() -> Iterator[Fault]:
    near, far, last = "decode-0-257", "prefill-258", "decode-2047-32"
    for id_, what, passes, options in (
        ("H02", "all frequencies 1", (far, near, last), {"frequencies": np.ones(32, F32)}),
        ("P02", "adjacent pairs", (far, near), {"adjacent": True}),
        ("P04", "theta 10000", (near,), {"frequencies": inv_freq(theta=10000.0)}),
        ("P06", "plain frequencies", (far, near), {"frequencies": inv_freq(scaled=False)}),
        ("P10", "positions in bf16", (far, near, last), {"position": narrow}),
        ("P10", "cos and sin in bf16", (far, near, last), {"table": narrow}),
        ("HF", "cos, sin, products in bf16", (far, near), {"table": narrow, "product": narrow}),
        ("N", "both products in bf16", (far, near, last), {"product": narrow}),
    ):
        for phase in passes:
            op = "k_rope" if phase == far else "q_rope"
            inputs = partial(stressed, phase, op)
            make = partial(_with, inputs, lambda i, o=options: store(rope(i, **o)))
            expect = "equivalent" if id_ == "N" else "failure"
            yield Fault(id_, op, what, phase, make, expect=expect)


def _mask_faults() -> Iterator[Fault]:
    packed = {
        "row": lambda block, n: block // 32,
        "address": lambda block, n: block,
    }
    for phase in ("prefill-33", "prefill-15"):
        inputs = partial(stressed, phase, "mask")
        for id_, what, options in (
            ("H01", "row and address", packed),
            ("H01", "row only", {"row": packed["row"]}),
            ("H01", "address only", {"address": packed["address"]}),
            ("P38", "inverted", {"hidden": np.less}),
            ("P36", "absent", {"hidden": lambda t, r: (t > r) & False}),
            ("P39", "value -10", {"value": -10.0}),
        ):
            make = partial(_with, inputs, lambda i, o=options: store(mask(i, **o)))
            yield Fault(id_, "mask", what, phase, make)
        make = partial(_with, inputs, lambda i: store(mask(i, value=-10000.0)))
        yield Fault("P39", "mask", "value -10000", phase, make, expect="equivalent")


def _other_faults() -> Iterator[Fault]:
    def gelu(a: np.ndarray) -> np.ndarray:
        inner = F32(0.7978845608) * (a + F32(0.044715) * a * a * a)
        return F32(0.5) * a * (F32(1) + np.tanh(inner))

    def silu_first(inputs: Any) -> np.ndarray:
        ones = {**inputs, "up": torch.ones_like(inputs["up"])}
        return store(narrow(swiglu(ones)) * f32(inputs["up"]))

    for phase in ("prefill-33", "decode-0-257"):
        inputs = partial(stressed, phase, "swiglu")
        for what, act in (("GELU-tanh", gelu), ("ReLU", lambda a: np.maximum(a, F32(0)))):
            make = partial(_with, inputs, lambda i, a=act: store(swiglu(i, a)))
            yield Fault("P64", "swiglu", what, phase, make)
        make = partial(_with, inputs, silu_first)
        yield Fault("N", "swiglu", "SiLU in bf16", phase, make, expect="equivalent")

    def shiftless(inputs: Any) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            e = np.exp(f32(inputs["scores"]))
            return store(e / sequential(e)[..., None])

    inputs = partial(stressed, "prefill-33", "softmax")
    yield Fault("P41", "softmax", "no maximum", "prefill-33", partial(_with, inputs, shiftless))
    for phase in ("prefill-33", "decode-2047-32"):
        make = partial(_with, partial(stressed, phase, "argmax"), _from_zero)
        yield Fault("P71", "argmax", "starts at 0.0", phase, make)
    make = partial(_with, gauss_attention, lambda i: cut(attention(i)))
    yield Fault("store", "attention", "truncated store", "Gaussian, 258 and 1024 keys", make)
    make = partial(_with, gauss_attention, lambda i: store(attention(i) * F32(1.001)))
    yield Fault("scale", "attention", "factor 1.001", "Gaussian, 258 and 1024 keys", make)
    make = partial(_with, gauss_attention, lambda i: store(attention(i, weigh=narrow)))
    what = "probabilities in bf16"
    yield Fault("N", "attention", what, "Gaussian, 258 and 1024 keys", make, expect="equivalent")


def _from_zero(inputs: Any) -> np.ndarray:
    best = inputs["logits"].max(1)
    return np.where(best.values > 0, best.indices, 0)


def _with(inputs: Callable[[], Any], wrong: Callable[[Any], np.ndarray]) -> tuple[Any, np.ndarray]:
    made = inputs()
    return made, wrong(made)


def faults() -> list[Fault]:
    """Every planted fault, and the negative controls ("N"), which must be `equivalent`."""
    makers = (_gemm_faults, _norm_faults, _rope_faults, _mask_faults, _other_faults)
    return [fault for make in makers for fault in make()]


def detection_table() -> list[Row]:
    """Each fault planted and judged; the numbers of the README."""
    return [row_of(fault) for fault in faults()]


def row_of(fault: Fault) -> Row:
    inputs, bits = fault.make()
    judgement = verdict_of(fault.op, inputs, bits)
    share = 100 / judgement.elements
    return Row(
        fault,
        judgement.verdict,
        judgement.impossible * share,
        judgement.improbable * share,
        judgement,
    )


def main() -> int:
    head = f"{'id':6}{'op':11}{'fault':33}{'input':28}{'outside b':>10}{'outside d':>10}"
    print(f"{head}  {'seen before':12} verdict")
    table = detection_table()
    for row in table:
        f = row.fault
        print(
            f"{f.id:6}{f.op:11}{f.what:33}{f.input:28}{row.outside_b:9.2f}%{row.outside_d:9.2f}%"
            f"  {f.figure:12} {row.verdict}{'' if row.right else '   MISSED'}"
        )
    missed = sum(not row.right for row in table)
    print(f"{len(table)} planted, {missed} judged wrongly")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
