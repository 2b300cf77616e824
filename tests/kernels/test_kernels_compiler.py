"""Finding a compiler, caching what it makes, and telling the user what it said."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernels_helpers import Bench

from kernels import compiler
from kernels.errors import KernelsError
from kernels.lift import lift, lift_text
from kernels.simt import Executor

ROOT = Path(__file__).parents[2]
SMALL = (
    "__global__ void k(int *x) { x[threadIdx.x] = threadIdx.x; }\n"
    "void go(int *x) { k<<<1, 4>>>(x); }\n"
)


def test_a_compile_error_names_the_users_line_and_keeps_the_message(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    own = (ROOT / "kernels" / "kernels.cu").read_text()
    words = "float token = __bfloat162float("
    line = own[: own.index(words)].count("\n") + 1
    path.write_text(own.replace(words, "flaot token = __bfloat162float(", 1))
    with pytest.raises(KernelsError) as caught:
        Executor(lift(path))
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "flaot" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.detail is not None
    assert "flaot" in caught.value.detail


def test_a_frame_too_large_for_a_fiber_is_a_compile_error() -> None:
    text = (
        "__global__ void k(int *x) { volatile int big[20000]; big[x[0]] = 1; __syncthreads();\n"
        "x[1] = big[x[0]]; }\nvoid go(int *x) { k<<<1, 1>>>(x); }\n"
    )
    with pytest.raises(KernelsError, match=r"user\.cu:[12]: .*frame"):
        Executor(lift_text(text, Path("user.cu")))
    # without a barrier the threads share one large stack
    bench = Bench(Executor(lift_text(text.replace("__syncthreads();", ""), Path("user.cu"))))
    x = bench.put(np.array([19999, 0], np.int32))
    bench.call("go", x)
    assert bench.get(x, (2,), np.int32).tolist() == [19999, 1]


def test_a_shared_variable_outside_a_function_is_refused() -> None:
    with pytest.raises(KernelsError, match=r"user\.cu:2: a __shared__ variable outside"):
        Executor(
            lift_text(
                "// one\n__shared__ int box[4];\n"
                "__global__ void k(int *x) { x[0] = box[0]; }\nvoid go(int *x) { k<<<1, 4>>>(x); }",
                Path("user.cu"),
            )
        )


def test_an_awkward_file_compiles_and_runs() -> None:
    from test_kernels_lift import AWKWARD

    calls = "void go(bf16 *x, float *y, int n) { first<<<1, 32, 16>>>(x, y, n); }\n"
    bench = Bench(Executor(lift_text(AWKWARD + calls, Path("user.cu"))))
    out = bench.new((32,), np.float32)
    bench.call("go", bench.put(np.array([0x4080], np.uint16)), out, 31)
    got = bench.get(out, (32,), np.float32)
    assert (got[:31] == 1.0).all()
    assert np.isnan(got[31])


def test_cxx_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(
        KernelsError, match="CXX is 'no-such-compiler -O3', but there is no program"
    ):
        Executor(lift())


def test_cxx_may_hold_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = shlex.join(compiler.find_compiler().command)
    monkeypatch.setenv("CXX", f"{plain} -DFOUR=4 '-DFIVE=2 + 3'")
    monkeypatch.setenv("TINY_VLLM_DIFF_CACHE", str(tmp_path))
    text = SMALL.replace("= threadIdx.x", "= FOUR + FIVE")
    bench = Bench(Executor(lift_text(text, Path("user.cu"))))
    out = bench.new((4,), np.int32)
    bench.call("go", out)
    assert bench.get(out, (4,), np.int32).tolist() == [9] * 4


def test_no_compiler_at_all_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        KernelsError, match=r"no C\+\+ compiler found: install .*pip install ziglang"
    ):
        compiler.find_compiler()


def test_the_ziglang_wheel_is_the_last_resort(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Spec:
        origin = __file__

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: Spec)
    assert compiler.find_compiler().command == (sys.executable, "-m", "ziglang", "c++")


def test_an_object_is_made_once_and_again_when_anything_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINY_VLLM_DIFF_CACHE", str(tmp_path / "cache"))
    first = Executor(lift_text(SMALL, Path("user.cu")))
    assert first.path.parent == tmp_path / "cache"
    made = first.path.stat().st_ino
    assert Executor(lift_text(SMALL, Path("user.cu"))).path.stat().st_ino == made
    assert Executor(lift_text(SMALL + "\n", Path("user.cu"))).path != first.path
    plain = shlex.join(compiler.find_compiler().command)
    monkeypatch.setenv("CXX", f"{plain} -O1")
    assert Executor(lift_text(SMALL, Path("user.cu"))).path != first.path
    assert all(p.suffix == ".so" for p in (tmp_path / "cache").iterdir())


def test_a_broken_cached_object_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINY_VLLM_DIFF_CACHE", str(tmp_path))
    path = Executor(lift_text(SMALL + "// broken", Path("user.cu"))).path
    other = path.with_name("kernels-other.so")
    other.write_bytes(b"not an object")
    from kernels.simt import _open

    with pytest.raises(KernelsError, match="cannot load what the compiler made"):
        _open(other)
    assert not other.exists()


def test_cache_folder_falls_back_when_it_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINY_VLLM_DIFF_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = compiler.cache_folder()
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.delenv("TINY_VLLM_DIFF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(compiler.sys, "platform", "linux")
    assert compiler.cache_folder() == tmp_path / "xdg" / "tiny-vllm-diff"
    monkeypatch.setattr(compiler.sys, "platform", "darwin")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / "Library" / "Caches" / "tiny-vllm-diff"


SCRIPT = """
import ctypes, sys
from pathlib import Path
from kernels.lift import lift_text
from kernels.simt import Executor
file = lift_text(sys.argv[1], Path("user.cu"))
executor = Executor(file)
x = executor.allocate(16)
executor.launch(file.call("go", x))
print(list((ctypes.c_int * 4).from_address(x)))
"""


def test_several_processes_may_build_the_same_object_at_once(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TINY_VLLM_DIFF_CACHE": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, SMALL],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in running:
        out, problems = process.communicate(timeout=120)
        assert (out, problems) == ("[0, 1, 2, 3]\n", "")
    assert sorted(p.name.split("-")[0] for p in tmp_path.iterdir()) == ["kernels", "runtime"]


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="needs nvcc, NVIDIA's compiler (CUDA toolkit 13)"
)
def test_nvcc_compiles_our_file_unchanged_and_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "nvcc",
            "-O2",
            "-arch=sm_90",
            "-Werror",
            "all-warnings",
            "-c",
            str(ROOT / "kernels" / "kernels.cu"),
            "-o",
            str(tmp_path / "kernels.o"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
