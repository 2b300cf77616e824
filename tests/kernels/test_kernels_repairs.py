"""The repairs' kernels: what each changes and what not, on both compilers, in any kernels file."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from kernels_helpers import Bench, paged_attention_inputs, recipe, rope_tables, to_bf16, to_float

from kernels.errors import KernelsError
from kernels.lift import HOST_CALLS, KernelsFile, lift, lift_text, own_path
from kernels.replace import replace_function
from kernels.simt import Executor
from port.cuda_nvrtc import compile_kernels
from port.device import DeviceError

REPAIRS = own_path().parent / "repairs"
# Every set of files that repairs make together; decode-rope comes before what it is made of.
ROPES = (
    (),
    ("decode-rope",),
    ("decode-rope", "decode-rope-pairing"),
    ("decode-rope", "decode-rope-scaling"),
    ("decode-rope", "decode-rope-scaling", "decode-rope-pairing"),
)
OTHERS = ((), ("softmax-nan",), ("attention-race",), ("softmax-nan", "attention-race"))
NAN = 0x7FFF


def repaired(*names: str, file: KernelsFile | None = None) -> KernelsFile:
    made = lift() if file is None else file
    for name in names:
        made = replace_function(made, REPAIRS / f"{name}.cu")
    return made


def user_file(*edits: tuple[str, str]) -> KernelsFile:
    text = own_path().read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return lift_text(text, Path("/home/me/my kernels.cu"), HOST_CALLS)


def test_every_file_has_a_test_here() -> None:
    tested = {name for names in (*ROPES, *OTHERS) for name in names}
    assert tested == {path.stem for path in REPAIRS.glob("*.cu")}


@pytest.mark.parametrize("names", [a + b for a, b in itertools.product(ROPES, OTHERS)])
def test_every_combination_compiles_for_a_gpu(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_VLLM_DIFF_CACHE", str(tmp_path))
    try:
        cubin = compile_kernels(repaired(*names), 90)
    except DeviceError as error:
        if sys.platform == "linux":
            raise
        pytest.skip(f"not run: {error}")
    for name in lift().kernels:
        assert b"\0.text." + name.encode() + b"\0" in cubin


# --- decode-rope ----------------------------------------------------------------------------------


def turned(file: KernelsFile, position: int, dim: int = 2048) -> np.ndarray:
    bench = Bench(Executor(file))
    x = bench.put(recipe("x", (dim,), 1.0))
    bench.call("ropeDecode", x, position, dim)
    return bench.get(x, (dim,))


@pytest.mark.parametrize("position", [0, 1, 257, 2047])
@pytest.mark.parametrize("dim", [2048, 512])
def test_the_shared_kernel_alone_gives_upstreams_bits(position: int, dim: int) -> None:
    assert np.array_equal(
        turned(repaired("decode-rope"), position, dim), turned(lift(), position, dim)
    )


def test_the_repaired_frequencies_are_prefills_to_the_bit() -> None:
    frequencies, cosines, sines = rope_tables()
    text = (REPAIRS / "decode-rope-scaling.cu").read_text()
    numbers = text.partition("{\n        ")[2].partition("}")[0].replace("f,", " ").split()
    assert np.array_equal(np.array(numbers, np.float64).astype(np.float32), frequencies)
    # and so the kernel turns (1, 0) by the very entries of prefill's tables
    file = repaired(*ROPES[-1])
    bench = Bench(Executor(file))
    row = np.zeros((32, 64), np.float32)
    row[:, :32] = 1.0
    for position in (1, 16, 257, 2047):
        x = bench.put(to_bf16(row))
        bench.call("ropeDecode", x, position, 2048)
        got = bench.get(x, (32, 64))
        assert np.array_equal(got[5, :32], to_bf16(cosines[position, ::2]))
        assert np.array_equal(got[5, 32:], to_bf16(sines[position, ::2]))


@pytest.mark.parametrize(
    ("names", "halves", "slow"),
    [
        (ROPES[1], False, False),
        (ROPES[2], True, False),
        (ROPES[3], False, True),
        (ROPES[4], True, True),
    ],
)
def test_each_repair_changes_its_own_half_of_the_fault(
    names: tuple[str, ...], halves: bool, slow: bool
) -> None:
    position = 100
    bench = Bench(Executor(repaired(*names)))
    row = np.zeros((32, 64), np.float32)
    last = (31, 63) if halves else (62, 63)
    row[:, last[0]] = 1.0  # the slowest pair
    x = bench.put(to_bf16(row))
    bench.call("ropeDecode", x, position, 2048)
    got = to_float(bench.get(x, (32, 64)))
    plain = position * 500000.0 ** (-62 / 64)
    expected = plain / 32 if slow else plain
    np.testing.assert_allclose(got[:, last[1]], expected, rtol=2**-8)
    assert not np.delete(got, last, axis=1).any()


# --- softmax-nan ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 15, 16, 17, 33, 97])
def test_repaired_softmax_is_right_where_upstreams_is_and_finite_elsewhere(n: int) -> None:
    results = []
    for file in (lift(), repaired("softmax-nan")):
        bench = Bench(Executor(file))
        scores = bench.put(recipe("scores", (32, n, n), 2.0))
        bench.call("causalMask", scores, n)
        bench.call("softmax", scores, n)
        results.append(bench.get(scores, (32, n, n)))
    upstream, ours = results
    lost = upstream == NAN
    assert lost.any() == (n > 3)  # an aligned masked pair exists from 4 tokens on
    assert np.array_equal(ours[~lost], upstream[~lost])
    assert np.isfinite(to_float(ours)).all()
    assert not to_float(ours)[:, np.triu(np.ones((n, n), bool), 1)].any()
    np.testing.assert_allclose(to_float(ours).sum(-1), 1, atol=n * 2**-9)


# --- attention-race -------------------------------------------------------------------------------


def attention(file: KernelsFile, schedule: str) -> np.ndarray:
    bench = Bench(Executor(file, schedule))
    out = bench.new((2, 2048))
    bench.call("pagedAttention", 7, 2, *map(bench.put, paged_attention_inputs((20, 33))), out)
    return bench.get(out, (2, 2048))


@pytest.mark.parametrize("schedule", ["benign", "reversed", "ahead", "ahead-reversed", "random:7"])
def test_repaired_attention_gives_the_same_bits_under_every_schedule(schedule: str) -> None:
    right = attention(lift(), "benign")
    assert np.array_equal(attention(repaired("attention-race"), schedule), right)
    if schedule in ("ahead", "random:7"):
        assert not np.array_equal(attention(lift(), schedule), right)


# --- replacing ------------------------------------------------------------------------------------


def test_the_users_file_is_still_what_is_reported() -> None:
    file = user_file()
    made = repaired("softmax-nan", file=file)
    assert (made.path, made.sha256, made.text) == (file.path, file.sha256, file.text)
    assert made.host_calls is file.host_calls
    assert "the repair" in made.kernels["softmaxKernel"].text
    changed = [name for name in file.kernels if made.kernels[name] != file.kernels[name]]
    assert changed == ["softmaxKernel"]


def test_a_kernel_of_another_name_is_replaced_under_that_name() -> None:
    file = user_file(("softmaxKernel<<<", "my_rows<<<"), ("softmaxKernel(", "my_rows("))
    made = replace_function(file, REPAIRS / "softmax-nan.cu", "my_rows")
    bench = Bench(Executor(made))
    scores = bench.put(recipe("scores", (32, 17, 17), 2.0))
    bench.call("causalMask", scores, 17)
    bench.call("softmax", scores, 17)
    assert not (bench.get(scores, (32, 17, 17)) == NAN).any()


def test_errors_name_the_file_and_line_that_they_are_in(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    lines = (REPAIRS / "softmax-nan.cu").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "float m_a" in line)
    lines[at] = "            float m_a = uno;"
    broken.write_text("\n".join(lines))
    with pytest.raises(KernelsError, match=rf"{broken}:{at + 1}: .*uno"):
        Executor(replace_function(lift(), broken))
    # behind a replaced function, lines are the user's again
    text = own_path().read_text()
    line = text[: text.index("acc / d")].count("\n") + 1
    file = repaired("softmax-nan", *ROPES[-1], file=user_file(("acc / d)", "acc / due)")))
    with pytest.raises(KernelsError, match=rf"/home/me/my kernels.cu:{line}: .*due"):
        Executor(file)


def test_a_function_that_is_not_there_or_takes_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelsError, match="has no function ropeDecodeElement"):
        replace_function(lift(), REPAIRS / "decode-rope-pairing.cu")
    file = user_file(
        ("softmaxKernel(__nv_bfloat16 *input, int", "softmaxKernel(__nv_bfloat16 *input, long"),
    )
    with pytest.raises(KernelsError, match=r"my kernels.cu:\d+: softmaxKernel must take .*int\)"):
        repaired("softmax-nan", file=file)


def test_a_files_own_device_functions_and_line_ends_do_no_harm() -> None:
    text = own_path().read_text()
    helper = "__device__ float twice(float x) { return 2 * x; }\n"
    text = text.replace("// --- softmax in prefill", helper + "// --- softmax in prefill")
    text = text.replace("expf(token - m[0]) / d[0]", "0.5f * twice(expf(token - m[0]) / d[0])")
    file = lift_text(text.replace("\n", "\r\n"), Path("user.cu"), HOST_CALLS)
    Executor(repaired("softmax-nan", *ROPES[-1], "attention-race", file=file))
