"""No correct float32 kernel may be called wrong: any order of summation, any machine, any input."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import planted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import ORDERS, kernel, normal, real_of, store, stressed, verdict_of

from harness.battery import PASSES, ROWS
from harness.bounds import TINY, U, bound_of, ops
from harness.verdict import ulp_distance
from reference.ops import llama3_inv_freq
from reference.rounding import bf16_bits, from_bits, round_to_bf16

SUMMED = (*planted.PROJECTIONS, *planted.NORMS, "scores", "softmax", "attn_v", "attention")
GOLDEN = "tests/golden/kernels.npz"
bounded = partial(settings, deadline=None, derandomize=True)


def cases() -> list[tuple[str, str]]:
    """Every (pass, op) of the battery; norms and projections of one kind are judged alike."""
    alike = {"k_proj", "v_proj", "up_proj", "o_proj", "mlp_norm", "final_norm", "mlp_residual"}
    return [
        (p.name.removeprefix("battery-"), op) for p in PASSES for op in p.ops if op not in alike
    ]


@pytest.mark.parametrize(("name", "op"), cases())
def test_correct_kernels_pass_on_the_battery_in_any_order(name: str, op: str) -> None:
    inputs = stressed(name, op)
    real = real_of(op, inputs)
    bound = bound_of(op, inputs, real)
    some = ["sequential", "truncating"]  # at other lengths than 33
    orders = ["sequential"] if op not in SUMMED else ORDERS if name == "prefill-33" else some
    for order in orders:
        found = planted.judge(kernel(op, inputs, order), real, bound)
        assert found, (order, found)
        assert found.impossible == found.improbable == 0, (order, found)


@pytest.mark.parametrize("name", ["decode-0-257", "decode-2047-32", "decode-14-15"])
def test_online_attention_passes_on_the_battery(name: str) -> None:
    inputs = stressed(name, "attention")
    found = verdict_of("attention", inputs, store(planted.attention_online(inputs)))
    assert found
    assert found.improbable == 0


@bounded(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.integers(0, len(ROWS) - 1),
    terms=st.sampled_from([1, 2, 3, 15, 64, 97, 2048, 8192]),
    order=st.sampled_from(list(ORDERS)),
)
def test_a_gemm_passes_in_any_order(seed: int, kind: int, terms: int, order: str) -> None:
    random = np.random.default_rng(seed)
    x = np.stack([ROWS[kind](random.standard_normal(terms + 2), random.random(terms + 2))] * 2)
    shift = random.choice([0.0, 0.02])  # weights of one sign let partial sums grow
    inputs = {
        "x": round_to_bf16(torch.from_numpy(x[:, :terms])),
        "weight": normal(seed, 64, terms, std=0.02, mean=shift).to(torch.bfloat16),
    }
    got = store(planted.gemm(*(planted.f32(i) for i in inputs.values()), ORDERS[order]))
    found = verdict_of("down_proj", inputs, got)
    assert found, found
    assert found.impossible == 0


@bounded(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    op=st.sampled_from(["attn_norm", "q_rope", "swiglu", "softmax", "scores", "attn_v"]),
    scale=st.sampled_from([1e-4, 0.05, 1.0, 40.0]),
    order=st.sampled_from(list(ORDERS)),
)
def test_other_ops_pass_in_any_order(seed: int, op: str, scale: float, order: str) -> None:
    n = 1 + seed % 19
    draw = partial(normal, std=scale)
    inputs = {
        "attn_norm": lambda: {"x": draw(seed, n, 2048), **planted.weights("attn_norm")},
        "q_rope": lambda: {
            "x": draw(seed, n, 512),
            "positions": torch.arange(n) * 107,
            "inv_freq": llama3_inv_freq(),
        },
        "swiglu": lambda: {"gate": draw(seed, n, 512), "up": draw(seed + 1, n, 512)},
        "softmax": lambda: {"scores": draw(seed, 32, n, n)},
        "scores": lambda: {"q": draw(seed, n, 2048), "k": normal(seed + 1, n, 512)},
        "attn_v": lambda: {
            "probs": round_to_bf16(draw(seed, 32, n, n).softmax(-1)),
            "v": normal(seed + 1, n, 512),
        },
    }[op]()
    found = verdict_of(op, inputs, kernel(op, inputs, order))
    assert found, found
    assert found.impossible == found.improbable == 0


@bounded(max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    length=st.sampled_from([1, 2, 15, 16, 17, 97, 512, 1111]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 8.0]),
    order=st.sampled_from([*ORDERS, "online"]),
)
def test_attention_passes_in_any_order(seed: int, length: int, scale: float, order: str) -> None:
    inputs = {
        "q": normal(seed, 1, 2048, std=scale),
        "keys": [normal(seed + 1, length, 512)],
        "values": [normal(seed + 2, length, 512, mean=seed % 3 - 1.0)],
    }
    if order == "online":
        got = store(planted.attention_online(inputs))
    else:
        got = kernel("attention", inputs, order)
    found = verdict_of("attention", inputs, got)
    assert found, found
    assert found.impossible == found.improbable == 0


@pytest.mark.parametrize(("terms", "out"), [(2048, 8192), (2048, 512), (8192, 2048)])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_torchs_bf16_matmul_passes(rows: int, terms: int, out: int) -> None:
    x = normal(5, rows, terms)
    x[0, 99] = 300.0  # a massive channel
    weight = (torch.randn(out, terms, generator=torch.Generator().manual_seed(6)) * 0.02).bfloat16()
    got = bf16_bits((x.to(torch.bfloat16) @ weight.T).to(torch.float64))
    found = verdict_of("o_proj", {"x": x, "weight": weight}, got)
    assert found.verdict in ("exact", "rounding")
    assert found.improbable == 0


def test_a_float32_residual_add_rounds_only_once() -> None:
    random = np.random.default_rng(4)
    x = random.integers(0, 0x10000, (1000, 1000), np.uint16)
    y = x ^ random.integers(0, 0x10000, x.shape, np.uint16)
    y[:500] = x[:500] ^ random.integers(0, 0x400, (500, 1000), np.uint16)  # nearby exponents
    x[(x & 0x7F80) == 0x7F80] = 0  # no infinity, no NaN
    y[(y & 0x7F80) == 0x7F80] = 0
    inputs = {"x": from_bits(x), "y": from_bits(y)}
    with np.errstate(over="ignore"):
        got = store(planted.f32(inputs["x"]) + planted.f32(inputs["y"]))
    assert verdict_of("attn_residual", inputs, got).verdict == "exact"


@pytest.mark.parametrize("power", [-133, -130, -127, -126, -120])
def test_subnormal_results_pass(power: int) -> None:
    x = normal(8, 4, 2048) * 2.0**power
    x = round_to_bf16(x)
    for op, inputs in {
        "attn_norm": {"x": x, "weight": normal(9, 2048, std=0.05, mean=0.5)},
        "q_rope": {
            "x": x,
            "positions": torch.tensor([0, 1, 257, 2047]),
            "inv_freq": llama3_inv_freq(),
        },
        "attn_residual": {"x": x, "y": -x.flip(0)},
        "swiglu": {"gate": x, "up": normal(10, 4, 2048)},
        "down_proj": {"x": x, "weight": normal(2, 32, 2048, std=0.02)},
        "attn_v": {"probs": torch.full((32, 4, 4), 0.25, dtype=x.dtype), "v": x[:, :512]},
    }.items():
        found = verdict_of(op, inputs, kernel(op, inputs))
        assert found, (op, found)
        assert found.impossible == 0


def test_softmax_passes_where_exp_underflows() -> None:
    x = -torch.arange(0.0, 128.0, 0.5, dtype=torch.float64).repeat(32, 2, 1)
    found = verdict_of("softmax", {"scores": x}, kernel("softmax", {"scores": x}))
    assert found
    assert found.impossible == 0


def test_upstreams_kernels_pass_on_their_goldens() -> None:
    with np.load(GOLDEN) as file:
        golden = dict(file)
    for op, inputs, out in _goldens(golden):
        found = verdict_of(op, inputs, out)
        assert found.verdict in ("exact", "rounding"), (op, found)
        assert found.improbable == 0
        right = from_bits(out) == round_to_bf16(real_of(op, inputs))
        assert right.double().mean() >= 0.999


def _goldens(golden: dict[str, np.ndarray]):
    def value(key: str) -> torch.Tensor:
        return from_bits(golden[key])

    frequencies = llama3_inv_freq()
    norm = {"x": value("rmsNorm/input"), "weight": value("rmsNorm/weight")}
    yield "attn_norm", norm, golden["rmsNorm/out"]
    for x in "qk":
        rope = {"x": value(f"rope/{x}_in"), "positions": torch.arange(19), "inv_freq": frequencies}
        yield f"{x}_rope", rope, golden[f"rope/{x}_out"]
    for n in (5, 17):
        scores = {"scores": value(f"causalMask/{n}_in")}
        yield "mask", scores, golden[f"causalMask/{n}_out"]
        yield "softmax", scores, golden[f"softmax/unmasked_{n}_out"]
    add = {"x": value("residualAdd/input"), "y": value("residualAdd/input_embeds")}
    yield "attn_residual", add, golden["residualAdd/out"]
    gates = {"gate": value("silu/gate"), "up": value("silu/up")}
    yield "swiglu", gates, golden["silu/out"]
    layer, cache = int(golden["pagedAttention/layer"]), value("pagedAttention/kv_cache")
    keys, values = [], []
    for slot, length in zip(
        golden["pagedAttention/active_slots"], golden["pagedAttention/seq_lens"], strict=True
    ):
        table = golden["pagedAttention/block_table"][slot, layer]
        pages = cache[torch.from_numpy(table[: -(-length // 16)]).long()]  # (pages, 2, 16, 512)
        keys.append(pages[:, 0].flatten(0, 1)[:length])
        values.append(pages[:, 1].flatten(0, 1)[:length])
    attention = {"q": value("pagedAttention/q"), "keys": keys, "values": values}
    yield "attention", attention, golden["pagedAttention/out"]


def test_decode_rope_golden_is_adjacent_and_plain_and_nothing_else() -> None:
    with np.load(GOLDEN) as file:
        x, out = from_bits(file["ropeDecode/q_in"]), from_bits(file["ropeDecode/q_out"])
        positions = torch.from_numpy(file["ropeDecode/positions"]).long()
    plain = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)

    def halves(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (-1, 32, 2)).transpose(2, 3).flatten(1)

    for pairing in (halves, lambda t: t):
        for frequencies in (plain, llama3_inv_freq()):
            inputs = {"x": pairing(x), "positions": positions, "inv_freq": frequencies}
            found = verdict_of("q_rope", inputs, bf16_bits(pairing(out)))
            real = real_of("q_rope", inputs)
            miss = (pairing(out) - real).abs() / bound_of("q_rope", inputs, real).strict
            if pairing is halves and frequencies is plain:
                assert found.impossible == 0
            else:
                assert found.verdict == "diverged"
                assert miss.max() > 1e4


def test_gemm_allowances_follow_their_formulas() -> None:
    inputs = {"x": normal(1, 3, 300), "weight": normal(2, 40, 300, std=0.02)}
    real = real_of("o_proj", inputs)
    bound = bound_of("o_proj", inputs, real)
    products = inputs["x"][:, None] * inputs["weight"]  # (3, 40, 300)
    k = 300
    b = 2 * U * k / (1 - 2 * U * k) * products.abs().sum(-1) + k * TINY
    d = U * k / 2 * (real.abs() + products.square().sum(-1).sqrt()) + k * TINY
    # The float32 sums are rounded up, by less than a thousandth.
    for got, want in ((bound.strict, b), (bound.statistical, d)):
        assert (got >= want * (1 - 1e-12)).all()
        assert (got <= want * 1.001).all()
    few = torch.tensor([0, 41, 119])
    b_few, d_few = bound.at(few)
    torch.testing.assert_close(b_few, b.reshape(-1)[few])
    torch.testing.assert_close(d_few, d.reshape(-1)[few])
    partial_sums = products.cumsum(-1).abs().sum(-1).reshape(-1)
    assert bound.recheck is not None
    torch.testing.assert_close(bound.recheck(few), 2 * U * partial_sums[few] + k * TINY)


@pytest.mark.parametrize("op", ["scores", "attn_v", "gate_proj", "logits"])
def test_allowances_of_few_elements_are_those_of_all(op: str) -> None:
    inputs = stressed("prefill-33", op)
    real = real_of(op, inputs)
    bound = bound_of(op, inputs, real)
    few = torch.arange(0, real.numel(), real.numel() // 7)
    for one, every in zip(bound.at(few), (bound.strict, bound.statistical), strict=True):
        assert (one <= every.reshape(-1)[few] * (1 + 1e-12)).all()
        assert (every.reshape(-1)[few] <= one * 1.002).all()


def test_scores_allowance_is_in_the_unit_of_the_scaled_score() -> None:
    inputs = {"q": normal(1, 2, 2048), "k": normal(2, 2, 512)}
    real = real_of("scores", inputs)
    bound = bound_of("scores", inputs, real)
    h, i, j = 13, 1, 0
    products = inputs["q"][i, h * 64 : h * 64 + 64] * inputs["k"][j, h // 4 * 64 :][:64]
    b = 2 * U * 64 / (1 - 2 * U * 64) * products.abs().sum() / 8
    d = 32 * U * (products.sum().abs() + products.norm()) / 8
    torch.testing.assert_close(bound.strict[h, i, j], b)
    torch.testing.assert_close(bound.statistical[h, i, j], d)


def test_attention_allowance_follows_its_formula() -> None:
    length, h, c = 9, 21, 5
    inputs = {"q": normal(1, 1, 2048), "keys": [normal(2, length, 512)]}
    inputs["values"] = [normal(3, length, 512)]
    real = real_of("attention", inputs)
    bound = bound_of("attention", inputs, real)
    q = inputs["q"][0, h * 64 : h * 64 + 64]
    k = inputs["keys"][0][:, h // 4 * 64 :][:, :64]
    v = inputs["values"][0][:, h // 4 * 64 + c]
    s = k @ q / 8
    p, r = s.softmax(0), real[0, h * 64 + c]
    error = 2 * U * 64 / (1 - 2 * U * 64) * (k.abs() @ q.abs()) / 8 + 2 * U * s.abs()
    b = (p * v.abs()).sum() * (2 * error.max() + (4 * length + 8) * U)
    delta = 32 * U * (s.abs() + (k * q).norm(dim=1) / 8) + 4 * U + U * (s - s.max()).abs()
    d = (
        U * length / 2 * (r.abs() + (p * v).norm())
        + 3 * (p * (v - r) * delta).norm()
        + 2 * U * r.abs()
    )
    torch.testing.assert_close(bound.strict[0, h * 64 + c], b)
    torch.testing.assert_close(bound.statistical[0, h * 64 + c], d)
    flat = torch.tensor([h * 64 + c])
    walk = U * length / 2 * (r.abs() + (p * v).norm())
    partial_sums = 2 * U * (p * v).cumsum(0).abs().sum()
    assert bound.recheck is not None
    torch.testing.assert_close(bound.recheck(flat)[0], d - walk + partial_sums)


@pytest.mark.parametrize("op", sorted(ops()))
def test_the_statistical_allowance_never_exceeds_the_strict_one(op: str) -> None:
    name = "decode-0-257" if op == "attention" else "prefill-33"
    inputs = stressed(name, op)
    real = real_of(op, inputs)
    bound = bound_of(op, inputs, real)
    assert (bound.statistical <= bound.strict).all()
    assert bound.strict.shape == real.shape


def test_masked_probabilities_have_no_allowance() -> None:
    inputs = stressed("prefill-17", "softmax")
    real = real_of("softmax", inputs)
    masked = inputs["scores"].isinf()
    assert (bound_of("softmax", inputs, real).strict[masked] == 0).all()


def test_an_unknown_op_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"op must be one of embed, .* \(got 'gelu'\)"):
        bound_of("gelu", {}, torch.zeros(1))


def test_bf16_steps_are_counted_in_total_order() -> None:
    a = torch.tensor([0.0, -0.0, 1.0, 2.0**-133, math.inf], dtype=torch.float64)
    b = torch.tensor([-0.0, 0.0, 1.0078125, -(2.0**-133), 3.3895313892515355e38], dtype=a.dtype)
    assert ulp_distance(a, b).tolist() == [0, 0, 1, 2, 1]
