"""Where a decode step spends its time: two slots, 16 layers, positions under 48.

    python tests/gpu/decode_profile.py

Host time is what the calls of each kind take to return, as the engine makes them one by one. GPU
time is that of a CUDA graph of only that kind's calls: no waiting for the host in it. The block
table's share is the difference to steps that leave its uploads out, which changes no token: these
are only left out where the table has not changed.
"""

from __future__ import annotations

import io
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from gpu_bench import make_engine, move_engine, repaired_kernels

from harness.device_costs import call_microseconds, without_table_uploads
from harness.model_file import model_file
from kernels.lift import KernelsFile, Launch
from port.cuda_device import CudaDevice
from port.cuda_graph import Call, CallGraph, CopyCall, GemmCall, GraphDevice, UploadCall
from port.cuda_graph_nodes import DriverGraphs
from port.device import Device, HostOrDevice, Incident, MemcpyKind, Operation, Pointer
from port.main import CHAT_PROMPTS, Engine, argmax, decode_step, prefill
from port.observer import Observer
from reference.checkpoint import open_checkpoint

UPSTREAM_MS = "3.1-3.2"  # an H200, the upstream program itself, positions under 50
STEPS = 24  # of the 31 that prompts of 17 and 14 tokens have before position 48
TABLE_BYTES = 16 * 1024


class Meter:
    """Passes calls on to a CudaDevice; counts and times them by kind, and keeps them if told to."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.name = device.name
        self.on_incident: Callable[[Incident], None] = device.on_incident
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.kept: list[tuple[str, Call]] | None = None

    def clear(self) -> None:
        self.seconds.clear()
        self.counts.clear()

    def _took(self, kind: str, start: float) -> None:
        self.seconds[kind] += time.perf_counter() - start
        self.counts[kind] += 1

    def describe(self) -> list[str]:
        return self.device.describe()

    def malloc(self, size: int, name: str = "") -> Pointer:
        return self.device.malloc(size, name)

    def free(self, pointer: Pointer) -> None:
        self.device.free(pointer)

    def memcpy(self, dst: HostOrDevice, src: HostOrDevice, count: int, kind: MemcpyKind) -> None:
        if kind is MemcpyKind.DEVICE_TO_HOST:
            start = time.perf_counter()
            self.device.synchronize()
            self._took("wait for the GPU", start)
            what = "logits to the host"
        elif kind is MemcpyKind.DEVICE_TO_DEVICE:
            what = "K and V copies"
        else:
            what = "block table upload" if count == TABLE_BYTES else "other uploads"
        if self.kept is not None and isinstance(dst, int):
            call = (
                UploadCall(dst, src.tobytes()[:count])
                if isinstance(src, np.ndarray)
                else CopyCall(dst, src, count)
            )
            self.kept.append((what, call))
        start = time.perf_counter()
        self.device.memcpy(dst, src, count, kind)
        self._took(what, start)

    def launch(self, launch: Launch) -> None:
        what = "attention" if launch.kernel.startswith("pagedAttention") else "other kernels"
        if self.kept is not None:
            self.kept.append((what, launch))
        start = time.perf_counter()
        self.device.launch(launch)
        self._took(what, start)

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
        if self.kept is not None:
            self.kept.append(("GEMM", GemmCall(*call)))
        start = time.perf_counter()
        status = self.device.gemm_ex(*call)
        self._took("GEMM", start)
        return status

    def synchronize(self) -> None:
        self.device.synchronize()


def _two_slots(engine: Engine) -> None:
    """Two prompts in, ready for the first step; the observer does nothing that costs time."""
    engine.reset(CHAT_PROMPTS[:2])
    engine.observer = Observer()
    engine.out = io.StringIO()
    for slot in range(2):
        prefill(engine, slot)


def _steps(engine: Engine) -> float:
    """Milliseconds a step, median, from the prompts' ends; the first steps are not counted."""
    _two_slots(engine)
    return _measured_steps(engine)


def _measured_steps(engine: Engine) -> float:
    times = []
    for step in range(STEPS + 4):
        start = time.perf_counter()
        decode_step(engine)
        if step >= 4:
            times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def _argmax_us(row: np.ndarray) -> float:
    times = []
    for _ in range(50):
        start = time.perf_counter()
        argmax(row)
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def _graph_ms(device: CudaDevice, maker: DriverGraphs, calls: Iterable[Call]) -> float:
    """Milliseconds on the GPU of a graph of `calls`, median of 30."""
    driver, check = device.driver, device.check
    graph = CallGraph(maker, list(calls))
    begin, end = (check(driver.cuEventCreate(0), "create an event") for _ in range(2))
    times = []
    for turn in range(35):
        check(driver.cuEventRecord(begin, driver.CUstream(0)), "record an event")
        graph.nodes.start()
        check(driver.cuEventRecord(end, driver.CUstream(0)), "record an event")
        device.synchronize()
        if turn >= 5:
            times.append(check(driver.cuEventElapsedTime(begin, end), "read a time"))
    graph.nodes.close()
    for event in (begin, end):
        check(driver.cuEventDestroy(event), "destroy an event")
    return median(times)


def profile(engine: Engine, device: CudaDevice, kernels: KernelsFile) -> dict[str, str]:
    """Figures by name. The engine must be on `device`, and is left there with garbage in it."""
    figures: dict[str, str] = {}

    def through(way: Device, work: Callable[[], Any]) -> Any:
        move_engine(engine, way, kernels)
        try:
            return work()
        finally:
            way.synchronize()
            move_engine(engine, device, kernels)

    cold = through(device, lambda: _steps(engine))
    eager = through(device, lambda: _steps(engine))
    graph = through(GraphDevice(device), lambda: _steps(engine))
    figures["decode step, call by call"] = f"{eager:.2f} ms (the first time: {cold:.2f})"
    figures["decode step, graphs"] = f"{graph:.2f} ms"
    figures["decode step, upstream on an H200"] = f"{UPSTREAM_MS} ms"

    def without_table() -> float:
        _two_slots(engine)
        with without_table_uploads(engine):
            return _measured_steps(engine)

    no_table = through(device, without_table)
    figures["decode step without table uploads"] = (
        f"{no_table:.2f} ms (the 16 uploads: {100 * (1 - no_table / eager):.0f} %)"
    )

    meter = Meter(device)

    def metered() -> float:
        _two_slots(engine)
        for _ in range(4):
            decode_step(engine)
        meter.clear()
        start = time.perf_counter()
        for _ in range(STEPS - 1):
            decode_step(engine)
        return (time.perf_counter() - start) * 1e3 / (STEPS - 1)

    whole = through(meter, metered)
    for kind, seconds in meter.seconds.items():
        ms, count = seconds * 1e3 / (STEPS - 1), meter.counts[kind] // (STEPS - 1)
        figures[f"host, {kind}"] = f"{ms:.3f} ms a step ({count} calls)"
    rest = whole - sum(meter.seconds.values()) * 1e3 / (STEPS - 1)
    figures["host, the engine's own Python"] = f"{rest:.3f} ms a step"

    for kind, microseconds in through(device, lambda: call_microseconds(engine, kernels)).items():
        figures[f"host, one {kind}"] = f"{microseconds:.1f} us"
    nan = np.full(engine.embed_proj_cpu.shape[1], 0x7FFF, np.uint16)
    figures["host, argmax of a row"] = (
        f"{_argmax_us(engine.embed_proj_cpu[0]):.0f} us (of NaN: {_argmax_us(nan):.0f})"
    )

    _two_slots(engine)
    one_step = meter.kept = []
    through(meter, lambda: decode_step(engine))
    meter.kept = None
    maker = DriverGraphs(device)
    total = _graph_ms(device, maker, (call for _, call in one_step))
    figures["GPU, all calls of a step"] = f"{total:.3f} ms"
    for kind in dict.fromkeys(kind for kind, _ in one_step):
        ms = _graph_ms(device, maker, (call for what, call in one_step if what == kind))
        figures[f"GPU, {kind}"] = f"{ms:.3f} ms ({100 * ms / total:.0f} %)"
    return figures


def main() -> None:
    kernels = repaired_kernels("softmax-nan")
    with CudaDevice(kernels) as device:
        print(*device.describe(), sep="\n")
        engine = make_engine(device, kernels, model_file(open_checkpoint("synthetic")))
        figures = profile(engine, device, kernels)
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
