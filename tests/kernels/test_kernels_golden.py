"""Our kernels on the CPU against the upstream program's own figures, taken on an H200.

Bit for bit wherever only IEEE arithmetic (and glibc's expf) is involved. Where the machine's libm
and CUDA's differ in a last bit, the share of results that are not the correctly rounded ones is
bounded.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from kernels_helpers import (
    Bench,
    digests,
    golden,
    paged_attention_inputs,
    recipe,
    rope_tables,
    sha256,
    to_bf16,
    to_float,
)

from kernels.lift import Refusal, lift
from kernels.simt import Executor

NAN = 0x7FFF


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(Executor(lift()))


@pytest.fixture(scope="module")
def figures() -> dict[str, np.ndarray]:
    return dict(golden())


@pytest.fixture(scope="module")
def tables(bench: Bench) -> dict[str, int]:
    _, cos, sin = rope_tables()
    return {"cos": bench.put(cos, "cos"), "sin": bench.put(sin, "sin")}


def test_recipe_gives_the_published_checkpoint() -> None:
    # engine.md §7: first 16 hex digits of sha256 over the bf16 bytes
    assert sha256(recipe("model.norm.weight", (2048,), 0.1, 1.0))[:16] == "910ab15b933a23f1"
    k_proj = recipe("model.layers.0.self_attn.k_proj.weight", (512, 2048), 0.05)
    assert sha256(k_proj)[:16] == "9073041b77b747c1"


def test_rope_tables_have_the_golden_bits(figures: dict[str, np.ndarray]) -> None:
    frequencies, cos, sin = rope_tables()
    rows = figures["rope/table_rows"]
    assert np.array_equal(frequencies, figures["rope/inv_freq"])
    assert np.array_equal(cos[rows], figures["rope/cos_rows"])
    assert np.array_equal(sin[rows], figures["rope/sin_rows"])
    wanted = digests()["tables"]
    assert sha256(frequencies) == wanted["inv_freq_sha256"]
    assert sha256(cos) == wanted["cos_sha256"]
    assert sha256(sin) == wanted["sin_sha256"]


# --- kernels.npz ----------------------------------------------------------------------------------


def test_embedding_gathers_copy_the_rows(bench: Bench, figures: dict[str, np.ndarray]) -> None:
    table = bench.put(figures["embeddingGather/embed_tokens"])
    out = bench.new((5, 2048))
    bench.call("embeddingGather", bench.put(figures["embeddingGather/tokens"]), out, table, 5)
    assert np.array_equal(bench.get(out, (5, 2048)), figures["embeddingGather/out"])
    out = bench.new((2, 2048))
    last = bench.put(figures["embeddingGatherDecode/last_tokens"])
    bench.call("embeddingGatherDecode", last, 2, out, table)
    assert np.array_equal(bench.get(out, (2, 2048)), figures["embeddingGatherDecode/out"])


def test_rms_norm_bits(bench: Bench, figures: dict[str, np.ndarray]) -> None:
    out = bench.new((3, 2048))
    bench.call(
        "rmsNorm",
        bench.put(figures["rmsNorm/input"]),
        out,
        bench.put(figures["rmsNorm/weight"]),
        3,
    )
    assert np.array_equal(bench.get(out, (3, 2048)), figures["rmsNorm/out"])


@pytest.mark.parametrize(("what", "dim"), [("q", 2048), ("k", 512)])
def test_rope_bits(
    bench: Bench, figures: dict[str, np.ndarray], tables: dict[str, int], what: str, dim: int
) -> None:
    x = bench.put(figures[f"rope/{what}_in"])
    bench.call("rope", x, 19, dim, globals=tables)
    assert np.array_equal(bench.get(x, (19, dim)), figures[f"rope/{what}_out"])


@pytest.mark.parametrize(("what", "dim"), [("q", 2048), ("k", 512)])
def test_rope_decode_bits(
    bench: Bench, figures: dict[str, np.ndarray], what: str, dim: int
) -> None:
    x = bench.put(figures[f"ropeDecode/{what}_in"])
    for row, position in enumerate(figures["ropeDecode/positions"].tolist()):
        bench.call("ropeDecode", x + row * dim * 2, position, dim)
    different = (bench.get(x, (6, dim)) != figures[f"ropeDecode/{what}_out"]).sum()
    assert different <= 2  # a cosf or sinf that glibc and CUDA round apart: none here, with glibc


@pytest.mark.parametrize("n", [5, 17])
def test_mask_and_softmax_bits(bench: Bench, figures: dict[str, np.ndarray], n: int) -> None:
    scores = bench.put(figures[f"causalMask/{n}_in"])
    bench.call("softmax", scores, n)
    unmasked = bench.get(scores, (32, n, n))
    assert np.array_equal(unmasked, figures[f"softmax/unmasked_{n}_out"])
    scores = bench.put(figures[f"causalMask/{n}_in"])
    bench.call("causalMask", scores, n)
    assert np.array_equal(bench.get(scores, (32, n, n)), figures[f"causalMask/{n}_out"])
    bench.call("softmax", scores, n)
    masked, wanted = bench.get(scores, (32, n, n)), figures[f"softmax/masked_{n}_out"]
    assert np.array_equal(masked == NAN, wanted == NAN)  # the fault softmax-nan, pattern included
    assert (wanted == NAN).any()
    assert np.array_equal(masked, wanted)


@pytest.mark.parametrize("length", [5, 33])
def test_softmax_decode_bits(bench: Bench, figures: dict[str, np.ndarray], length: int) -> None:
    rows = np.full((32, 2048), 0x4000, np.uint16)
    rows[:, :length] = figures[f"softmaxDecode/{length}_in"]
    scores = bench.put(rows)
    bench.call("softmaxDecode", scores, length)
    out = bench.get(scores, (32, 2048))
    assert np.array_equal(out[:, :length], figures[f"softmaxDecode/{length}_out"])
    assert (out[:, length:] == 0x4000).all()


def test_residual_and_silu_bits(bench: Bench, figures: dict[str, np.ndarray]) -> None:
    x = bench.put(figures["residualAdd/input"])
    bench.call("residualAdd", x, bench.put(figures["residualAdd/input_embeds"]), 3)
    assert np.array_equal(bench.get(x, (3, 2048)), figures["residualAdd/out"])
    gate = bench.put(figures["silu/gate"])
    bench.call("silu", gate, bench.put(figures["silu/up"]), 2)
    assert np.array_equal(bench.get(gate, (2, 8192)), figures["silu/out"])


def test_paged_attention_bits(bench: Bench, figures: dict[str, np.ndarray]) -> None:
    get = {key.split("/")[1]: v for key, v in figures.items() if key.startswith("pagedAttention")}
    out = bench.new((2, 2048))
    names = ("q", "kv_cache", "block_table", "seq_lens", "active_slots")
    bench.call("pagedAttention", int(get["layer"]), 2, *(bench.put(get[n]) for n in names), out)
    different = (bench.get(out, (2, 2048)) != get["out"]).sum()
    assert different <= 4  # of 4,096, each by expf's last bit; 0 with glibc


# --- digests.json ---------------------------------------------------------------------------------


def _same(key: str, got: np.ndarray) -> bool:
    return sha256(got) == digests()[key]["sha256"]


def test_rms_norm_digest(bench: Bench) -> None:
    out = bench.new((512, 2048))
    x = bench.put(recipe("golden/rmsNorm/input", (512, 2048), 1.0))
    weight = bench.put(recipe("golden/rmsNorm/weight", (2048,), 0.1, 1.0))
    bench.call("rmsNorm", x, out, weight, 512)
    assert _same("rmsNorm", bench.get(out, (512, 2048)))


@pytest.mark.parametrize(("what", "dim"), [("q", 2048), ("k", 512)])
def test_rope_digest(bench: Bench, tables: dict[str, int], what: str, dim: int) -> None:
    x = bench.put(recipe(f"golden/rope/{what}", (512, dim), 1.0))
    bench.call("rope", x, 512, dim, globals=tables)
    assert _same(f"rope/{what}", bench.get(x, (512, dim)))


def test_residual_digest(bench: Bench) -> None:
    x = bench.put(recipe("golden/residualAdd/x", (512, 2048), 1.0))
    bench.call("residualAdd", x, bench.put(recipe("golden/residualAdd/y", (512, 2048), 0.3)), 512)
    assert _same("residualAdd", bench.get(x, (512, 2048)))


@pytest.mark.parametrize("n", [4, 31, 128, 512])
def test_causal_mask_digest(bench: Bench, n: int) -> None:
    scores = bench.put(recipe(f"golden/scores/{n}", (32, n, n), 2.0))
    bench.call("causalMask", scores, n)
    assert _same(f"causalMask/{n}", bench.get(scores, (32, n, n)))
    bench.executor.free(scores)


def _share_wrong(got: np.ndarray, real: np.ndarray) -> float:
    """Share of bf16 results that are not the correctly rounded float64 ones."""
    want = to_bf16(real.astype(np.float32))
    return float((got != want).mean())


@pytest.mark.parametrize(("n", "allowed"), [(4, 0.0), (31, 0.0), (128, 2e-5), (512, 2e-5)])
def test_softmax_digest_or_nearly(bench: Bench, n: int, allowed: float) -> None:
    inputs = recipe(f"golden/scores/{n}", (32, n, n), 2.0)
    scores = bench.put(inputs)
    bench.call("softmax", scores, n)
    got = bench.get(scores, (32, n, n))
    bench.executor.free(scores)
    if not _same(f"softmax/unmasked/{n}", got):
        x = to_float(inputs).reshape(32, n, n).astype(np.float64)
        e = np.exp(x - x.max(axis=2, keepdims=True))
        assert _share_wrong(got, e / e.sum(axis=2, keepdims=True)) <= allowed


@pytest.mark.parametrize("n", [4, 31, 128])
def test_masked_softmax_has_the_golden_nan_pattern(bench: Bench, n: int) -> None:
    scores = bench.put(recipe(f"golden/scores/{n}", (32, n, n), 2.0))
    bench.call("causalMask", scores, n)
    bench.call("softmax", scores, n)
    got = bench.get(scores, (32, n, n))
    assert (got == NAN).sum() == digests()[f"softmax/masked/{n}"]["nan"]
    assert not ((got & 0x7FFF) > 0x7F80)[got != NAN].any()  # every NaN is stored as 0x7fff
    assert _same(f"softmax/masked/{n}", got)


@pytest.mark.parametrize("length", [31, 512, 1024])
def test_softmax_decode_digest(bench: Bench, length: int) -> None:
    scores = bench.put(recipe(f"golden/softmaxDecode/{length}", (32, 2048), 3.0))
    bench.call("softmaxDecode", scores, length)
    assert _same(f"softmaxDecode/{length}", bench.get(scores, (32, 2048)))


def test_silu_digest_or_nearly(bench: Bench) -> None:
    inputs = recipe("golden/silu/gate", (512, 8192), 3.0)
    up = recipe("golden/silu/up", (512, 8192), 1.0)
    gate = bench.put(inputs)
    bench.call("silu", gate, bench.put(up), 512)
    got = bench.get(gate, (512, 8192))
    if not _same("silu", got):
        a, b = (to_float(v).reshape(512, 8192).astype(np.float64) for v in (inputs, up))
        assert _share_wrong(got, a / (1 + np.exp(-a)) * b) <= 2e-5


@pytest.mark.parametrize(("what", "dim"), [("q", 2048), ("k", 512)])
def test_rope_decode_digest_or_nearly(bench: Bench, what: str, dim: int) -> None:
    """pow, cosf and sinf of the C library and of CUDA differ in the last bit now and then."""
    inputs = recipe(f"golden/ropeDecode/{what}", (2048, dim), 1.0)
    x = bench.put(inputs)
    for position in range(2048):
        bench.call("ropeDecode", x + position * dim * 2, position, dim)
    got = bench.get(x, (2048, dim))
    if _same(f"ropeDecode/{what}", got):
        return
    theta = np.array([1.0 / 500000.0 ** (2 * i / 64) for i in range(32)]).astype(np.float32)
    angle = (np.arange(2048, dtype=np.float32)[:, None] * theta).astype(np.float64)
    c, s = (
        np.tile(f(angle).astype(np.float32).astype(np.float64), (1, dim // 64))
        for f in (np.cos, np.sin)
    )  # (2048, dim / 2)
    wide = to_float(inputs).reshape(2048, dim // 2, 2).astype(np.float64)
    x1, x2 = wide[..., 0], wide[..., 1]
    real = np.stack([x1 * c - x2 * s, x1 * s + x2 * c], axis=2).reshape(2048, dim)
    assert _share_wrong(got, real) <= 2e-5


@pytest.mark.parametrize(("lengths", "allowed"), [((1, 2), 0), ((16, 17), 2), ((500, 33), 2)])
def test_paged_attention_digest_or_nearly(
    bench: Bench, lengths: tuple[int, int], allowed: int
) -> None:
    q, cache, table, seq_lens, slots = paged_attention_inputs(lengths)
    out = bench.new((2, 2048))
    pointers = [bench.put(v) for v in (q, cache, table, seq_lens, slots)]
    bench.call("pagedAttention", 7, 2, *pointers, out)
    got = bench.get(out, (2, 2048))
    if _same(f"pagedAttention/{lengths[0]}_{lengths[1]}", got):
        return
    real = np.empty((2, 2048))
    for row, (slot, length) in enumerate(zip((1, 0), lengths, strict=True)):
        blocks = table[slot, 7, : -(-length // 16)]
        wide = to_float(cache).reshape(256, 2, 16, 8, 64)[blocks].astype(np.float64)
        k, v = (wide[:, i].reshape(-1, 8, 64)[:length] for i in (0, 1))  # (length, 8, 64)
        for head in range(32):
            one = to_float(q[row, head * 64 : head * 64 + 64]).astype(np.float64)
            scores = k[:, head // 4] @ one / 8
            weights = np.exp(scores - scores.max())
            real[row, head * 64 : head * 64 + 64] = weights @ v[:, head // 4] / weights.sum()
    assert _share_wrong(got, real) * 4096 <= allowed


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rope", (4096, 1, 2050)),
        ("causalMask", (4096, 1025)),
        ("softmax", (4096, 1025)),
        ("ropeDecode", (4096, 0, 2050)),
        ("softmaxDecode", (4096, 1025)),
    ],
)
def test_more_than_1024_threads_are_refused_with_a_notice(
    name: str, arguments: tuple[int, ...]
) -> None:
    refusal = lift().call(name, *arguments)
    assert isinstance(refusal, Refusal)
    assert "1024" in refusal.notice
    assert not refusal.notice.endswith("\n")


def test_first_tokens_of_a_long_sequence_stay_in_int_range() -> None:
    # the last page that can be addressed with an int: block 65535
    constants = lift(Path(__file__).parents[2] / "kernels" / "kernels.cu").constants
    assert 65535 * constants["BLOCK_BYTES"] + constants["BLOCK_BYTES"] - 1 == 2**31 - 1
    assert math.isclose(constants["SQRT_HEAD_DIM"], 8.0)
