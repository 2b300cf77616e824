"""The same calls in the same order, started as CUDA graphs instead of one by one.

    device = GraphDevice(CudaDevice(kernels))        # `--graph`; the engine does not notice

A decode step asks the device for some 360 things, and much of its time goes into asking.
GraphDevice puts the calls off, LONGEST at most and no further than until somebody needs a result (a
device-to-host copy or `synchronize`). A sequence of calls that was seen before becomes a CUDA
graph: a chain of the very same kernels, copies and cuBLAS calls. From then on it is started by a
single call, after the few arguments that changed (positions, page addresses) were written into it.
Anything else runs call by call.

What makes two sequences the same: kernels and their shapes, all arguments of the GEMMs, sizes of
the copies, where uploads go. What may differ: a kernel's arguments, a copy's addresses, the bytes
that come from the host.
This file needs no GPU; `cuda_graph_nodes.py` talks to the driver.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kernels.lift import Launch
from port.cuda_device import CUBLAS_STATUS_SUCCESS, CudaDevice, GemmArguments, host_array
from port.device import HostOrDevice, Incident, MemcpyKind, Operation, Pointer

SHORTEST = 8  # calls: a shorter sequence is not worth a graph
LONGEST = 128  # calls: then the GPU gets to work while the engine goes on asking
NEVER = -(10**9)  # times seen, of a sequence that had an incident: it never becomes a graph
SEEN_BEFORE = 2  # times that a sequence runs call by call; a prefill's seldom comes three times
MOST_GRAPHS = 64
MOST_SEEN = 256  # sequences remembered
MOST_UPLOADED = 64 * 1024  # bytes: a larger host-to-device copy is made at once

Node: TypeAlias = Any


class GemmCall(NamedTuple):
    """One cublasGemmEx."""

    arguments: GemmArguments


class CopyCall(NamedTuple):
    """One device-to-device copy of `size` bytes."""

    dst: Pointer
    src: Pointer
    size: int


class UploadCall(NamedTuple):
    """One host-to-device copy; `data` is what the host held when it was asked for."""

    dst: Pointer
    data: bytes


Call: TypeAlias = Launch | GemmCall | CopyCall | UploadCall


class Nodes(Protocol):
    """One CUDA graph: each node that is added runs after the one added before it."""

    def add_kernel(self, launch: Launch) -> Node: ...

    def add_gemms(self, calls: Sequence[GemmArguments]) -> None: ...

    def add_copy(self, dst: Pointer, src: Pointer, count: int) -> Node: ...

    def add_upload(self, dst: Pointer, host_address: int, count: int) -> Node:
        """A copy from page-locked host memory, read when the graph runs."""

    def finish(self) -> None:
        """No more nodes: make it ready to start."""

    def set_kernel(self, node: Node, launch: Launch) -> None: ...

    def set_copy(self, node: Node, dst: Pointer, src: Pointer) -> None: ...

    def start(self) -> None:
        """Put the whole graph on the default stream, and return."""

    def close(self) -> None: ...


class GraphMaker(Protocol):
    """Where graphs come from."""

    def new(self, staging_bytes: int) -> tuple[Nodes, int]:
        """An empty graph, and the address of so many bytes of page-locked host memory (or 0)."""


class CallGraph:
    """A sequence of calls as a graph, and the arguments that it holds at present."""

    def __init__(self, maker: GraphMaker, calls: Sequence[Call]) -> None:
        uploaded = sum(len(call.data) for call in calls if isinstance(call, UploadCall))
        self.nodes, staging = maker.new(uploaded)
        self.started: int | None = None  # the last turn in which it was
        self._held = list(calls)
        self._places: list[Node] = []  # a node, or for an upload its address in host memory
        gemms: list[GemmArguments] = []
        for call in calls:
            if isinstance(call, GemmCall):
                gemms.append(call.arguments)
                self._places.append(None)
                continue
            self._add_gemms(gemms)
            if isinstance(call, Launch):
                self._places.append(self.nodes.add_kernel(call))
            elif isinstance(call, CopyCall):
                self._places.append(self.nodes.add_copy(call.dst, call.src, call.size))
            else:
                ctypes.memmove(staging, call.data, len(call.data))
                self.nodes.add_upload(call.dst, staging, len(call.data))
                self._places.append(staging)
                staging += len(call.data)
        self._add_gemms(gemms)
        self.nodes.finish()

    def _add_gemms(self, gemms: list[GemmArguments]) -> None:
        """Those that follow one another go in together."""
        if gemms:
            self.nodes.add_gemms(tuple(gemms))
            gemms.clear()

    def start(self, calls: Sequence[Call], wait: Callable[[CallGraph], None]) -> None:
        """Run with the arguments of `calls`. `wait`: until it no longer reads its host memory."""
        held = self._held
        for index, call in enumerate(calls):
            old = held[index]
            if call is old:
                continue
            if isinstance(call, Launch):
                if isinstance(old, Launch) and call.arguments != old.arguments:
                    self.nodes.set_kernel(self._places[index], call)
            elif call == old or isinstance(call, GemmCall):
                continue
            elif isinstance(call, CopyCall):
                self.nodes.set_copy(self._places[index], call.dst, call.src)
            else:
                wait(self)
                ctypes.memmove(self._places[index], call.data, len(call.data))
            held[index] = call
        self.nodes.start()


class GraphDevice:
    """A CudaDevice whose repeated sequences of calls run as CUDA graphs.

    Incidents are reported when the calls are made good, not when they are asked for, and gemm_ex
    answers 0 at once. `replays` and `eager` count the sequences that ran as graphs and call by
    call. Raises DeviceError where a graph cannot be made.
    """

    def __init__(self, device: CudaDevice, maker: GraphMaker | None = None) -> None:
        if maker is None:
            from port.cuda_graph_nodes import DriverGraphs

            maker = DriverGraphs(device)
        self.device = device
        self.name = device.name
        self.replays = 0
        self.eager = 0
        self._maker = maker
        self._calls: list[Call] = []
        self._keys: list[Hashable] = []
        self._graphs: OrderedDict[Hashable, CallGraph] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # oldest first
        self._turn = 0  # goes up whenever everything that was started is known to have ended

    @property
    def on_incident(self) -> Callable[[Incident], None]:
        return self.device.on_incident

    @on_incident.setter
    def on_incident(self, reaction: Callable[[Incident], None]) -> None:
        self.device.on_incident = reaction

    def describe(self) -> list[str]:
        return self.device.describe()

    def close(self) -> None:
        """Drop what was put off, and close the device."""
        self._calls.clear()
        self._keys.clear()
        self._drop_graphs()
        self.device.close()

    def _drop_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.nodes.close()
        self._graphs.clear()

    # --- calls that are put off -----------------------------------------------------------------

    def _put_off(self, call: Call, key: Hashable) -> None:
        self._calls.append(call)
        self._keys.append(key)
        if len(self._calls) == LONGEST:
            self.flush()

    def launch(self, launch: Launch) -> None:
        self._put_off(launch, (launch.kernel, launch.grid, launch.block, launch.shared))

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
        call = (transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
        self._put_off(GemmCall(call), call)
        return CUBLAS_STATUS_SUCCESS

    def memcpy(self, dst: HostOrDevice, src: HostOrDevice, count: int, kind: MemcpyKind) -> None:
        holds = self.device.holds
        if isinstance(dst, int) and count > 0 and holds(dst, count):
            if kind is MemcpyKind.HOST_TO_DEVICE and count <= MOST_UPLOADED:
                data = host_array(src, count).tobytes()[:count]
                self._put_off(UploadCall(dst, data), (dst, count))
                return
            if kind is MemcpyKind.DEVICE_TO_DEVICE and isinstance(src, int) and holds(src, count):
                self._put_off(CopyCall(dst, src, count), count)
                return
        self.flush()
        self.device.memcpy(dst, src, count, kind)
        if kind is MemcpyKind.DEVICE_TO_HOST:
            self._turn += 1

    # --- calls that need what was put off ---------------------------------------------------------

    def malloc(self, size: int, name: str = "") -> Pointer:
        self.flush()
        return self.device.malloc(size, name)

    def free(self, pointer: Pointer) -> None:
        self.synchronize()
        self._drop_graphs()  # they may use it
        self.device.free(pointer)

    def synchronize(self) -> None:
        self.flush()
        self.device.synchronize()
        self._turn += 1

    def flush(self) -> None:
        """Start what was put off, without waiting for it."""
        calls, keys = self._calls, tuple(self._keys)
        self._calls, self._keys = [], []
        if not calls:
            return
        graph = self._graphs.get(keys)
        if graph is None:
            seen = self._seen.get(keys, 0)
            if len(calls) < SHORTEST or seen < SEEN_BEFORE:
                fit = self._run(calls)
                self._remember(keys, seen + 1 if fit else NEVER)
                return
            graph = self._make(keys, calls)
        self._graphs.move_to_end(keys)
        graph.start(calls, self._wait)
        graph.started = self._turn
        self.replays += 1

    def _wait(self, graph: CallGraph) -> None:
        if graph.started == self._turn:
            self.device.synchronize()
            self._turn += 1

    def _make(self, keys: Hashable, calls: Sequence[Call]) -> CallGraph:
        if len(self._graphs) >= MOST_GRAPHS:
            _, oldest = self._graphs.popitem(last=False)
            self._wait(oldest)
            oldest.nodes.close()
        graph = self._graphs[keys] = CallGraph(self._maker, calls)
        return graph

    def _remember(self, keys: Hashable, times: int) -> None:
        self._seen[keys] = times
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def _run(self, calls: Sequence[Call]) -> bool:
        """Call by call. True: without an incident."""
        self.eager += 1
        device, reaction = self.device, self.device.on_incident
        incidents: list[Incident] = []

        def note(incident: Incident) -> None:
            incidents.append(incident)
            reaction(incident)

        device.on_incident = note
        try:
            for call in calls:
                if isinstance(call, Launch):
                    device.launch(call)
                elif isinstance(call, GemmCall):
                    device.gemm_ex(*call.arguments)
                elif isinstance(call, CopyCall):
                    device.memcpy(call.dst, call.src, call.size, MemcpyKind.DEVICE_TO_DEVICE)
                else:
                    data = np.frombuffer(call.data, np.uint8)
                    device.memcpy(call.dst, data, len(call.data), MemcpyKind.HOST_TO_DEVICE)
        finally:
            device.on_incident = reaction
        return not incidents
