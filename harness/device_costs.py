"""What a GPU and the calls to it cost, measured on an engine's own device and buffers.

Each function leaves garbage in the engine's buffers, and the engine ready for `reset`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.lift import KernelsFile
    from port.device import Device
    from port.main import Engine

COPIED_BYTES = 2**29  # far above any L2 cache
BATCHES, BATCH = 20, 100
SLOTS = 2


def call_microseconds(engine: Engine, kernels: KernelsFile) -> dict[str, float]:
    """Microseconds that a call of each kind takes to return, median over batches of 100.

    Each batch is waited for, so that the GPU's queue never fills.
    """
    from kernels.lift import Launch
    from port.device import MemcpyKind, Operation

    device, weights = engine.device, engine.weights.layers[0]
    launch = kernels.call("residualAdd", engine.hidden_state, engine.o_proj, SLOTS)
    assert isinstance(launch, Launch)
    table = engine.block_table

    def gemm() -> None:
        device.gemm_ex(
            Operation.T, Operation.N, 512, SLOTS, 2048, 1.0, weights.k_proj, 2048,
            engine.rms_norms, 2048, 0.0, engine.k_proj_batched_buffer, 512,
        )  # fmt: skip

    def copy() -> None:
        source = engine.k_proj_batched_buffer
        device.memcpy(engine.kv_cache, source, 1024, MemcpyKind.DEVICE_TO_DEVICE)

    def upload() -> None:
        device.memcpy(engine.gpu_block_table, table, table.nbytes, MemcpyKind.HOST_TO_DEVICE)

    kinds: dict[str, Callable[[], object]] = {
        "launch": lambda: device.launch(launch),
        "gemm_ex": gemm,
        "copy_1_kib": copy,
        "upload_16_kib": upload,
    }
    return {
        kind: median(_batch(device, call) for _ in range(BATCHES)) for kind, call in kinds.items()
    }


def _batch(device: Device, call: Callable[[], object]) -> float:
    """Microseconds a call."""
    device.synchronize()
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    return (time.perf_counter() - start) / BATCH * 1e6


def copy_bytes_per_second(device: Device, turns: int = 10) -> float:
    """Bytes that device-to-device copies read and write a second, median: both sides count."""
    from port.device import MemcpyKind

    first, second = device.malloc(COPIED_BYTES, "copy source"), device.malloc(COPIED_BYTES, "copy")
    seconds = []
    for _ in range(turns + 1):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            device.memcpy(second, first, COPIED_BYTES, MemcpyKind.DEVICE_TO_DEVICE)
        device.synchronize()
        seconds.append((time.perf_counter() - start) / 4)
    device.free(first)
    device.free(second)
    return 2 * COPIED_BYTES / median(seconds[1:])


@contextmanager
def without_table_uploads(engine: Engine) -> Iterator[None]:
    """Decode steps upload the block table only where it changed, which changes no token."""
    upload = engine.upload_block_table

    def where_it_changed() -> None:
        if any(length % 16 == 0 for length in engine.current_prompt_len):
            upload()  # this step takes a new page

    engine.upload_block_table = where_it_changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.upload_block_table  # the class's own shows again
