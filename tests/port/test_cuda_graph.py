"""Deferred calls run in their own order with their own values, as graphs or one by one.

A GPU stands in here that writes down what it would do. What it wrote must not depend on whether the
calls went through graphs.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kernels.lift import Launch
from port import cuda_graph
from port.cuda_device import GemmArguments
from port.cuda_graph import GraphDevice
from port.device import DeviceError, Incident, MemcpyKind, Operation, raise_incident

BASE, SIZE = 4096, 10**6  # the memory that the stand-in has
H2D, D2H, D2D = MemcpyKind.HOST_TO_DEVICE, MemcpyKind.DEVICE_TO_HOST, MemcpyKind.DEVICE_TO_DEVICE


class Gpu:
    """Stands in for a CudaDevice: `done` is what ran, in order."""

    name = "cuda"

    def __init__(self) -> None:
        self.on_incident: Callable[[Incident], None] = raise_incident
        self.done: list[Any] = []
        self.waits = 0
        self.closed = False

    def describe(self) -> list[str]:
        return ["a stand-in"]

    def holds(self, pointer: int, count: int) -> bool:
        return pointer >= BASE and pointer + count <= BASE + SIZE

    def malloc(self, size: int, name: str = "") -> int:
        self.done.append(("malloc", size))
        return BASE

    def free(self, pointer: int) -> None:
        self.done.append(("free", pointer))

    def memcpy(self, dst: Any, src: Any, count: int, kind: MemcpyKind) -> None:
        if kind is H2D:
            self.done.append(("upload", dst, src.tobytes()[:count]))
        elif kind is D2D:
            if not (self.holds(dst, count) and self.holds(src, count)):
                self.on_incident(Incident("memcpy", "outside"))
                return
            self.done.append(("copy", dst, src, count))
        else:
            self.done.append(("download", src, count))

    def launch(self, launch: Launch) -> None:
        if launch.block[0] > 1024:
            self.on_incident(Incident("launch", "too many threads"))
            return
        self.done.append(launch)

    def gemm_ex(self, *call: Any) -> int:
        self.done.append(("gemm", call))
        return 0

    def synchronize(self) -> None:
        self.waits += 1

    def close(self) -> None:
        self.closed = True


class Graphs:
    """Stands in for the driver's graphs: a graph does its nodes' work on `gpu` when it starts."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.made: list[Chain] = []

    def new(self, staging_bytes: int) -> tuple[Chain, int]:
        chain = Chain(self.gpu, staging_bytes)
        self.made.append(chain)
        return chain, chain.staging


class Chain:
    """One graph. A node is a list, so that it can be changed."""

    def __init__(self, gpu: Gpu, staging_bytes: int) -> None:
        self.gpu = gpu
        self.nodes: list[list[Any]] = []
        self.finished = self.closed = False
        self.changes = self.starts = 0
        self._memory = ctypes.create_string_buffer(max(staging_bytes, 1))
        self.staging = ctypes.addressof(self._memory) if staging_bytes else 0

    def _add(self, *node: Any) -> list[Any]:
        assert not self.finished
        self.nodes.append(list(node))
        return self.nodes[-1]

    def add_kernel(self, launch: Launch) -> Any:
        return self._add("kernel", launch)

    def add_gemms(self, calls: Sequence[GemmArguments]) -> None:
        assert calls
        self._add("gemms", list(calls))

    def add_copy(self, dst: int, src: int, count: int) -> Any:
        return self._add("copy", dst, src, count)

    def add_upload(self, dst: int, host_address: int, count: int) -> Any:
        return self._add("upload", dst, host_address, count)

    def finish(self) -> None:
        self.finished = True

    def set_kernel(self, node: Any, launch: Launch) -> None:
        old = node[1]
        assert (old.kernel, old.grid, old.block) == (launch.kernel, launch.grid, launch.block)
        self.changes += 1
        node[1] = launch

    def set_copy(self, node: Any, dst: int, src: int) -> None:
        self.changes += 1
        node[1:3] = dst, src

    def start(self) -> None:
        assert self.finished
        assert not self.closed
        self.starts += 1
        for kind, *what in self.nodes:
            if kind == "kernel":
                self.gpu.done.append(what[0])
            elif kind == "gemms":
                self.gpu.done += [("gemm", call) for call in what[0]]
            elif kind == "copy":
                self.gpu.done.append(("copy", *what))
            else:
                dst, address, count = what
                self.gpu.done.append(("upload", dst, ctypes.string_at(address, count)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def graphs(gpu: Gpu) -> Graphs:
    return Graphs(gpu)


@pytest.fixture
def device(gpu: Gpu, graphs: Graphs) -> GraphDevice:
    return GraphDevice(gpu, graphs)  # type: ignore[arg-type]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, graphs: Graphs) -> GraphDevice:
    """One whose first sequences are long already."""
    monkeypatch.setattr(cuda_graph, "FIRST", cuda_graph.LONGEST)
    return GraphDevice(gpu, graphs)  # type: ignore[arg-type]


def rope(position: int, row: int = 0) -> Launch:
    return Launch("ropeKernelDecode", (1, 1, 1), (1024, 1, 1), (BASE + row, position, 2048))


def step(device: Any, position: int, slots: int = 2, layers: int = 16) -> None:
    """What a decode step asks for, in little."""
    tokens = np.arange(slots, dtype=np.int32) + position
    table = np.full(64, position // 16, np.int32)
    device.memcpy(BASE, tokens, tokens.nbytes, H2D)
    for layer in range(layers):
        for _ in range(2):
            device.gemm_ex(
                Operation.T, Operation.N, 8, slots, 8, 1.0, BASE, 8, BASE, 8, 0.0, BASE + layer, 8
            )
        for row in range(slots):
            device.launch(rope(position, row))
            device.memcpy(BASE + 1024 * position + row, BASE + row, 1024, D2D)
        device.memcpy(BASE + 512, table, table.nbytes, H2D)
        table[:] = -1  # the value counts at the time of the call
        table[:] = position // 16
    device.memcpy(np.empty(4, np.uint16), BASE, 8, D2H)


def eager(work: Callable[[Any], None]) -> list[Any]:
    plain = Gpu()
    work(plain)
    return plain.done


@pytest.mark.parametrize("layers", [1, 2, 16, 40])
def test_steps_run_in_order_and_with_their_own_values(
    gpu: Gpu, device: GraphDevice, layers: int
) -> None:
    def work(way: Any) -> None:
        for position in range(30, 50):
            step(way, position, 2 if position < 40 else 1, layers)

    work(device)
    assert gpu.done == eager(work)
    assert device.replays > 0


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_calls_keeps_its_order_and_values(
    gpu: Gpu, graphs: Graphs, device: GraphDevice, seed: int
) -> None:
    """Random sequences, repeated with other values and interrupted at random."""
    rng = random.Random(seed)
    shapes = [[rng.choice("kgcu") for _ in range(rng.randint(1, 300))] for _ in range(3)]
    order = [rng.randrange(3) for _ in range(15)]
    values = [rng.randrange(0, 50) for _ in range(10_000)]

    def work(way: Any) -> None:
        value = iter(values)
        for which in order:
            for kind in shapes[which]:
                v = next(value)
                if kind == "k":
                    way.launch(rope(v))
                elif kind == "g":
                    way.gemm_ex(
                        Operation.T, Operation.N, 8, 1, 8, 1.0, BASE, 8, BASE, 8, 0.0, BASE, 8
                    )
                elif kind == "c":
                    way.memcpy(BASE + v, BASE + 2 * v, 100, D2D)
                else:
                    way.memcpy(BASE, np.array([v], np.int32), 4, H2D)
            way.memcpy(np.empty(4, np.uint16), BASE, 8, D2H)

    work(device)
    assert gpu.done == eager(work)
    assert device.replays == sum(chain.starts for chain in graphs.made)


def test_a_sequence_becomes_a_graph_when_it_comes_a_third_time(
    whole: GraphDevice, graphs: Graphs
) -> None:
    made = []
    for position in range(5):
        step(whole, position, layers=2)
        made.append(len(graphs.made))
    assert made == [0, 0, 1, 1, 1]
    assert graphs.made[0].starts == 3


def test_only_what_changed_is_set_again(whole: GraphDevice, graphs: Graphs) -> None:
    for position in (0, 0, 0, 0):
        step(whole, position, layers=4)
    (chain,) = graphs.made
    assert chain.changes == 0
    step(whole, 1, layers=4)
    assert chain.changes == 4 * 2 * 2  # a rope and a copy for each slot and layer


def test_gemms_that_follow_one_another_share_a_node(whole: GraphDevice, graphs: Graphs) -> None:
    for _ in range(3):
        step(whole, 0, layers=2)
    gemms = [node for node in graphs.made[0].nodes if node[0] == "gemms"]
    assert [len(node[1]) for node in gemms] == [2, 2]


def test_nothing_runs_before_a_result_is_needed(gpu: Gpu, device: GraphDevice) -> None:
    device.launch(rope(1))
    assert gpu.done == []
    device.synchronize()
    assert gpu.done == [rope(1)]
    assert gpu.waits == 1


def test_the_first_calls_start_early_and_later_ones_in_ever_longer_sequences(
    gpu: Gpu, device: GraphDevice
) -> None:
    started = []
    for _ in range(600):
        device.launch(rope(1))
        if not started or len(gpu.done) != started[-1]:
            started.append(len(gpu.done))
    assert started[:5] == [0, 8, 8 + 12, 8 + 12 + 18, 8 + 12 + 18 + 27]
    assert started[-1] - started[-2] == cuda_graph.LONGEST
    device.synchronize()
    assert len(gpu.done) == 600
    before = len(gpu.done)
    for _ in range(cuda_graph.FIRST):
        device.launch(rope(1))
    assert len(gpu.done) == before + cuda_graph.FIRST


def test_a_step_asked_for_again_starts_its_last_graph_with_its_last_call(
    gpu: Gpu, device: GraphDevice
) -> None:
    def ask() -> None:
        for i in range(30):
            device.launch(rope(i % 5))

    for _ in range(4):
        ask()
        device.synchronize()
    ran = len(gpu.done)
    ask()
    assert len(gpu.done) == ran + 30  # 8, 12 and, since no more came the last time, 10


def test_a_call_other_than_the_expected_one_is_found_at_any_place(
    gpu: Gpu, device: GraphDevice
) -> None:
    odd = Launch("siluKernel", (2, 1, 1), (1024, 1, 1), (BASE, BASE))

    def work(way: Any) -> None:
        for strange in (None, None, None, None, *range(40), None):
            for i in range(40):
                way.launch(odd if i == strange else rope(i))
                way.memcpy(BASE + i, BASE + 2 * i, 100, D2D)
                if strange is not None and i == (7 * strange) % 40:
                    way.memcpy(BASE, np.array([i], np.int32), 4, H2D)
            if strange is None or strange % 3:
                way.synchronize()

    work(device)
    assert gpu.done == eager(work)
    assert device.replays > 50


def test_a_kernel_of_another_shape_or_a_copy_of_another_size_is_another_call(
    gpu: Gpu, device: GraphDevice
) -> None:
    launches = [
        Launch("k", (1, 1, 1), (32, 1, 1), (BASE,)),
        Launch("k", (2, 1, 1), (32, 1, 1), (BASE,)),
        Launch("k", (1, 1, 1), (64, 1, 1), (BASE,)),
        Launch("k", (1, 1, 1), (32, 1, 1), (BASE,), 16),
        Launch("j", (1, 1, 1), (32, 1, 1), (BASE,)),
    ]

    def work(way: Any) -> None:
        for turn in range(20):
            for i in range(16):
                way.launch(launches[0 if turn < 5 or i != 3 else turn % 5])
                way.memcpy(BASE, BASE + 512, 8 if turn < 10 or i != 5 else turn, D2D)
                size = 4 if turn < 10 or i != 5 else 8
                way.memcpy(BASE + 4 * (turn > 15), np.arange(2, dtype=np.int32), size, H2D)
            way.synchronize()

    work(device)
    assert gpu.done == eager(work)


def test_a_table_whose_bytes_change_between_uploads_arrives_as_it_was(
    gpu: Gpu, device: GraphDevice
) -> None:
    def work(way: Any) -> None:
        table = np.zeros(64, np.int32)
        for turn in range(30):
            for i in range(12):
                table[i] = turn // 4
                way.memcpy(BASE, table, table.nbytes, H2D)
                way.launch(rope(turn))
            way.memcpy(np.empty(4, np.uint16), BASE, 8, D2H)

    work(device)
    assert gpu.done == eager(work)
    assert device.replays > 50


def test_a_graph_that_may_be_running_is_waited_for_before_its_uploads_change(
    gpu: Gpu, device: GraphDevice
) -> None:
    def turn(value: int) -> None:
        device.memcpy(BASE, np.array([value], np.int32), 4, H2D)
        for _ in range(cuda_graph.SHORTEST):
            device.launch(rope(0))
        device.flush()

    for _ in range(3):
        turn(1)
    turn(1)
    assert gpu.waits == 0
    turn(2)
    assert gpu.waits == 1
    device.memcpy(np.empty(4, np.uint16), BASE, 8, D2H)  # waits by itself
    turn(3)
    assert gpu.waits == 1


def test_a_sequence_with_an_incident_runs_call_by_call_for_ever(
    gpu: Gpu, whole: GraphDevice, graphs: Graphs
) -> None:
    incidents: list[Incident] = []
    whole.on_incident = incidents.append
    for _ in range(5):
        whole.launch(Launch("k", (1, 1, 1), (2048, 1, 1), ()))
        for _ in range(20):
            whole.launch(rope(1))
        whole.synchronize()
    assert len(incidents) == 5
    assert graphs.made == []
    assert gpu.on_incident == incidents.append


def test_an_incident_stops_the_program_by_default(gpu: Gpu, device: GraphDevice) -> None:
    device.launch(Launch("k", (1, 1, 1), (2048, 1, 1), ()))
    with pytest.raises(DeviceError, match="too many threads"):
        device.synchronize()
    assert gpu.on_incident is raise_incident
    device.synchronize()  # the failed calls are gone


def test_a_copy_outside_all_memory_is_reported_at_once(device: GraphDevice) -> None:
    kinds: list[str] = []
    device.on_incident = lambda incident: kinds.append(incident.kind)
    device.memcpy(BASE + SIZE - 8, BASE, 16, D2D)
    assert kinds == ["memcpy"]


def test_large_uploads_are_made_at_once_and_in_order(gpu: Gpu, device: GraphDevice) -> None:
    large = np.zeros(cuda_graph.MOST_UPLOADED + 1, np.uint8)
    device.launch(rope(1))
    device.memcpy(BASE, large, large.nbytes, H2D)
    assert gpu.done == [rope(1), ("upload", BASE, large.tobytes())]


def test_freeing_memory_drops_the_graphs_that_may_use_it(
    whole: GraphDevice, graphs: Graphs
) -> None:
    for position in range(4):
        step(whole, position, layers=2)
    whole.free(BASE)
    assert [chain.closed for chain in graphs.made] == [True]
    step(whole, 5, layers=2)
    assert len(graphs.made) == 2


def test_the_least_used_graphs_go_first(
    whole: GraphDevice, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "MOST_GRAPHS", 2)
    for slots in (2, 3, 2, 3, 2, 3, 2, 4, 4, 4):
        step(whole, 1, slots, layers=2)
    assert [chain.closed for chain in graphs.made] == [False, True, False]
    step(whole, 2, 3, layers=2)  # what was closed is not started again (Chain.start asserts it)
    step(whole, 2, 2, layers=2)
    assert [chain.closed for chain in graphs.made] == [True, True, True, False, False]


def test_closing_drops_graphs_and_what_was_put_off(
    gpu: Gpu, device: GraphDevice, graphs: Graphs
) -> None:
    for position in range(4):
        step(device, position, layers=2)
    ran = len(gpu.done)
    device.launch(rope(1))
    device.close()
    assert len(gpu.done) == ran
    assert gpu.closed
    assert all(chain.closed for chain in graphs.made)


def test_bad_host_arrays_are_refused_when_they_are_asked_for(device: GraphDevice) -> None:
    with pytest.raises(TypeError, match="array of >= 8 bytes"):
        device.memcpy(BASE, np.zeros(1, np.int32), 8, H2D)
    with pytest.raises(TypeError, match="contiguous"):
        device.memcpy(BASE, np.zeros((4, 4), np.int32)[:, ::2], 8, H2D)
