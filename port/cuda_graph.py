"""The same calls in the same order, started as CUDA graphs instead of one by one.

    device = GraphDevice(CudaDevice(kernels))        # `--graph`; the engine does not notice

A decode step asks the device for some 360 things, and much of its time goes into asking.
GraphDevice puts the calls off, LONGEST at most and no further than until somebody needs a result (a
device-to-host copy or `synchronize`). A sequence of calls that was seen before becomes a CUDA
graph: a chain of the very same kernels, copies and cuBLAS calls. From then on it is started by a
single call, after the few arguments that changed (positions, page addresses) were written into it.
Anything else runs call by call.

While a graph is being asked for again, each call is only compared with the one that it holds: what
followed the last graph, the last time, is expected to follow it again. The first call that is
another one ends that, and the calls up to there are looked up like new ones.

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
# Calls put off at most: few at first, so that the GPU gets to work; then half as many again each
# time, since the GPU takes longer over its calls than the engine over asking for so many more.
FIRST = 8
LONGEST = 128
NEVER = -(10**9)  # times seen, of a sequence that had an incident: it never becomes a graph
SEEN_BEFORE = 2  # times that a sequence runs call by call; a prefill's seldom comes three times
MOST_GRAPHS = 64
MOST_SEEN = 256  # sequences remembered
MOST_UPLOADED = 64 * 1024  # bytes: a larger host-to-device copy is made at once

Node: TypeAlias = Any


class GemmCall(NamedTuple):
    """One cublasGemmEx; equal to the plain tuple of its arguments."""

    transa: Operation
    transb: Operation
    m: int
    n: int
    k: int
    alpha: float
    a: Pointer
    lda: int
    b: Pointer
    ldb: int
    beta: float
    c: Pointer
    ldc: int


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


def key_of(call: Call) -> Hashable:
    """What must be the same for two calls to be one node of a graph."""
    if isinstance(call, Launch):
        return call.kernel, call.grid, call.block, call.shared
    if isinstance(call, CopyCall):
        return call.size
    return (call.dst, len(call.data)) if isinstance(call, UploadCall) else call


class CallGraph:
    """A sequence of calls as a graph.

    held: the calls with the arguments that it has at present. following: the graph that came after
    it the last time. started: the last turn in which it was; used: when, among all graphs.
    """

    def __init__(self, maker: GraphMaker, calls: Sequence[Call]) -> None:
        uploaded = sum(len(call.data) for call in calls if isinstance(call, UploadCall))
        self.nodes, staging = maker.new(uploaded)
        self.held = list(calls)
        self.following: CallGraph | None = None
        self.started: int | None = None
        self.used = 0
        self._places: list[Node] = []  # a node, or for an upload its address in host memory
        gemms: list[GemmArguments] = []
        for call in calls:
            if isinstance(call, GemmCall):
                gemms.append(call)
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

    def changes_to(self, calls: Sequence[Call]) -> list[tuple[int, Call]]:
        """Index and call, where `calls` has other arguments or bytes than the graph."""
        return [
            (index, call)
            for index, (call, old) in enumerate(zip(calls, self.held, strict=True))
            if call is not old and call != old
        ]

    def start(self, changes: Sequence[tuple[int, Call]], wait: Callable[[CallGraph], None]) -> None:
        """Run with these changes. `wait`: until it no longer reads its host memory."""
        nodes, held, places = self.nodes, self.held, self._places
        for index, call in changes:
            if isinstance(call, Launch):
                nodes.set_kernel(places[index], call)
            elif isinstance(call, CopyCall):
                nodes.set_copy(places[index], call.dst, call.src)
            elif isinstance(call, UploadCall):
                wait(self)
                ctypes.memmove(places[index], call.data, len(call.data))
            held[index] = call
        nodes.start()


_NOTHING: tuple[None] = (None,)  # expected: equal to no call


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
        self._graphs: dict[Hashable, CallGraph] = {}
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # oldest first
        self._turn = 0  # goes up whenever everything that was started is known to have ended
        # put off, when no graph is followed
        self._calls: list[Call] = []
        self._keys: list[Hashable] = []
        self._limit = FIRST
        # the graph that is followed: what it holds, up to where it was asked for, and what differs
        self._graph: CallGraph | None = None
        self._expected: Sequence[Call | None] = _NOTHING
        self._at = 0
        self._changes: list[tuple[int, Call]] = []
        # what was started before, since somebody needed a result; and the first of all, last time
        self._before: CallGraph | None = None
        self._at_first = True
        self._first: CallGraph | None = None

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
        self._follow(None)
        self._before = self._first = None
        for graph in self._graphs.values():
            graph.nodes.close()
        self._graphs.clear()

    # --- calls that are put off -----------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        old = self._expected[self._at]
        if old is launch:
            self._as_expected()
        elif isinstance(old, Launch) and key_of(launch) == key_of(old):
            self._changed(launch, launch.arguments == old.arguments)
        else:
            self._put_off(launch)

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
        if call == self._expected[self._at]:
            self._as_expected()
        else:
            self._put_off(GemmCall(*call))
        return CUBLAS_STATUS_SUCCESS

    def memcpy(self, dst: HostOrDevice, src: HostOrDevice, count: int, kind: MemcpyKind) -> None:
        if isinstance(dst, int) and count > 0 and self.device.holds(dst, count):
            if kind is MemcpyKind.DEVICE_TO_DEVICE:
                if isinstance(src, int) and self.device.holds(src, count):
                    self._copy(CopyCall(dst, src, count))
                    return
            elif kind is MemcpyKind.HOST_TO_DEVICE and count <= MOST_UPLOADED:
                self._upload(UploadCall(dst, host_array(src, count).tobytes()[:count]))
                return
        self.flush()
        self.device.memcpy(dst, src, count, kind)
        if kind is MemcpyKind.DEVICE_TO_HOST:
            self._turn += 1

    def _copy(self, call: CopyCall) -> None:
        old = self._expected[self._at]
        if isinstance(old, CopyCall) and old.size == call.size:
            self._changed(call, call == old)
        else:
            self._put_off(call)

    def _upload(self, call: UploadCall) -> None:
        old = self._expected[self._at]
        if isinstance(old, UploadCall) and key_of(old) == key_of(call):
            self._changed(call, call.data == old.data)
        else:
            self._put_off(call)

    def _as_expected(self) -> None:
        self._at += 1
        if self._at == len(self._expected):
            self._replay()

    def _changed(self, call: Call, equal: bool) -> None:
        """The expected call, but for its arguments; `equal`: these are the same too."""
        if not equal:
            self._changes.append((self._at, call))
        self._as_expected()

    def _put_off(self, call: Call) -> None:
        """A call that was not expected."""
        if self._graph is not None:
            self._leave()
        self._calls.append(call)
        self._keys.append(key_of(call))
        if len(self._calls) >= self._limit:
            self._end_sequence()

    # --- following a graph ------------------------------------------------------------------------

    def _follow(self, graph: CallGraph | None) -> None:
        self._graph = graph
        self._expected = _NOTHING if graph is None else graph.held
        self._at = 0
        self._changes = []

    def _leave(self) -> None:
        """Put off what was asked for of the graph that is followed, and follow it no more."""
        calls = list(self._graph.held[: self._at]) if self._graph is not None else []
        for index, call in self._changes:
            calls[index] = call
        self._follow(None)
        self._calls += calls
        self._keys += map(key_of, calls)

    def _replay(self) -> None:
        assert self._graph is not None
        self._start(self._graph, self._changes)

    def _start(self, graph: CallGraph, changes: Sequence[tuple[int, Call]]) -> None:
        graph.start(changes, self._wait)
        graph.started = self._turn
        self.replays += 1
        graph.used = self.replays
        if self._before is not None:
            self._before.following = graph
        elif self._at_first:
            self._first = graph
        self._before, self._at_first = graph, False
        self._limit = min(self._limit * 3 // 2, LONGEST)
        self._follow(graph.following)

    def _wait(self, graph: CallGraph) -> None:
        if graph.started == self._turn:
            self.device.synchronize()
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
        if self._graph is not None:
            self._leave()
        if self._calls:
            self._end_sequence()
        self._before, self._at_first = None, True
        self._limit = FIRST
        self._follow(self._first)

    def _end_sequence(self) -> None:
        """Start all that was put off: as a graph, if it came often enough."""
        calls, keys = self._calls, tuple(self._keys)
        self._calls, self._keys = [], []
        graph = self._graphs.get(keys)
        if graph is None:
            seen = self._seen.get(keys, 0)
            if len(calls) < SHORTEST or seen < SEEN_BEFORE:
                self._before, self._at_first = None, False
                self._limit = min(self._limit * 3 // 2, LONGEST)
                fit = self._run(calls)
                self._remember(keys, seen + 1 if fit else NEVER)
                return
            graph = self._make(keys, calls)
        self._start(graph, graph.changes_to(calls))

    def _make(self, keys: Hashable, calls: Sequence[Call]) -> CallGraph:
        if len(self._graphs) >= MOST_GRAPHS:
            self._drop_oldest()
        graph = self._graphs[keys] = CallGraph(self._maker, calls)
        return graph

    def _drop_oldest(self) -> None:
        keys = min(self._graphs, key=lambda keys: self._graphs[keys].used)
        oldest = self._graphs.pop(keys)
        self._wait(oldest)
        oldest.nodes.close()
        self._first = None if self._first is oldest else self._first
        self._before = None if self._before is oldest else self._before
        for graph in self._graphs.values():
            if graph.following is oldest:
                graph.following = None

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
                    device.gemm_ex(*call)
                elif isinstance(call, CopyCall):
                    device.memcpy(call.dst, call.src, call.size, MemcpyKind.DEVICE_TO_DEVICE)
                else:
                    data = np.frombuffer(call.data, np.uint8)
                    device.memcpy(call.dst, data, len(call.data), MemcpyKind.HOST_TO_DEVICE)
        finally:
            device.on_incident = reaction
        return not incidents
