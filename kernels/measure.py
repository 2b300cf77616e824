"""What the CPU executor costs on this machine: `python -m kernels.measure` prints it.

Inputs are zeros: the kernels' time does not depend on values.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

from kernels.lift import Launch, lift, lift_text
from kernels.simt import Executor

_SPIN = """
__global__ void spin(int *out, int turns) {
    for (int i = 0; i < turns; i++) __syncthreads();
    out[threadIdx.x] = turns;
}
void run(int *out, int turns) { spin<<<1, 1024>>>(out, turns); }
"""


def _least(action: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of `times` runs."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def switch_nanoseconds(turns: int = 300) -> float:
    """Nanoseconds from one CUDA thread to the next at a barrier, 1,024 threads in the block."""
    file = lift_text(_SPIN, Path("spin.cu"))
    executor = Executor(file, threads=1)
    out = executor.allocate(4096)

    def run(count: int) -> float:
        launch = file.call("run", out, count)
        assert isinstance(launch, Launch)
        return _least(lambda: executor.launch(launch), 5)

    return (run(turns + 1) - run(1)) / (turns * 1024) * 1e9


def launch_milliseconds(threads: int | None = None, races: bool = False) -> dict[str, float]:
    """Milliseconds of one launch by name: 17 tokens; attention at lengths 20 and 500.

    races: with the race detector looking on.
    """
    file = lift()
    executor = Executor(file, threads=threads, races=races)

    def zeros(size: int) -> int:
        address = executor.allocate(size)
        ctypes.memset(address, 0, size)
        return address

    x, y, wide, also_wide = zeros(17 * 4096), zeros(17 * 4096), zeros(17 * 16384), zeros(17 * 16384)
    scores, cache, table = zeros(32 * 17 * 17 * 2), zeros(40 * 32768), zeros(2 * 16 * 128 * 4)
    tokens, lengths, tables = zeros(17 * 4), zeros(8), zeros(2048 * 64 * 4)
    ctypes.c_int.from_address(lengths).value = 20
    ctypes.c_int.from_address(lengths + 4).value = 500
    globals_ = {"cos": tables, "sin": tables}
    calls = {
        "embeddingGather": (tokens, x, y, 17),
        "rmsNorm": (x, y, wide, 17),
        "rope": (x, 17, 2048),
        "causalMask": (scores, 17),
        "softmax": (scores, 17),
        "residualAdd": (x, y, 17),
        "silu": (wide, also_wide, 17),
        "ropeDecode": (x, 16, 2048),
        "pagedAttention": (0, 2, x, cache, table, lengths, tokens, y),
    }
    spent: dict[str, float] = {}
    for name, values in calls.items():
        launch = file.call(name, *values, globals=globals_)
        assert isinstance(launch, Launch)
        times = 3 if name == "pagedAttention" else 10
        spent[name] = _least(lambda launch=launch: executor.launch(launch), times) * 1e3  # type: ignore[misc]
    return spent


def main() -> None:
    start = time.perf_counter()
    Executor(lift())
    print(f"{'compile, or load from the cache':32} {time.perf_counter() - start:8.2f} s")
    print(f"{'fiber switch':32} {switch_nanoseconds():8.1f} ns")
    watched = launch_milliseconds(races=True)
    print(f"{'':46}looking for races")
    for name, value in launch_milliseconds().items():
        print(f"{name:32} {value:8.2f} ms {watched[name]:16.2f} ms")


if __name__ == "__main__":
    main()
