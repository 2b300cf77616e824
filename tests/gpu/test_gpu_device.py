"""The GPU behind the device interface: memory, copies, GEMM, and what happens when things fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gpu_bench import Bench, Figures, incidents_of, recipe, to_float

from kernels.lift import Launch, lift
from port.cuda_device import CudaDevice
from port.device import DeviceError, MemcpyKind, Operation

ROOT = Path(__file__).parents[2]
N, T = Operation.N, Operation.T


@pytest.fixture
def bench(cuda: CudaDevice) -> Iterator[Bench]:
    made = Bench(cuda, lift())
    yield made
    made.close()


def test_it_says_what_it_is_in_six_lines(cuda: CudaDevice, figures: Figures) -> None:
    lines = cuda.describe()
    assert len(lines) == 6
    for line in lines:
        name, _, value = line.partition(": ")
        figures.note(name, value)


def test_fresh_memory_is_poison(bench: Bench) -> None:
    pointer = bench.new((1000,))
    assert (bench.get(pointer, (1000,)) == 0xFFFF).all()


def test_the_last_bytes_of_a_large_buffer_are_poison(cuda: CudaDevice) -> None:
    size = 2 * 2**30
    pointer = cuda.malloc(size, "kv_cache")
    end = np.zeros(4096, np.uint8)
    cuda.memcpy(end, pointer + size - 4096, 4096, MemcpyKind.DEVICE_TO_HOST)
    cuda.free(pointer)
    assert (end == 0xFF).all()


def test_bytes_survive_all_three_copies(bench: Bench) -> None:
    values = recipe("rmsNorm/input", (300, 2048), 1.0)
    first = bench.put(values)
    second = bench.new(values.shape)
    bench.device.memcpy(second + 10, first + 6, 1000, MemcpyKind.DEVICE_TO_DEVICE)
    got = bench.get(second, values.shape).ravel()
    assert np.array_equal(got[5:505], values.ravel()[3:503])
    assert (got[:5] == 0xFFFF).all()
    assert (got[505:] == 0xFFFF).all()
    assert np.array_equal(bench.get(first, values.shape), values)


# transa, m, n, k, lda, ldb, ldc, alpha: the engine's own shapes
GEMMS = {
    "decode q_proj": (T, 2048, 2, 2048, 2048, 2048, 2048, 1.0),
    "decode k_proj, one slot": (T, 512, 1, 2048, 2048, 2048, 512, 1.0),
    "decode down": (T, 2048, 2, 8192, 8192, 8192, 2048, 1.0),
    "prefill gate": (T, 8192, 17, 2048, 2048, 2048, 8192, 1.0),
    "prefill scores, 17": (T, 17, 17, 64, 512, 2048, 17, 0.125),
    "prefill scores, 480": (T, 480, 480, 64, 512, 2048, 480, 0.125),
    "prefill weighted sum, 17": (N, 64, 17, 17, 512, 17, 2048, 1.0),
    "prefill weighted sum, 480": (N, 64, 480, 480, 512, 480, 2048, 1.0),
}


@pytest.mark.parametrize("name", GEMMS)
def test_gemm_ex_rounds_the_float64_product_once(bench: Bench, figures: Figures, name: str) -> None:
    transa, m, n, k, lda, ldb, ldc, alpha = GEMMS[name]
    rng = np.random.default_rng()
    rows = m if transa is T else k
    a = _random_bf16(rng, (rows, lda))
    b = _random_bf16(rng, (n, ldb))
    left = to_float(b)[:, :k]  # (n, k)
    right = to_float(a)[:, :k].T if transa is T else to_float(a)[:, :m]  # (k, m)
    exact = alpha * (left @ right)  # (n, m)
    magnitude = alpha * (np.abs(left) @ np.abs(right))
    c = bench.new((n, ldc))
    status = bench.device.gemm_ex(
        transa, N, m, n, k, alpha, bench.put(a), lda, bench.put(b), ldb, 0.0, c, ldc
    )
    assert status == 0
    raw = bench.get(c, (n, ldc))
    got = to_float(raw[:, :m])
    # half a bf16 step for the store; k float32 additions, which tensor cores truncate
    allowed = 2.0**-8 * np.abs(exact) + (1 + 2.0**-8) * k * 2.0**-23 * magnitude
    good = bool((np.abs(got - exact) <= allowed).all())
    figures.count("gemm_ex shapes right", good)
    assert good, float(np.max(np.abs(got - exact) / allowed))
    assert (raw[:, m:] == 0xFFFF).all()  # between the columns nothing is written


def _random_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


# --- what upstream would not notice ---------------------------------------------------------------


def test_refused_calls_are_incidents_and_the_device_goes_on(cuda: CudaDevice) -> None:
    x = cuda.malloc(2048 * 2 * 4)
    end = x + 2048 * 2 * 4
    d2d = MemcpyKind.DEVICE_TO_DEVICE
    works: dict[str, Callable[[], object]] = {
        "block of 2048": lambda: cuda.launch(
            Launch("residualKernel", (1, 1, 1), (2048, 1, 1), (x, x))
        ),
        "empty grid": lambda: cuda.launch(
            Launch("residualKernel", (0, 1, 1), (1024, 1, 1), (x, x))
        ),
        "too much shared memory": lambda: cuda.launch(
            Launch("residualKernel", (1, 1, 1), (1024, 1, 1), (x, x), 2**20)
        ),
        "lda too small": lambda: cuda.gemm_ex(T, N, 8, 8, 8, 1.0, x, 7, x, 8, 0.0, x, 8),
        "matrix past the end": lambda: cuda.gemm_ex(
            T, N, 8, 8, 8, 1.0, end - 8, 8, x, 8, 0.0, x, 8
        ),
        "copy past the end": lambda: cuda.memcpy(end - 8, x, 16, d2d),
    }
    kinds = {name: incidents_of(cuda, work) for name, work in works.items()}
    cuda.synchronize()
    assert incidents_of(cuda, lambda: cuda.memcpy(x, x + 4096, 16, d2d)) == []
    cuda.free(x)
    assert kinds == {
        "block of 2048": ["launch"],
        "empty grid": ["launch"],
        "too much shared memory": ["launch"],
        "lda too small": ["gemm"],
        "matrix past the end": ["gemm"],
        "copy past the end": ["memcpy"],
    }


WILD = """
from kernels.lift import Launch, lift
from port.cuda_device import CudaDevice
from port.device import DeviceError
device = CudaDevice(lift())
kinds = []
device.on_incident = lambda incident: kinds.append(incident.kind)
device.launch(Launch("residualKernel", (1, 1, 1), (1024, 1, 1), (64, 128)))
try:
    device.synchronize()
except DeviceError as error:
    print(kinds, error)
try:
    device.malloc(16)
except DeviceError as error:
    print("then", error)
device.close()
"""


def test_a_wild_pointer_is_an_incident_and_then_an_error() -> None:
    """In a process of its own, because the GPU answers that process nothing afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", WILD], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("['launch'] the GPU stopped: ")
    assert "in residualKernel or a kernel before it; start again" in first
    assert second.startswith("then the GPU stopped: ")


def test_too_little_memory_says_how_much_is_missing(cuda: CudaDevice) -> None:
    with pytest.raises(
        DeviceError, match=r"must hold 1048576\.00 GiB more for weights \(got \d+\.\d\d GiB free"
    ):
        cuda.malloc(2**50, "weights")


def test_closing_gives_all_memory_back(cuda: CudaDevice) -> None:
    def free() -> int:
        value: int = cuda.check(cuda.driver.cuMemGetInfo(), "read memory")[0]
        return value

    with CudaDevice(lift()) as first:  # what the first one leaves behind is cuBLAS's code
        first.malloc(2**20)
    before = free()
    with CudaDevice(lift()) as second:
        second.malloc(2**30)
        assert free() <= before - 2**30
    assert abs(free() - before) <= 64 * 2**20
    second.close()
