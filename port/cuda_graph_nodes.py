"""CUDA graphs by the driver's own words, for `cuda_graph.py`.

Kernels and copies are added node by node, so that their arguments can be set again later. cuBLAS
has no such way in: its calls are captured from a stream that runs nothing, through a second handle,
because capture is not possible on the default stream. That handle is given a workspace of the size
that cuBLAS takes by itself, so that it picks the same algorithms; without one cuBLAS would put an
allocation into the graph at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernels.lift import Launch
from port.cuda_arguments import Arguments
from port.cuda_device import CUBLAS_STATUS_SUCCESS, CudaDevice, GemmArguments
from port.device import DeviceError, Operation, Pointer

MIB = 2**20


def workspace_bytes(major: int) -> int:
    """cuBLAS's own workspace by compute capability (its manual, cublasSetWorkspace)."""
    return {9: 32 * MIB, 10: 32 * MIB, 12: 12 * MIB}.get(major, 4 * MIB)


class DriverGraphs:
    """Makes graphs on one device, and holds what they share: a stream and a cuBLAS handle."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        driver = device.driver
        nonblocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = device.check(driver.cuStreamCreate(nonblocking), "create a stream")
        self.handle = device.new_cublas_handle()
        device.own(device.cublas.destroy, self.handle)
        device.own(driver.cuStreamDestroy, self.stream)
        size = workspace_bytes(device.major)
        workspace = device.malloc(size, "cuBLAS workspace of graphs")
        # in this order: a new stream puts the handle back on its own workspace
        device.cublas.set_stream(self.handle, int(self.stream))
        device.cublas.set_workspace(self.handle, workspace, size)
        self._first_gemm()

    def _first_gemm(self) -> None:
        """A product of poison: what cuBLAS sets up at its first call is not for a capture."""
        side = 16
        x = self.device.malloc(3 * 512, "first GEMM of graphs")
        n = Operation.N
        call = (n, n, side, side, side, 1.0, x, side, x + 512, side, 0.0, x + 1024, side)
        if self.device.gemm_with(self.handle, call) != CUBLAS_STATUS_SUCCESS:
            raise DeviceError("cuBLAS refuses a second handle's first GEMM; drop --graph")
        self.device.synchronize()
        self.device.free(x)

    def new(self, staging_bytes: int) -> tuple[DriverGraph, int]:
        """An empty graph and page-locked host memory for its uploads."""
        graph = DriverGraph(self, staging_bytes)
        return graph, graph.staging


@dataclass(frozen=True, slots=True)
class _KernelNode:
    handle: Any  # CUgraphNode
    params: Any  # CUDA_KERNEL_NODE_PARAMS, which points into `arguments`
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class _CopyNode:
    handle: Any  # CUgraphNode
    params: Any  # CUDA_MEMCPY3D


class DriverGraph:
    """One graph, a chain; see `port.cuda_graph.Nodes`. Raises DeviceError where the driver does."""

    def __init__(self, maker: DriverGraphs, staging_bytes: int) -> None:
        self._maker = maker
        self._device = maker.device
        self._driver = driver = maker.device.driver
        self._check = maker.device.check
        self._stream = driver.CUstream(0)
        self._executable: Any = None
        self._kernel = "no kernel"
        self._last: list[Any] = []  # the node that the next one waits for
        self._graph = self._check(driver.cuGraphCreate(0), "create a graph")
        self.staging = 0
        if staging_bytes:
            made = driver.cuMemHostAlloc(staging_bytes, 0)
            self.staging = int(self._check(made, "lock host memory"))
            self._device.own(driver.cuMemFreeHost, self.staging)
        self._device.own(driver.cuGraphDestroy, self._graph)

    def _added(self, node: Any) -> Any:
        self._last = [node]
        return node

    def add_kernel(self, launch: Launch) -> _KernelNode:
        driver = self._driver
        function = self._device.function(launch.kernel)
        arguments = Arguments(function.layout, launch.arguments)
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = function.handle
        params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
        params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
        params.sharedMemBytes = launch.shared
        params.kernelParams = arguments.address
        made = driver.cuGraphAddKernelNode(self._graph, self._last, len(self._last), params)
        node = self._added(self._check(made, f"add {launch.kernel} to a graph"))
        self._kernel = launch.kernel
        return _KernelNode(node, params, arguments)

    def add_gemms(self, calls: Sequence[GemmArguments]) -> None:
        """A graph within the graph, since capture makes a graph of its own."""
        driver, stream = self._driver, self._maker.stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._check(driver.cuStreamBeginCapture(stream, mode), "begin a capture")
        statuses = []
        try:
            for call in calls:
                statuses.append(self._device.gemm_with(self._maker.handle, call))  # noqa: PERF401
        finally:
            captured = driver.cuStreamEndCapture(stream)
        child = self._check(captured, "capture cuBLAS")
        if any(status != CUBLAS_STATUS_SUCCESS for status in statuses):
            raise DeviceError(f"cuBLAS could not be captured (statuses {statuses}); drop --graph")
        made = driver.cuGraphAddChildGraphNode(self._graph, self._last, len(self._last), child)
        self._added(self._check(made, "add cuBLAS to a graph"))
        self._check(driver.cuGraphDestroy(child), "drop a captured graph")  # it was copied

    def add_copy(self, dst: Pointer, src: Pointer, count: int) -> _CopyNode:
        params = self._copy_params(dst, count)
        params.srcMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.srcDevice = self._driver.CUdeviceptr(src)
        return self._add_copy(params)

    def add_upload(self, dst: Pointer, host_address: int, count: int) -> _CopyNode:
        params = self._copy_params(dst, count)
        params.srcMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_HOST
        params.srcHost = host_address
        return self._add_copy(params)

    def _copy_params(self, dst: Pointer, count: int) -> Any:
        """One row of `count` bytes to `dst`."""
        params = self._driver.CUDA_MEMCPY3D()
        params.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.dstDevice = self._driver.CUdeviceptr(dst)
        params.srcPitch = params.dstPitch = params.WidthInBytes = count
        params.srcHeight = params.dstHeight = params.Height = params.Depth = 1
        return params

    def _add_copy(self, params: Any) -> _CopyNode:
        made = self._driver.cuGraphAddMemcpyNode(
            self._graph, self._last, len(self._last), params, self._device.context
        )
        return _CopyNode(self._added(self._check(made, "add a copy to a graph")), params)

    def finish(self) -> None:
        driver = self._driver
        self._executable = self._check(driver.cuGraphInstantiate(self._graph, 0), "make a graph")
        self._device.own(driver.cuGraphExecDestroy, self._executable)
        self._check(driver.cuGraphUpload(self._executable, self._stream), "upload a graph")

    def set_kernel(self, node: _KernelNode, launch: Launch) -> None:
        node.arguments.fill(launch.arguments)
        (status,) = self._driver.cuGraphExecKernelNodeSetParams(
            self._executable, node.handle, node.params
        )
        if status:
            self._check((status,), f"change {launch.kernel} in a graph")

    def set_copy(self, node: _CopyNode, dst: Pointer, src: Pointer) -> None:
        params = node.params
        params.dstDevice = dst
        params.srcDevice = src
        (status,) = self._driver.cuGraphExecMemcpyNodeSetParams(
            self._executable, node.handle, params, self._device.context
        )
        if status:
            self._check((status,), "change a copy in a graph")

    def start(self) -> None:
        (status,) = self._driver.cuGraphLaunch(self._executable, self._stream)
        if status:
            self._check((status,), "start a graph")
        self._device.last_kernel = self._kernel

    def close(self) -> None:
        """Give the graph and its host memory back; closing twice is fine."""
        driver, give_back = self._driver, self._device.give_back
        if self._executable is not None:
            give_back(driver.cuGraphExecDestroy, self._executable)
        if self._graph is not None:
            give_back(driver.cuGraphDestroy, self._graph)
        if self.staging:
            give_back(driver.cuMemFreeHost, self.staging)
        self._executable = self._graph = None
        self.staging = 0
