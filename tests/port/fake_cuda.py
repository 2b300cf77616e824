"""A CUDA driver and a cuBLAS without a GPU: they keep books, and fail when they are told to.

Types and enumerations are cuda.bindings' own, so that what is put into them is checked as there.
Memory is addresses only: nothing is read or written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from kernels.lift import lift
from port import cuda_device
from port.cuda_device import CudaDevice

CONTEXT = 0xC0
TOTAL = 139 * 2**30
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "L2_CACHE_SIZE": 60 * 2**20,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49152,
    "MAX_THREADS_PER_BLOCK": 1024,
}


class FakeDriver:
    """`log`: calls in order, by name and what matters. `fail[name] = status`: it fails so."""

    def __init__(self, gpus: int = 1, free: int = TOTAL) -> None:
        from cuda.bindings import driver

        self._real = driver
        self.gpus = gpus
        self.free = free
        self.fail: dict[str, int] = {}
        self.log: list[tuple[Any, ...]] = []
        self._next = 0x7000_0000_0000
        self._sizes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self._real, name)
        values = VALUES.get(name, lambda _driver, *_: ())

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name in self.fail:
                status = self._real.CUresult(self.fail[name])
                return (status, *(None for _ in range(RESULTS.get(name, 0))))
            self.log.append((name, *arguments))
            return (self._real.CUresult.CUDA_SUCCESS, *values(self, *arguments))

        self.__dict__[name] = call  # the same object each time, as the real one
        return call

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        if size > self.free:
            return self._real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.free -= size
        pointer, self._next = self._next, self._next + (size + 255) // 256 * 256
        self._sizes[pointer] = size
        return self._real.CUresult.CUDA_SUCCESS, self._real.CUdeviceptr(pointer)

    def cuMemFree(self, pointer: int) -> tuple[Any, ...]:
        self.free += self._sizes.pop(pointer)
        return (self._real.CUresult.CUDA_SUCCESS,)

    def names(self) -> list[str]:
        return [name for name, *_ in self.log]


# how many values a call gives back besides its status, where it fails
RESULTS = {
    "cuDeviceGetCount": 1,
    "cuDevicePrimaryCtxRetain": 1,
    "cuModuleLoadData": 1,
    "cuGraphInstantiate": 1,
}


def _attribute(driver: FakeDriver, key: Any, _device: Any) -> tuple[int]:
    return (ATTRIBUTES[key.name.removeprefix("CU_DEVICE_ATTRIBUTE_")],)


VALUES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "cuDeviceGetCount": lambda driver: (driver.gpus,),
    "cuDeviceGet": lambda driver, ordinal: (ordinal,),
    "cuDeviceGetName": lambda driver, length, _: (b"Fake GPU".ljust(length, b"\0"),),
    "cuDeviceTotalMem": lambda driver, _: (TOTAL,),
    "cuDeviceGetAttribute": _attribute,
    "cuDevicePrimaryCtxRetain": lambda driver, _: (driver.CUcontext(CONTEXT),),
    "cuModuleLoadData": lambda driver, _: (0x30D,),
    "cuModuleGetFunction": lambda driver, _, name: (driver.CUfunction(hash(name) & 0xFFFFFF),),
    "cuMemGetInfo": lambda driver: (driver.free, TOTAL),
    "cuGetErrorString": lambda driver, status: (b"what happened",),
    "cuStreamCreate": lambda driver, _: (driver.CUstream(0x57),),
    "cuStreamEndCapture": lambda driver, _: (driver.CUgraph(0xC41D),),
    "cuGraphCreate": lambda driver, _: (driver.CUgraph(0x6),),
    "cuGraphAddKernelNode": lambda driver, *_: (driver.CUgraphNode(len(driver.log)),),
    "cuGraphAddMemcpyNode": lambda driver, *_: (driver.CUgraphNode(len(driver.log)),),
    "cuGraphAddChildGraphNode": lambda driver, *_: (driver.CUgraphNode(len(driver.log)),),
    "cuGraphInstantiate": lambda driver, *_: (driver.CUgraphExec(0xE),),
    "cuMemHostAlloc": lambda driver, size, _: (_host_memory(driver, size),),
}


def _host_memory(driver: FakeDriver, size: int) -> int:
    memory = ctypes.create_string_buffer(size)
    driver.__dict__.setdefault("_kept", []).append(memory)
    return ctypes.addressof(memory)


class FakeCublasError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"STATUS_{status}")
        self.status = status


class FakeCublas:
    """`calls`: the arguments of each gemm_ex. `status`: what it answers next."""

    cuBLASError = FakeCublasError

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.set_up: list[tuple[Any, ...]] = []
        self.destroyed: list[int] = []
        self.status = 0
        self.refusal: Exception | None = None
        self._handles = 0

    def create(self) -> int:
        if self.refusal:
            raise self.refusal
        self._handles += 1
        return self._handles

    def destroy(self, handle: int) -> None:
        self.destroyed.append(handle)

    def set_stream(self, *what: Any) -> None:
        self.set_up.append(("stream", *what))

    def set_workspace(self, *what: Any) -> None:
        self.set_up.append(("workspace", *what))

    def gemm_ex(self, *arguments: Any) -> None:
        if self.status:
            raise FakeCublasError(self.status)
        self.calls.append(arguments)


def open_fake(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, cublas: FakeCublas
) -> CudaDevice:
    """A CudaDevice on them, with kernels that nobody compiled."""
    monkeypatch.setattr(cuda_device, "_open_driver", lambda: driver)
    monkeypatch.setattr(cuda_device, "_open_cublas", lambda: cublas)
    monkeypatch.setattr(cuda_device, "compile_kernels", lambda kernels, architecture: b"\x7fELF")
    return CudaDevice(lift())
