"""The ops against formulas written out plainly, and against figures of the upstream kernels."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from reference import ops
from reference.rounding import bf16_bits, from_bits, round_to_bf16

SIZES = [1, 2, 3, 15, 16, 17, 19, 97]
GOLDEN = Path(__file__).parents[1] / "golden" / "kernels.npz"


def normal(seed: int, *shape: int) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(values)


def assert_near(got: torch.Tensor, want: np.ndarray) -> None:
    """Equal to float64 accuracy, relative to the greatest value."""
    scale = max(float(np.abs(want).max()), 1e-300)
    np.testing.assert_allclose(got.numpy() / scale, want / scale, rtol=0, atol=1e-13)


# ---- plain formulas -----------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_divides_by_the_root_of_the_mean_square(n: int):
    x, weight = normal(n, n, 2048), normal(1, 2048)
    rows = []
    for row in x.tolist():
        root = math.sqrt(math.fsum(v * v for v in row) / 2048 + 1e-5)
        rows.append([v / root * w for v, w in zip(row, weight.tolist(), strict=True)])
    assert_near(ops.rms_norm(x, weight), np.array(rows))


def test_rms_norm_of_tiny_rows_feels_epsilon():
    x = torch.full((1, 2048), 1e-3, dtype=torch.float64)
    got = ops.rms_norm(x, torch.ones(2048, dtype=torch.float64))
    assert_near(got, np.full((1, 2048), 1e-3 / math.sqrt(1e-6 + 1e-5)))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("out", [1, 17, ops.CHUNK + 3])
def test_linear_of_a_bfloat16_weight_is_that_of_its_exact_values(n: int, out: int):
    x = normal(n, n, 96)
    weight = normal(2, out, 96).to(torch.bfloat16)
    want = np.einsum("ni,oi->no", x.numpy(), weight.double().numpy())
    assert_near(ops.linear(x, weight), want)
    assert_near(ops.linear(x, weight.double()), want)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("heads", [8, 32])
def test_rope_turns_each_pair_of_halves_as_a_complex_number(n: int, heads: int):
    x, inv_freq = normal(n, n, heads * 64), ops.llama3_inv_freq()
    positions = torch.arange(n) * 21
    pairs = x.numpy().reshape(n, heads, 2, 32)
    number = pairs[:, :, 0] + 1j * pairs[:, :, 1]
    turn = np.exp(1j * positions.numpy()[:, None, None] * inv_freq.numpy())
    turned = number * turn
    want = np.stack((turned.real, turned.imag), axis=2).reshape(n, heads * 64)
    assert_near(ops.rope(x, positions, inv_freq), want)


def test_rope_at_position_zero_changes_nothing():
    x = normal(0, 3, 512)
    assert torch.equal(ops.rope(x, torch.zeros(3), ops.llama3_inv_freq()), x)


def test_inv_freq_has_three_bands():
    got = ops.llama3_inv_freq().tolist()
    bands = []
    for i, value in enumerate(got):
        plain = 1 / 500000 ** (2 * i / 64)
        wavelength = 2 * math.pi / plain
        if wavelength > 8192:
            want, band = plain / 32, "long"
        elif wavelength >= 2048:
            keep = (8192 / wavelength - 1) / 3
            want, band = (1 - keep) * plain / 32 + keep * plain, "middle"
        else:
            want, band = plain, "short"
        bands.append(band)
        assert value == pytest.approx(want, rel=1e-14)
    assert bands == ["short"] * 15 + ["middle"] * 3 + ["long"] * 14


def test_kv_write_holds_keys_then_values():
    k, v = normal(0, 3, 512), normal(1, 3, 512)
    got = ops.kv_write(k, v)
    assert got.shape == (2, 3, 512)
    assert torch.equal(got[0], k)
    assert torch.equal(got[1], v)


def plain_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.stack(
        [
            q[:, h * 64 : h * 64 + 64] @ k[:, (h // 4) * 64 : (h // 4) * 64 + 64].T / 8
            for h in range(32)
        ]
    )


def plain_probs(scores: np.ndarray) -> np.ndarray:
    """Softmax by extended precision."""
    e = np.exp(scores.astype(np.longdouble))
    return (e / e.sum(axis=-1, keepdims=True)).astype(np.float64)


def plain_attn_v(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.hstack([probs[h] @ v[:, (h // 4) * 64 : (h // 4) * 64 + 64] for h in range(32)])


@pytest.mark.parametrize("n", SIZES)
def test_prefill_attention_op_by_op(n: int):
    q, k, v = normal(n, n, 2048), normal(1, n, 512), normal(2, n, 512)
    scores = ops.scores(q, k)
    assert scores.shape == (32, n, n)
    assert_near(scores, plain_scores(q.numpy(), k.numpy()))

    masked = ops.mask(scores)
    for row in range(n):
        assert torch.equal(masked[:, row, : row + 1], scores[:, row, : row + 1])
        assert (masked[:, row, row + 1 :] == -math.inf).all()

    probs = ops.softmax(masked)
    for row in range(n):
        assert_near(probs[:, row, : row + 1], plain_probs(scores[:, row, : row + 1].numpy()))
        assert (probs[:, row, row + 1 :] == 0).all()

    out = ops.attn_v(probs, v)
    assert out.shape == (n, 2048)
    assert_near(out, plain_attn_v(probs.numpy(), v.numpy()))


def test_softmax_survives_scores_that_exp_does_not():
    x = torch.tensor([[1000.0, 1000.0, -1000.0], [-5000.0, -5000.0, -math.inf]]).double()
    assert ops.softmax(x).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]


@pytest.mark.parametrize("length", SIZES)
def test_decode_attention_reads_each_rows_own_cache(length: int):
    lengths = [length, 5]
    q = normal(length, 2, 2048)
    keys = [normal(3 + r, n, 512) for r, n in enumerate(lengths)]
    values = [normal(5 + r, n, 512) for r, n in enumerate(lengths)]
    got = ops.attention(q, keys, values)
    assert got.shape == (2, 2048)
    for r in range(2):
        probs = plain_probs(plain_scores(q[r : r + 1].numpy(), keys[r].numpy()))
        assert_near(got[r : r + 1], plain_attn_v(probs, values[r].numpy()))


def test_swiglu_gates_by_the_sigmoid():
    gate, up = normal(0, 2, 97) * 5, normal(1, 2, 97)
    want = [
        [g * (1 / (1 + math.exp(-g))) * u for g, u in zip(gs, us, strict=True)]
        for gs, us in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    assert_near(ops.swiglu(gate, up), np.array(want))


def test_swiglu_of_a_gate_far_below_zero_is_zero():
    gate = torch.tensor([-90.0, -1000.0, -3e38], dtype=torch.float64)
    got = ops.swiglu(gate, torch.ones(3, dtype=torch.float64))
    assert got[0].item() == pytest.approx(-90 * math.exp(-90))
    assert got[1:].tolist() == [0, 0]


def test_residual_adds():
    assert ops.residual(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -2.0])).tolist() == [1.5, 0.0]


def test_embed_takes_rows():
    table = normal(0, 7, 2048).to(torch.bfloat16)
    got = ops.embed(torch.tensor([6, 0, 6]), table)
    assert got.dtype == torch.float64
    assert torch.equal(got, table.double()[[6, 0, 6]])


nan, inf = math.nan, math.inf


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([1, 3, 2, 3], 1),
        ([3, 1, 3, 2], 0),
        ([-5, -2, -2, -9], 1),
        ([0.0, -0.0, 0.0], 0),
        ([-0.0, 0.0], 0),
        ([nan, nan, nan], 0),
        ([nan, 5, 9], 0),
        ([1, nan, 2, nan], 2),
        ([1, nan, 0], 0),
        ([-inf, -inf], 0),
        ([-inf, nan, -inf], 0),
        ([-inf, nan, -3e38], 2),
        ([1, inf, inf], 1),
    ],
)
def test_argmax_is_the_engines_loop(row: list[float], want: int):
    best = 0
    for i, value in enumerate(row):
        if value > row[best]:
            best = i
    assert best == want
    logits = torch.tensor([row, row], dtype=torch.float64)
    got = ops.argmax(logits)
    assert got.dtype == torch.int64
    assert got.tolist() == [want, want]


# ---- figures of the upstream kernels, taken on an H200 ------------------------------------


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


def assert_rounded(real: torch.Tensor, bits: np.ndarray, slack: float = 0) -> None:
    """A float32 kernel's stores are the correctly rounded ones but for a few near ties.

    `slack`: its float32 error where terms of a sum cancel, beside one bfloat16 step of the result.
    """
    want = from_bits(bits)
    got = round_to_bf16(real)
    assert got.shape == want.shape
    off = got != want
    assert off.double().mean() <= 1e-3
    near = torch.maximum(got.abs(), want.abs()) * 2.0**-7  # one step
    assert ((got - want).abs()[off] <= near[off] + slack).all()


def test_upstreams_embedding_is_ours(golden: dict[str, np.ndarray]):
    table = from_bits(golden["embeddingGather/embed_tokens"])
    tokens = torch.from_numpy(golden["embeddingGather/tokens"])
    np.testing.assert_array_equal(
        bf16_bits(ops.embed(tokens, table)), golden["embeddingGather/out"]
    )


def test_upstreams_norm_is_ours(golden: dict[str, np.ndarray]):
    x, weight = from_bits(golden["rmsNorm/input"]), from_bits(golden["rmsNorm/weight"])
    assert_rounded(ops.rms_norm(x, weight), golden["rmsNorm/out"])


@pytest.mark.parametrize("name", ["q", "k"])
def test_upstreams_prefill_rotation_is_ours(golden: dict[str, np.ndarray], name: str):
    x = from_bits(golden[f"rope/{name}_in"])
    got = ops.rope(x, torch.arange(len(x)), ops.llama3_inv_freq())
    angle_error = (8 * len(x) + 7) * 2.0**-24  # of float32 angles, cosines and products
    slack = 2 * x.abs().max().item() * angle_error
    assert_rounded(got, golden[f"rope/{name}_out"], slack)


def test_upstreams_frequencies_are_ours(golden: dict[str, np.ndarray]):
    want = golden["rope/inv_freq"].astype(np.float64)
    np.testing.assert_allclose(ops.llama3_inv_freq().numpy(), want, rtol=2e-6)


@pytest.mark.parametrize("n", [5, 17])
def test_upstreams_mask_and_unmasked_softmax_are_ours(golden: dict[str, np.ndarray], n: int):
    scores = from_bits(golden[f"causalMask/{n}_in"])
    np.testing.assert_array_equal(bf16_bits(ops.mask(scores)), golden[f"causalMask/{n}_out"])
    assert_rounded(ops.softmax(scores), golden[f"softmax/unmasked_{n}_out"])


def test_the_rows_that_upstreams_masked_softmax_gets_right_are_ours(golden: dict[str, np.ndarray]):
    masked = from_bits(golden["causalMask/17_out"])
    assert_rounded(ops.softmax(masked)[:, 14:], golden["softmax/masked_17_out"][:, 14:])


@pytest.mark.parametrize("length", [5, 33])
def test_upstreams_decode_softmax_is_ours(golden: dict[str, np.ndarray], length: int):
    scores = from_bits(golden[f"softmaxDecode/{length}_in"])
    assert_rounded(ops.softmax(scores), golden[f"softmaxDecode/{length}_out"])


def test_upstreams_residual_is_ours(golden: dict[str, np.ndarray]):
    x, y = (from_bits(golden[f"residualAdd/{name}"]) for name in ("input", "input_embeds"))
    np.testing.assert_array_equal(
        bf16_bits(round_to_bf16(ops.residual(x, y))), golden["residualAdd/out"]
    )


def test_upstreams_silu_is_ours(golden: dict[str, np.ndarray]):
    gate, up = from_bits(golden["silu/gate"]), from_bits(golden["silu/up"])
    assert_rounded(ops.swiglu(gate, up), golden["silu/out"])


def test_upstreams_paged_attention_is_ours(golden: dict[str, np.ndarray]):
    pages = from_bits(golden["pagedAttention/kv_cache"])  # (blocks, K and V, 16, 512)
    table = golden["pagedAttention/block_table"][:, golden["pagedAttention/layer"]]
    keys, values = [], []
    for slot, length in zip(
        golden["pagedAttention/active_slots"], golden["pagedAttention/seq_lens"], strict=True
    ):
        own = pages[table[slot, : -(-length // 16)].astype(np.int64)]
        keys.append(own[:, 0].flatten(0, 1)[:length])
        values.append(own[:, 1].flatten(0, 1)[:length])
    q = from_bits(golden["pagedAttention/q"])
    assert_rounded(ops.attention(q, keys, values), golden["pagedAttention/out"])
