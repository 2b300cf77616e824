"""The CPU as a device: guarded, poisoned memory, launches through `kernels/simt`, torch's GEMM."""

from __future__ import annotations

import ctypes
import platform
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import torch

from kernels.lift import KernelsFile, Launch
from kernels.simt import Executor, LaunchError
from port.device import (
    DeviceError,
    HostOrDevice,
    Incident,
    MemcpyKind,
    Operation,
    Pointer,
    gemm_fault,
    raise_incident,
)

_BF16_BYTES = 2
CUBLAS_STATUS_SUCCESS = 0
CUBLAS_STATUS_INVALID_VALUE = 7


class HostDevice:
    """The CPU behind the interface of `port.device.Device`.

    Memory is real host memory, so a pointer is an address. Fresh memory reads as NaN (0xFF bytes)
    and costs nothing until it is written; guard zones on both sides of an allocation are checked
    after each launch. schedule: in which order a kernel's threads run. races: look for accesses
    that no barrier orders.
    """

    name = "host"

    def __init__(self, kernels: KernelsFile, schedule: str = "benign", races: bool = False) -> None:
        self.on_incident: Callable[[Incident], None] = raise_incident
        self.launches = 0  # so far
        self._kernels, self._races = kernels, races
        self._executor = self._launcher = Executor(kernels, schedule, races=races)
        self._unwatched: Executor | None = None  # for other schedules, where races are looked for
        self._schedule = schedule
        self._sizes: dict[Pointer, int] = {}
        self._starts: list[Pointer] = []  # sorted

    def describe(self) -> list[str]:
        return [f"Device: CPU ({platform.machine()})", f"Threads: {torch.get_num_threads()}"]

    def malloc(self, size: int, name: str = "") -> Pointer:
        if size <= 0:
            raise DeviceError(f"allocation size must be positive (got {size}); ask for 1 or more")
        pointer = self._executor.allocate(size, name)
        self._sizes[pointer] = size
        self._starts = sorted(self._sizes)
        return pointer

    def free(self, pointer: Pointer) -> None:
        del self._sizes[pointer]
        self._starts = sorted(self._sizes)
        self._executor.free(pointer)

    def _holds(self, pointer: Pointer, count: int) -> bool:
        """Whether `count` bytes from `pointer` lie in one allocation."""
        index = bisect_right(self._starts, pointer) - 1
        if index < 0:
            return False
        start = self._starts[index]
        return pointer + count <= start + self._sizes[start]

    def memcpy(self, dst: HostOrDevice, src: HostOrDevice, count: int, kind: MemcpyKind) -> None:
        addresses = []
        for side, on_host in (
            (dst, kind is MemcpyKind.DEVICE_TO_HOST),
            (src, kind is MemcpyKind.HOST_TO_DEVICE),
        ):
            if on_host:
                if not isinstance(side, np.ndarray) or side.nbytes < count:
                    raise TypeError(f"the host side must be an array of >= {count} bytes")
                addresses.append(side.ctypes.data)
            else:
                if isinstance(side, np.ndarray):
                    raise TypeError("the device side must be a pointer, not an array")
                if not self._holds(side, count):
                    self.on_incident(
                        Incident(
                            "memcpy",
                            f"cudaMemcpy of {count} bytes at {side:#x}: not inside one allocation",
                        )
                    )
                    return
                addresses.append(side)
        ctypes.memmove(addresses[0], addresses[1], count)

    @property
    def schedule(self) -> str:
        """As kernels.simt.Executor's; may be changed between launches."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: str) -> None:
        self._schedule = schedule
        self._launcher = self._executor
        if self._races and schedule != "benign":
            # What is ordered is so under every schedule: to look once is enough.
            self._unwatched = self._unwatched or Executor(self._kernels)
            self._launcher = self._unwatched
        self._launcher.schedule = schedule

    def launch(self, launch: Launch) -> None:
        self.launches += 1
        try:
            self._launcher.launch(launch)
        except LaunchError as error:
            self.on_incident(Incident("launch", str(error), error.line))
        for damage in self._executor.damaged_guards():
            self.on_incident(Incident("guard", f"{launch.kernel} wrote outside: {damage}"))
        for race in self._executor.take_races():
            kind = "race" if race.within_block else "block-race"
            self.on_incident(Incident(kind, race.sentence, race.line, race.remedy))

    def gemm_ex(
        self,
        transa: Operation,
        transb: Operation,
        m: int,
        n: int,
        k: int,
        alpha: float,
        a: Pointer,
        lda: int,
        b: Pointer,
        ldb: int,
        beta: float,
        c: Pointer,
        ldc: int,
    ) -> int:
        """A column-major matrix is its transpose in row-major: C' = B' A' on such views."""
        fault = gemm_fault(self._holds, transa, transb, m, n, k, a, lda, b, ldb, c, ldc)
        if fault:
            self.on_incident(Incident("gemm", fault))
            return CUBLAS_STATUS_INVALID_VALUE
        if m == 0 or n == 0:
            return CUBLAS_STATUS_SUCCESS
        a_rows, a_columns = (k, m) if transa is Operation.T else (m, k)
        b_rows, b_columns = (n, k) if transb is Operation.T else (k, n)
        c_view = _row_major(c, n, m, ldc)  # (n, m)
        if k == 0:
            c_view.copy_(c_view.float() * beta if beta != 0.0 else torch.zeros(n, m))
            return CUBLAS_STATUS_SUCCESS
        a_view = _row_major(a, a_columns, a_rows, lda)  # (k, m) for N, (m, k) for T
        b_view = _row_major(b, b_columns, b_rows, ldb)  # (n, k) for N, (k, n) for T
        left = b_view.T if transb is Operation.T else b_view  # (n, k)
        right = a_view.T if transa is Operation.T else a_view  # (k, m)
        if alpha == 1.0 and beta == 0.0:
            c_view.copy_(torch.matmul(left, right))
        else:
            # torch rounds a bf16 product before it could be scaled; cuBLAS scales in float32.
            product = torch.matmul(left.float(), right.float()) * alpha
            if beta != 0.0:
                product += beta * c_view.float()
            c_view.copy_(product)
        return CUBLAS_STATUS_SUCCESS

    def synchronize(self) -> None:
        """Everything here has finished when it returns."""


def _row_major(pointer: Pointer, rows: int, columns: int, stride: int) -> torch.Tensor:
    """bf16 memory at `pointer`, (rows, columns), its rows `stride` elements apart."""
    elements = (rows - 1) * stride + columns
    buffer = (ctypes.c_char * (elements * _BF16_BYTES)).from_address(pointer)
    flat = torch.frombuffer(buffer, dtype=torch.bfloat16)
    return flat.as_strided((rows, columns), (stride, 1))
