"""What an engine needs of a device, in the words of the CUDA runtime and cuBLAS.

The port is written once against this interface; `host_device.py` and `cuda_device.py` implement it.
Pointers are integers, so address arithmetic reads as upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol, TypeAlias

import numpy as np

from kernels.lift import Launch

_BF16_BYTES = 2

Pointer: TypeAlias = int
HostOrDevice: TypeAlias = "int | np.ndarray"


class DeviceError(Exception):
    """A device that cannot be used: missing, too small, or one that stopped working."""


class MemcpyKind(Enum):
    """cudaMemcpyKind. The host side is a NumPy array, the device side an integer pointer."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class Operation(IntEnum):
    """cublasOperation_t. A whole number, because it is part of keys: an Enum's hash is slow."""

    N = 0
    T = 1


@dataclass(frozen=True)
class Incident:
    """A call that the device refused or that went wrong, as upstream (which ignores every status)
    would never see it.

    kind: "guard" (a write outside every buffer), "launch", "memcpy" or "gemm"; from a device that
    looks for them "race" and "block-race" (between two blocks). remedy: what to do, where known.
    """

    kind: str
    message: str
    line: int | None = None
    remedy: str | None = None


def raise_incident(incident: Incident) -> None:
    """The default reaction: stop. The harness collects incidents instead and goes on."""
    raise DeviceError(incident.message)


def gemm_fault(
    holds: Callable[[Pointer, int], bool],
    transa: Operation,
    transb: Operation,
    m: int,
    n: int,
    k: int,
    a: Pointer,
    lda: int,
    b: Pointer,
    ldb: int,
    c: Pointer,
    ldc: int,
) -> str | None:
    """Why cuBLAS, or the memory behind the pointers, would not have this GEMM; None: it would.

    holds: whether so many bytes from a pointer lie in one allocation. A column-major matrix of r
    rows and c columns reaches over (c - 1) * ld + r elements; an empty one over none.
    """
    a_rows, a_columns = (k, m) if transa is Operation.T else (m, k)
    b_rows, b_columns = (n, k) if transb is Operation.T else (k, n)
    if lda < max(1, a_rows) or ldb < max(1, b_rows) or ldc < max(1, m) or min(m, n, k) < 0:
        return (
            f"cublasGemmEx rejects m={m} n={n} k={k} lda={lda} ldb={ldb} ldc={ldc}: "
            f"leading dimensions must be at least {a_rows}, {b_rows} and {m}"
        )
    for pointer, rows, columns, stride in (
        (a, a_rows, a_columns, lda),
        (b, b_rows, b_columns, ldb),
        (c, m, n, ldc),
    ):
        empty = m == 0 or n == 0 or rows == 0 or columns == 0
        if not empty and not holds(pointer, ((columns - 1) * stride + rows) * _BF16_BYTES):
            return f"cublasGemmEx: the matrix at {pointer:#x} leaves its buffer"
    return None


class Device(Protocol):
    """malloc, memcpy (three kinds), launch, gemm_ex, synchronize.

    on_incident: called for what upstream would ignore; by default raises DeviceError.
    """

    name: str
    on_incident: Callable[[Incident], None]

    def describe(self) -> list[str]:
        """The lines that the engine prints about its device at start."""

    def malloc(self, size: int, name: str = "") -> Pointer:
        """`size` bytes, poisoned (0xFF) where the device can, never zeroed. `name`: for reports."""

    def free(self, pointer: Pointer) -> None: ...

    def memcpy(self, dst: HostOrDevice, src: HostOrDevice, count: int, kind: MemcpyKind) -> None:
        """Copy `count` bytes, complete on return for the host kinds."""

    def launch(self, launch: Launch) -> None: ...

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
        """cublasGemmEx on column-major bf16 A, B, C with float32 accumulation.

        Returns the cublasStatus_t (0: success), which upstream ignores.
        """

    def synchronize(self) -> None: ...
