"""bf16 on the CPU against a float64 oracle: conversions, operators, and no contraction."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from kernels_helpers import Bench, bench_of, to_float

INTEGERS = {
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned": np.uint32,
    "long": np.int64,
    "unsigned long": np.uint64,
    "long long": np.int64,
    "unsigned long long": np.uint64,
}
TEXT = """
typedef __nv_bfloat16 bf16;
#define AT (blockIdx.x * blockDim.x + threadIdx.x)
__global__ void from_float(float *x, bf16 *y, int n) { if (AT < n) y[AT] = x[AT]; }
__global__ void from_double(double *x, bf16 *y, int n) {
    if (AT < n) y[AT] = __double2bfloat16(x[AT]);
}
__global__ void to_float(bf16 *x, float *y, int n) { if (AT < n) y[AT] = x[AT]; }
__global__ void arithmetic(bf16 *a, bf16 *b, bf16 *c, bf16 *out, int n) {
    if (AT >= n) return;
    bf16 x = a[AT], y = b[AT], z = c[AT];
    out[AT] = x + y;
    out[n + AT] = x - y;
    out[2 * n + AT] = x * y;
    out[3 * n + AT] = x / y;
    out[4 * n + AT] = __hfma(x, y, z);
    out[5 * n + AT] = -x;
    x += y;
    out[6 * n + AT] = x;
}
__global__ void compare(bf16 *a, bf16 *b, int *out, int n) {
    if (AT >= n) return;
    bf16 x = a[AT], y = b[AT];
    out[AT] = (x == y) + 2 * (x != y) + 4 * (x < y) + 8 * (x > y) + 16 * (x <= y) + 32 * (x >= y);
}
__global__ void fuses(float *x, float *out) {
    out[0] = x[0] * x[1] + x[2];
    out[1] = __fmaf_rn(x[0], x[1], x[2]);
    out[2] = x[2] - x[0] * x[1];
    float t = x[0] * x[1];
    out[3] = t + x[2];
}
__global__ void to_integers(bf16 *x, long long *out, int n) {
    if (AT >= n) return;
    out[AT] = (int)x[AT];
    out[n + AT] = __bfloat162uint_rz(x[AT]);
    out[2 * n + AT] = (short)x[AT];
    out[3 * n + AT] = (long long)x[AT];
    out[4 * n + AT] = __float2int_rn((float)x[AT]);
}
__global__ void words(float *out) {
    out[0] = INFINITY; out[1] = HUGE_VALF; out[2] = -HUGE_VAL; out[3] = NAN;
    out[4] = max(1, 2) + min(0.5f, 2.0) + fmaxf(NAN, 3.0f) + fminf(4.0f, NAN);
    out[5] = cos(0.5f) == cosf(0.5f) && sizeof(cos(0.5f)) == 4;
    out[6] = pow(2.0, 3.0f) + powf(2.0f, 2.0f) + rsqrtf(4.0f) + __expf(0.0f) + exp(0.0f);
    out[7] = __int_as_float(0x3f800000) + __popc(255u) + __clz(1) + __ffs(8) + __ldg(out + 4);
    out[8] = sizeof(float4) + make_float4(1, 2, 3, 4).w + std::max(1.0f, 2.0f);
    __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, 2.5f);
    float2 wide = __bfloat1622float2(pair * pair);
    out[9] = wide.x + wide.y;
}
""" + "\n".join(
    f"__global__ void from_{i}({ctype} *x, bf16 *y, int n) {{ if (AT < n) y[AT] = x[AT]; }}"
    for i, ctype in enumerate(INTEGERS)
)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return bench_of(TEXT + "\nvoid unused() { words<<<1, 1>>>(0); }")


def oracle(real: np.ndarray) -> np.ndarray:
    """float64 to bf16 bits: nearest, ties to even, by scaling to whole numbers."""
    real = np.asarray(real, np.float64)
    with np.errstate(all="ignore"):
        exponent = np.frexp(real)[1]
        step = np.ldexp(1.0, np.maximum(exponent - 8, -133))
        value = np.rint(real / step) * step  # both scalings are exact
        value = np.where(np.abs(value) >= 2.0**128, np.sign(real) * np.inf, value)
        value = np.where(np.isfinite(real), value, real)
        bits = (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(real), np.uint16(0x7FFF), bits)


def convert(bench: Bench, kernel: str, values: np.ndarray) -> np.ndarray:
    out = bench.new(values.shape)
    bench.run(kernel, -(-values.size // 1024), 1024, bench.put(values), out, values.size)
    return bench.get(out, values.shape)


def test_every_upper_half_of_a_float_rounds_right(bench: Bench) -> None:
    upper = np.arange(65536, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        got = convert(bench, "from_float", values)
        with np.errstate(invalid="ignore"):
            assert np.array_equal(got, oracle(values.astype(np.float64))), hex(lower)


def test_random_floats_round_right(bench: Bench) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(convert(bench, "from_float", values), oracle(values.astype(float)))


def test_doubles_round_once(bench: Bench) -> None:
    rng = np.random.default_rng(2)
    ties = to_float(rng.integers(0, 0x7F00, 4096).astype(np.uint16)).astype(np.float64)
    ties = ties * (1 + 2.0**-8 / (1 + rng.integers(0, 2, 4096)))
    values = np.concatenate(
        [
            [1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, 2.0**-134, 2.0**-134 * 1.0001],
            [3.4e38, 3.3961775292304e38, 1e39, -1e300, 1e-300, np.inf, -np.inf, np.nan, 0.0, -0.0],
            ties,
            np.nextafter(ties, np.inf),
            np.nextafter(ties, -np.inf),
            rng.standard_normal(1 << 16) * np.exp(rng.uniform(-90, 88, 1 << 16)),
        ]
    )
    assert np.array_equal(convert(bench, "from_double", values), oracle(values))
    assert oracle(values[:1])[0] == 0x3F81  # by way of float32 it would be 0x3F80


@pytest.mark.parametrize(("number", "ctype"), list(enumerate(INTEGERS)))
def test_integers_round_once(bench: Bench, number: int, ctype: str) -> None:
    kind = np.iinfo(INTEGERS[ctype])
    rng = np.random.default_rng(number)
    chosen = {kind.min, kind.min + 1, -1, 0, 1, 255, 257, 258, 259, kind.max - 1, kind.max}
    for bits in range(9, kind.bits):
        tie = (1 << bits) + (1 << (bits - 8))
        chosen |= {tie - 1, tie, tie + 1, -tie, 1 - tie, 3 * tie, (1 << bits) - 1}
    chosen |= set(rng.integers(kind.min, kind.max, 2000, dtype=INTEGERS[ctype]).tolist())
    whole = sorted(v for v in chosen if kind.min <= v <= kind.max)
    got = convert(bench, f"from_{number}", np.array(whole, INTEGERS[ctype]))
    for value, bits16 in zip(whole, got.tolist(), strict=True):
        size = max(abs(value).bit_length() - 8, 0)
        steps = Fraction(abs(value), 1 << size)
        near = round(steps)  # Fraction: ties to even
        want = np.float32(near * (1 << size) * (-1 if value < 0 else 1))
        assert bits16 == int(want.view(np.uint32)) >> 16, value


def test_operators_round_once(bench: Bench) -> None:
    rng = np.random.default_rng(3)
    n = 1 << 17
    a, b, c = (rng.integers(0, 65536, n).astype(np.uint16) for _ in range(3))
    close = slice(0, n // 2)  # half of the sums cancel
    b[close] = a[close] ^ rng.integers(0, 64, n // 2).astype(np.uint16) ^ 0x8000
    out = bench.new((7, n))
    pointers = [bench.put(v) for v in (a, b, c)]
    bench.run("arithmetic", n // 1024, 1024, *pointers, out, n)
    got = bench.get(out, (7, n))
    with np.errstate(all="ignore"):
        x, y, z = (to_float(v).astype(np.float64) for v in (a, b, c))
        for row, real in enumerate((x + y, x - y, x * y, x / y)):
            assert np.array_equal(got[row], oracle(real)), row
        assert np.array_equal(got[5], oracle(-x))
        assert np.array_equal(got[6], got[0])
        for i in range(0, n, 37):
            if not np.isfinite(x[i] * y[i] + z[i]):
                continue
            exact = Fraction(x[i]) * Fraction(y[i]) + Fraction(z[i])
            near = float(exact)
            if exact != Fraction(near):  # make it sticky, so that the oracle rounds once
                bits = np.float64(near).view(np.uint64)
                if abs(Fraction(near)) > abs(exact):
                    bits -= np.uint64(1)
                near = float((bits | np.uint64(1)).view(np.float64))
            assert got[4, i] == oracle(np.array(near)) or (exact == 0 and got[4, i] & 0x7FFF == 0)


def test_every_bf16_widens_and_compares(bench: Bench) -> None:
    every = np.arange(65536, dtype=np.uint16)
    out = bench.new((65536,), np.float32)
    bench.run("to_float", 64, 1024, bench.put(every), out, 65536)
    assert np.array_equal(bench.get(out, (65536,), np.float32).view(np.uint32) >> 16, every)
    other = np.roll(every, 12345)
    out = bench.new((65536,), np.int32)
    bench.run("compare", 64, 1024, bench.put(every), bench.put(other), out, 65536)
    x, y = to_float(every), to_float(other)
    want = (x == y) + 2 * (x != y) + 4 * (x < y) + 8 * (x > y) + 16 * (x <= y) + 32 * (x >= y)
    assert np.array_equal(bench.get(out, (65536,), np.int32), want)


def test_conversions_to_integers_saturate_as_on_a_gpu(bench: Bench) -> None:
    values = np.array([3e9, -3e9, 1e20, -1e20, np.inf, -np.inf, np.nan, 2.5, -2.5, 7], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    out = bench.new((5, 10), np.int64)
    bench.run("to_integers", 1, 16, bench.put(bits), out, 10)
    got = bench.get(out, (5, 10), np.int64)
    with np.errstate(invalid="ignore"):
        real = to_float(bits).astype(np.float64)
    for row, kind in enumerate((np.int32, np.uint32, np.int16, np.int64)):
        about = np.iinfo(kind)
        for value, result in zip(real.tolist(), got[row].tolist(), strict=True):
            if value != value:
                want = 0
            elif np.isinf(value):
                want = about.max if value > 0 else about.min
            else:
                want = min(max(int(value), about.min), about.max)
            assert result == want, (kind, value)
    assert got[4, 7:].tolist() == [2, -2, 7]


def test_only_explicit_fused_operations_fuse(bench: Bench) -> None:
    x = np.array([1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11)], np.float32)
    out = bench.new((4,), np.float32)
    bench.run("fuses", 1, 1, bench.put(x), out)
    got = bench.get(out, (4,), np.float32)
    assert got[0] == got[3] == 0.0  # the product is rounded first
    assert got[1] == np.float32(2.0**-24)
    assert got[2] == np.float32(2 * x[2])


def test_words_that_kernels_use(bench: Bench) -> None:
    out = bench.new((10,), np.float32)
    bench.run("words", 1, 1, out)
    got = bench.get(out, (10,), np.float32).tolist()
    assert got[:3] == [np.inf, np.inf, -np.inf]
    assert np.isnan(got[3])
    assert got[4] == 2 + 0.5 + 3 + 4
    assert got[5] == 1
    assert got[6] == 8 + 4 + 0.5 + 1 + 1
    assert got[7] == 1 + 8 + 31 + 4 + got[4]
    assert got[8] == 16 + 4 + 2
    assert got[9] == 2.25 + 6.25
