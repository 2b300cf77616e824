"""The CPU as a device: memory, copies and cuBLAS's GEMM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.lift import Launch, lift
from port.device import DeviceError, Incident, MemcpyKind, Operation
from port.host_device import HostDevice
from port.log import LoggedDevice

H2D, D2H, D2D = MemcpyKind.HOST_TO_DEVICE, MemcpyKind.DEVICE_TO_HOST, MemcpyKind.DEVICE_TO_DEVICE
N, T = Operation.N, Operation.T


@pytest.fixture(scope="module")
def device() -> HostDevice:
    return HostDevice(lift())


def upload(device: HostDevice, array: np.ndarray) -> int:
    pointer = device.malloc(array.nbytes)
    device.memcpy(pointer, np.ascontiguousarray(array), array.nbytes, H2D)
    return pointer


def download(device: HostDevice, pointer: int, shape: tuple[int, ...]) -> np.ndarray:
    out = np.empty(shape, np.uint16)
    device.memcpy(out, pointer, out.nbytes, D2H)
    return out


def bf16(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_fresh_memory_is_poison_and_costs_nothing(device: HostDevice) -> None:
    pointer = device.malloc(2 << 30)
    assert (download(device, pointer + (1 << 30), (4096,)) == 0xFFFF).all()
    device.free(pointer)


def test_copies_go_all_three_ways(device: HostDevice) -> None:
    data = np.arange(1000, dtype=np.uint16)
    first = upload(device, data)
    second = device.malloc(data.nbytes)
    device.memcpy(second + 100, first, 500, D2D)
    got = download(device, second, (1000,))
    assert (got[50:300] == data[:250]).all()
    assert (got[:50] == 0xFFFF).all()
    assert (got[300:] == 0xFFFF).all()


def test_a_copy_outside_every_buffer_is_refused(device: HostDevice) -> None:
    pointer = upload(device, np.zeros(8, np.uint16))
    with pytest.raises(DeviceError, match="not inside one allocation"):
        device.memcpy(pointer + 8, pointer, 16, D2D)
    incidents: list[Incident] = []
    device.on_incident = incidents.append
    device.memcpy(pointer - 32768, pointer, 16, D2D)
    assert [incident.kind for incident in incidents] == ["memcpy"]


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 33])
@pytest.mark.parametrize("transa", [N, T])
@pytest.mark.parametrize("transb", [N, T])
@pytest.mark.parametrize("alpha", [1.0, 0.125, 0.3])
def test_gemm_is_column_major_with_strides_and_one_rounding(
    device: HostDevice, n: int, transa: Operation, transb: Operation, alpha: float
) -> None:
    m, k = 24, 64
    rng = np.random.default_rng(n)
    a_shape = (k, m) if transa is T else (m, k)
    b_shape = (n, k) if transb is T else (k, n)
    lda, ldb, ldc = a_shape[0] + 5, b_shape[0] + 3, m + 7
    # A column-major matrix of leading dimension ld is a row-major (columns, ld) array.
    a_bits = bf16(rng.standard_normal((a_shape[1], lda)).astype(np.float32))
    b_bits = bf16(rng.standard_normal((b_shape[1], ldb)).astype(np.float32))
    c = device.malloc(n * ldc * 2)
    status = device.gemm_ex(
        transa, transb, m, n, k, alpha, upload(device, a_bits), lda, upload(device, b_bits), ldb,
        0.0, c, ldc,
    )  # fmt: skip
    assert status == 0
    a_matrix = values(a_bits).T[: a_shape[0]]
    b_matrix = values(b_bits).T[: b_shape[0]]
    left = a_matrix.T if transa is T else a_matrix  # (m, k)
    right = b_matrix.T if transb is T else b_matrix  # (k, n)
    want = alpha * (left @ right)
    slack = 2 * k * 2.0**-24 * abs(alpha) * (abs(left) @ abs(right)) + 2.0**-8 * abs(want)
    got = download(device, c, (n, ldc))
    assert (abs(values(got[:, :m]).T - want) <= slack).all()
    assert (got[:-1, m:] == 0xFFFF).all()  # between the columns nothing is written


def test_gemm_rejects_what_cublas_rejects_and_writes_nothing(device: HostDevice) -> None:
    incidents: list[Incident] = []
    device.on_incident = incidents.append
    pointer = device.malloc(4096)
    assert device.gemm_ex(T, N, 16, 2, 64, 1.0, pointer, 63, pointer, 64, 0.0, pointer, 16) != 0
    assert [incident.kind for incident in incidents] == ["gemm"]
    assert (download(device, pointer, (2048,)) == 0xFFFF).all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 2, 8), (8, 0, 8), (8, 2, 0)])
def test_gemm_of_nothing_looks_at_no_operand(device: HostDevice, m: int, n: int, k: int) -> None:
    c = upload(device, np.full((2, 8), 0x3F80, np.uint16))
    assert device.gemm_ex(T, N, m, n, k, 1.0, 16, 8, 16, 8, 0.0, c, 8) == 0
    want = 0 if k == 0 else 0x3F80  # a sum of no products is 0
    assert (download(device, c, (2, 8)) == want).all()
    incidents: list[Incident] = []
    device.on_incident = incidents.append
    assert device.gemm_ex(T, N, 8, 200, 0, 1.0, 16, 8, 16, 8, 0.0, c, 8) != 0
    assert [f"{c:#x} leaves its buffer" in incident.message for incident in incidents] == [True]


def test_a_write_outside_a_buffer_is_found_after_the_launch(device: HostDevice) -> None:
    incidents: list[Incident] = []
    device.on_incident = incidents.append
    row = np.full((1, 2048), 0x3F80, np.uint16)
    x, y = upload(device, row), upload(device, np.concatenate([row, row]))
    device.launch(Launch("residualKernel", (2, 1, 1), (1024, 1, 1), (x, y)))
    assert [incident.kind for incident in incidents] == ["guard"]
    assert "residualKernel" in incidents[0].message


def test_the_log_writes_down_every_call_and_changes_nothing(device: HostDevice) -> None:
    logged = LoggedDevice(device)
    row = np.full(2048, 0x3F80, np.uint16)
    x = logged.malloc(row.nbytes, "x")
    logged.memcpy(x, row, row.nbytes, H2D)
    logged.launch(Launch("residualKernel", (1, 1, 1), (1024, 1, 1), (x, x)))
    out = np.empty_like(row)
    logged.memcpy(out, x, row.nbytes, D2H)
    assert (out == 0x4000).all()  # 1 + 1
    assert logged.log.counts() == {
        "malloc": 1,
        "host_to_device": 1,
        "residualKernel": 1,
        "device_to_host": 1,
    }
    assert logged.log.copied_bytes(H2D) == 4096
