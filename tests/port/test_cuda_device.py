"""What the CUDA device does about failures, and that it gives back what it took; without a GPU."""

from __future__ import annotations

import builtins
import ctypes
import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import CONTEXT, TOTAL, FakeCublas, FakeDriver, open_fake

from kernels.lift import Launch, lift
from port import cuda_device, cuda_graph
from port.cuda_device import CudaDevice, why_no_gpu
from port.cuda_graph import GraphDevice
from port.device import DeviceError, Incident, MemcpyKind, Operation

pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not made for this system")

ROOT = Path(__file__).parents[2]
H2D, D2H, D2D = MemcpyKind.HOST_TO_DEVICE, MemcpyKind.DEVICE_TO_HOST, MemcpyKind.DEVICE_TO_DEVICE
T, N = Operation.T, Operation.N
ILLEGAL_ADDRESS, INVALID_VALUE = 700, 1


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def cublas() -> FakeCublas:
    return FakeCublas()


@pytest.fixture
def device(driver: FakeDriver, cublas: FakeCublas, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    return open_fake(monkeypatch, driver, cublas)


@pytest.fixture
def incidents(device: CudaDevice) -> list[Incident]:
    seen: list[Incident] = []
    device.on_incident = seen.append
    return seen


def residual(x: int, threads: int = 1024) -> Launch:
    return Launch("residualKernel", (2, 1, 1), (threads, 1, 1), (x, x))


# --- what may be missing --------------------------------------------------------------------------


def test_importing_the_device_loads_nothing_of_cuda() -> None:
    code = (
        "import sys, port.cuda_device, port.cuda_graph, port.cuda_graph_nodes, port.cuda_nvrtc\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('cuda', 'nvmath', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_without_cuda_python_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid(monkeypatch, "cuda.bindings")
    with pytest.raises(DeviceError) as caught:
        CudaDevice(lift())
    assert str(caught.value) == (
        "--device cuda needs the package cuda-python (got none); pip install 'tiny-vllm-diff[cuda]'"
    )


def test_without_nvmath_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid(monkeypatch, "nvmath.bindings")
    with pytest.raises(DeviceError, match=r"nvmath-python \(got none\).*tiny-vllm-diff\[cuda\]"):
        cuda_device._open_cublas()


def _forbid(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (RuntimeError("no libcuda"), "needs an NVIDIA driver (got none on this machine)"),
        (100, "needs a working NVIDIA driver and GPU (got CUDA_ERROR_NO_DEVICE)"),
    ],
)
def test_without_a_driver_or_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, outcome: RuntimeError | int, message: str
) -> None:
    from cuda.bindings import driver

    def initialise(flags: int) -> tuple[Any]:
        if isinstance(outcome, RuntimeError):
            raise outcome
        return (driver.CUresult(outcome),)

    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", SimpleNamespace(cuInit=initialise))
    wanted = f"--device cuda {message}; use --device host"
    with pytest.raises(DeviceError) as caught:
        CudaDevice(lift())
    assert str(caught.value) == wanted
    assert why_no_gpu() == wanted


def test_no_gpu_and_a_number_too_high_are_clear_errors(
    monkeypatch: pytest.MonkeyPatch, cublas: FakeCublas
) -> None:
    with pytest.raises(DeviceError, match=r"needs an NVIDIA GPU \(got 0, asked for number 0\)"):
        open_fake(monkeypatch, FakeDriver(gpus=0), cublas)
    assert why_no_gpu() == "--device cuda needs an NVIDIA GPU (got none)"
    open_fake(monkeypatch, FakeDriver(gpus=1), cublas)
    assert why_no_gpu() is None
    with pytest.raises(DeviceError, match=r"\(got 1, asked for number 1\)"):
        CudaDevice(lift(), ordinal=1)


def test_a_cublas_that_does_not_start_is_an_error_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, cublas: FakeCublas
) -> None:
    cublas.refusal = RuntimeError("libcublas.so.13:\n not found")
    with pytest.raises(DeviceError, match=r"cuBLAS must work.*libcublas\.so\.13: not found"):
        open_fake(monkeypatch, driver, cublas)
    assert driver.names()[-2:] == ["cuModuleUnload", "cuDevicePrimaryCtxRelease"]


def test_it_describes_the_gpu_in_six_lines_of_whole_numbers(device: CudaDevice) -> None:
    assert device.describe() == [
        "Device: Fake GPU, compute capability 9.0",
        "Memory: 139 GiB",
        "Multiprocessors: 132",
        "L2 cache: 60 MiB",
        "Shared memory a block: 48 KiB",
        "Threads a block: 1024",
    ]


# --- memory ---------------------------------------------------------------------------------------


def test_all_of_an_allocation_is_poisoned(device: CudaDevice, driver: FakeDriver) -> None:
    pointer = device.malloc(2 * 2**30, "kv_cache")
    assert driver.log[-1] == ("cuMemsetD8", pointer, 0xFF, 2 * 2**30)


def test_too_little_memory_names_the_buffer_and_the_numbers(
    monkeypatch: pytest.MonkeyPatch, cublas: FakeCublas
) -> None:
    device = open_fake(monkeypatch, FakeDriver(free=4 * 2**30), cublas)
    device.malloc(5 * 2**29, "weights")
    with pytest.raises(DeviceError) as caught:
        device.malloc(2 * 2**30, "kv_cache")
    assert str(caught.value) == (
        "GPU memory must hold 2.00 GiB more for kv_cache (got 1.50 GiB free of 139.00, "
        "2.50 used here); close other programs on this GPU or use --device host"
    )


def test_closing_gives_everything_back_once(
    device: CudaDevice, driver: FakeDriver, cublas: FakeCublas
) -> None:
    free = driver.free
    device.malloc(1000)
    device.free(device.malloc(2000))
    device.close()
    device.close()
    assert driver.free == free
    assert cublas.destroyed == [device.handle]
    assert driver.names().count("cuModuleUnload") == 1
    assert driver.names().count("cuDevicePrimaryCtxRelease") == 1
    with pytest.raises(DeviceError, match="the device is closed"):
        device.malloc(1)


def test_a_forgotten_device_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, cublas: FakeCublas
) -> None:
    device = open_fake(monkeypatch, driver, cublas)
    device.malloc(1000)
    del device
    gc.collect()
    assert driver.names()[-1] == "cuDevicePrimaryCtxRelease"
    assert cublas.destroyed == [1]


def test_copies_outside_an_allocation_are_incidents_and_do_nothing(
    device: CudaDevice, driver: FakeDriver, incidents: list[Incident]
) -> None:
    x = device.malloc(64)
    before = len(driver.log)
    device.memcpy(x + 60, x, 8, D2D)
    device.memcpy(x, x - 4, 8, D2D)
    device.memcpy(x + 60, np.zeros(2, np.int32), 8, H2D)
    device.memcpy(np.zeros(2, np.int32), x + 60, 8, D2H)
    assert [incident.kind for incident in incidents] == ["memcpy"] * 4
    assert f"8 bytes at {x - 4:#x}: not inside one allocation" in incidents[1].message
    assert len(driver.log) == before


def test_the_host_side_must_be_a_fitting_array(device: CudaDevice) -> None:
    x = device.malloc(64)
    fixed = np.zeros(2, np.int32)
    fixed.flags.writeable = False
    device.memcpy(x, fixed, 8, H2D)
    with pytest.raises(TypeError, match="writeable"):
        device.memcpy(fixed, x, 8, D2H)
    with pytest.raises(TypeError, match="array of >= 8 bytes"):
        device.memcpy(x, np.zeros(1, np.int32), 8, H2D)
    with pytest.raises(TypeError, match="contiguous"):
        device.memcpy(x, np.zeros(8, np.int32)[::2], 8, H2D)
    with pytest.raises(TypeError, match="pointer, not an array"):
        device.memcpy(fixed, fixed, 8, D2D)


# --- work -----------------------------------------------------------------------------------------


def test_a_launch_carries_grid_block_and_arguments(device: CudaDevice, driver: FakeDriver) -> None:
    x = device.malloc(64)
    device.launch(Launch("ropeKernelDecode", (1, 2, 3), (64, 4, 2), (x, 40, 2048), 16))
    name, function, *shape, shared, stream, arguments, extra = driver.log[-1]
    assert name == "cuLaunchKernel"
    assert int(function) == hash(b"ropeKernelDecode") & 0xFFFFFF
    assert (shape, shared, int(stream), extra) == ([1, 2, 3, 64, 4, 2], 16, 0, 0)
    pointers = (ctypes.c_void_p * 3).from_address(arguments)
    assert ctypes.c_void_p.from_address(pointers[0] or 0).value == x
    numbers = [ctypes.c_int.from_address(at or 0).value for at in pointers[1:]]
    assert numbers == [40, 2048]


def test_a_refused_launch_is_an_incident_with_the_kernels_line(
    device: CudaDevice, driver: FakeDriver, incidents: list[Incident]
) -> None:
    x = device.malloc(64)
    driver.fail["cuLaunchKernel"] = INVALID_VALUE
    device.launch(residual(x, 2048))
    (incident,) = incidents
    assert incident.kind == "launch"
    assert "residualKernel<<<(2, 1, 1), (2048, 1, 1)>>>: what happened" in incident.message
    assert incident.line == lift().kernels["residualKernel"].line
    device.malloc(64)


def test_after_a_wild_kernel_nothing_goes_on(
    device: CudaDevice, driver: FakeDriver, incidents: list[Incident]
) -> None:
    device.launch(residual(device.malloc(64)))
    driver.fail["cuCtxSynchronize"] = ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="in residualKernel or a kernel before it; start again"):
        device.synchronize()
    assert [incident.kind for incident in incidents] == ["launch"]
    with pytest.raises(DeviceError, match="the GPU stopped: what happened"):
        device.malloc(64)


def test_gemm_ex_passes_bf16_float32_and_the_default_algorithm(
    device: CudaDevice, cublas: FakeCublas
) -> None:
    x = device.malloc(4096)
    assert device.gemm_ex(T, N, 8, 2, 16, 0.125, x, 16, x, 16, 0.0, x, 8) == 0
    handle, *arguments = cublas.calls[-1]
    alpha, beta = arguments[5], arguments[12]
    assert handle == device.handle
    assert ctypes.c_float.from_address(alpha).value == 0.125
    assert ctypes.c_float.from_address(beta).value == 0.0
    assert arguments == [
        1, 0, 8, 2, 16, alpha, x, 14, 16, x, 14, 16, beta, x, 14, 8, 68, -1
    ]  # fmt: skip
    device.gemm_ex(T, N, 8, 2, 16, 0.125, x, 16, x, 16, 0.0, x, 8)
    assert cublas.calls[-1] == (handle, *arguments)


def test_launches_of_one_kernel_keep_their_own_arguments(
    device: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when more were launched than are remembered, and when an id is used again."""
    monkeypatch.setattr(cuda_device, "MOST_REMEMBERED", 4)
    x = device.malloc(64)
    kept = [Launch("ropeKernelDecode", (1, 1, 1), (64, 1, 1), (x, i, 16)) for i in range(3)]
    for turn in range(20):
        position = 100 + turn
        device.launch(Launch("ropeKernelDecode", (1, 1, 1), (64, 1, 1), (x, position, 16)))
        assert _position(driver.log[-1]) == position
        device.launch(kept[turn % 3])
        assert _position(driver.log[-1]) == turn % 3


def _position(logged: tuple[Any, ...]) -> int:
    pointers = (ctypes.c_void_p * 3).from_address(logged[-2])
    return ctypes.c_int.from_address(pointers[1] or 0).value


def test_an_array_uploaded_again_has_its_new_bytes(device: CudaDevice, driver: FakeDriver) -> None:
    x = device.malloc(64)
    table, other = np.zeros(4, np.int32), np.ones(4, np.int32)
    for value, array in ((1, table), (2, table), (3, table), (1, other), (4, table)):
        array[0] = value
        device.memcpy(x, array, 16, H2D)
        _, to, source, count = driver.log[-1]
        first = source[0] if isinstance(source, np.ndarray) else _int_at(source)
        assert (to, first, count) == (x, value, 16)
    with pytest.raises(TypeError, match="array of >= 32 bytes"):
        device.memcpy(x, table, 32, H2D)


def _int_at(address: int) -> int:
    return ctypes.c_int.from_address(address).value


def test_memory_given_back_and_taken_anew_is_known_by_its_new_size(
    device: CudaDevice, driver: FakeDriver, incidents: list[Incident]
) -> None:
    x, y = device.malloc(256), device.malloc(256)
    assert y == x + 256  # the fake's way
    device.memcpy(x, y, 256, D2D)
    device.memcpy(x + 256 - 8, y, 8, D2D)
    assert incidents == []
    device.memcpy(x, y + 8, 256, D2D)  # past y's end
    device.memcpy(x + 8, y, 256, D2D)  # into y
    device.memcpy(x, y + 256, 8, D2D)  # behind both
    z = device.malloc(512)
    assert z == y + 256
    assert len(incidents) == 3
    device.memcpy(x, z, 8, D2D)
    device.free(y)
    assert len(incidents) == 3
    device.memcpy(x, y, 8, D2D)
    assert len(incidents) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lda": 15}, "leading dimensions must be at least 16, 16 and 8"),
        ({"ldc": 7}, "rejects m=8"),
        ({"n": -1}, "rejects m=8 n=-1"),
        ({"k": 4096, "lda": 4096, "ldb": 4096}, "leaves its buffer"),
        ({"k": 0, "n": 1024}, "leaves its buffer"),
    ],
)
def test_gemms_that_cublas_or_memory_would_not_have_are_incidents(
    device: CudaDevice,
    cublas: FakeCublas,
    incidents: list[Incident],
    changed: dict[str, int],
    message: str,
) -> None:
    x = device.malloc(4096)
    s = {"m": 8, "n": 2, "k": 16, "lda": 16, "ldb": 16, "ldc": 8} | changed
    for _ in range(2):
        status = device.gemm_ex(
            T, N, s["m"], s["n"], s["k"], 1.0, x, s["lda"], x, s["ldb"], 0.0, x, s["ldc"]
        )
        assert status == 7
    assert [incident.kind for incident in incidents] == ["gemm", "gemm"]
    assert message in incidents[0].message
    assert cublas.calls == []


def test_a_gemm_on_freed_memory_is_an_incident(
    device: CudaDevice, cublas: FakeCublas, incidents: list[Incident]
) -> None:
    x = device.malloc(4096)
    call = (T, N, 8, 2, 16, 1.0, x, 16, x, 16, 0.0, x, 8)
    assert device.gemm_ex(*call) == 0
    device.free(x)
    assert device.gemm_ex(*call) == 7
    assert [incident.kind for incident in incidents] == ["gemm"]
    assert len(cublas.calls) == 1


def test_an_answer_of_not_supported_is_an_incident_and_other_failures_stop(
    device: CudaDevice, cublas: FakeCublas, incidents: list[Incident]
) -> None:
    x = device.malloc(4096)
    call = (T, N, 8, 2, 16, 1.0, x, 16, x, 16, 0.0, x, 8)
    cublas.status = 15
    assert device.gemm_ex(*call) == 15
    assert [incident.kind for incident in incidents] == ["gemm"]
    cublas.status = 8
    with pytest.raises(DeviceError, match=r"STATUS_8 \(bf16 needs compute capability 8\.0"):
        device.gemm_ex(*call)


# --- graphs ---------------------------------------------------------------------------------------


@pytest.fixture
def graphs(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> GraphDevice:
    """With nothing that starts before it is needed."""
    monkeypatch.setattr(cuda_graph, "FIRST", cuda_graph.LONGEST)
    return GraphDevice(device)


def _turn(device: GraphDevice, x: int, position: int) -> None:
    device.memcpy(x, np.array([position], np.int32), 4, H2D)
    for row in range(4):
        device.launch(Launch("ropeKernelDecode", (1, 1, 1), (8, 1, 1), (x + row, position, 16)))
        device.memcpy(x + 512 + position, x + 16 * position + row, 16, D2D)
    device.gemm_ex(T, N, 8, 2, 16, 1.0, x, 16, x, 16, 0.0, x, 8)
    device.synchronize()


def test_a_graph_is_a_chain_of_the_calls_and_is_changed_in_place(
    graphs: GraphDevice, driver: FakeDriver, cublas: FakeCublas
) -> None:
    stream, workspace = cublas.set_up
    assert stream == ("stream", 2, 0x57)
    assert workspace[:2] == ("workspace", 2)
    assert workspace[3] == 32 * 2**20
    x = graphs.malloc(4096)
    for _ in range(2):
        _turn(graphs, x, 1)
    start = len(driver.log)
    _turn(graphs, x, 1)
    added = [entry for entry in driver.log[start:] if entry[0].startswith("cuGraphAdd")]
    kernel, copy = "cuGraphAddKernelNode", "cuGraphAddMemcpyNode"
    assert [entry[0] for entry in added] == [copy, *[kernel, copy] * 4, "cuGraphAddChildGraphNode"]
    nodes = [start + 1 + driver.log[start:].index(entry) for entry in added]
    assert [[int(node) for node in entry[2]] for entry in added] == [[], *([n] for n in nodes[:-1])]
    assert cublas.calls[-1][0] == 2  # captured through the second handle
    upload = added[0][4]
    assert (int(upload.dstDevice), upload.WidthInBytes, upload.Height, upload.Depth) == (x, 4, 1, 1)
    assert int(added[0][5]) == CONTEXT
    params = added[1][4]
    assert (params.gridDimX, params.blockDimX, params.sharedMemBytes) == (1, 8, 0)

    start = len(driver.log)
    _turn(graphs, x, 2)
    assert driver.names()[start:] == [
        *["cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams"] * 4,
        "cuGraphLaunch",
        "cuCtxSynchronize",
    ]
    pointers = (ctypes.c_void_p * 3).from_address(params.kernelParams)
    assert ctypes.c_int.from_address(pointers[1] or 0).value == 2
    changed = driver.log[start + 1][3]
    assert (int(changed.dstDevice), int(changed.srcDevice)) == (x + 514, x + 32)
    assert graphs.replays == 2


def test_closing_a_graph_device_gives_its_graphs_back(
    graphs: GraphDevice, driver: FakeDriver, cublas: FakeCublas
) -> None:
    x = graphs.malloc(4096)
    for _ in range(3):
        _turn(graphs, x, 1)
    graphs.close()
    names = driver.names()
    for release in ("cuGraphExecDestroy", "cuMemFreeHost", "cuStreamDestroy"):
        assert names.count(release) == 1
    assert names.count("cuGraphDestroy") == 2  # the graph, and what was captured for it
    assert sorted(cublas.destroyed) == [1, 2]
    assert driver.free == TOTAL


def test_a_graph_that_cannot_be_made_is_a_clear_error(
    graphs: GraphDevice, driver: FakeDriver
) -> None:
    x = graphs.malloc(4096)
    for _ in range(2):
        _turn(graphs, x, 1)
    driver.fail["cuGraphInstantiate"] = INVALID_VALUE
    with pytest.raises(DeviceError, match="could not make a graph: what happened"):
        _turn(graphs, x, 1)
