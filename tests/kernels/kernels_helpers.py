"""What the kernels' tests share: golden data, the recipe for inputs, device memory as arrays."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernels.lift import Launch, lift_text
from kernels.simt import Executor

GOLDEN = Path(__file__).parents[1] / "golden"


def golden() -> Mapping[str, np.ndarray]:
    return np.load(GOLDEN / "kernels.npz")


def digests() -> dict[str, Any]:
    return json.loads((GOLDEN / "digests.json").read_text())


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits, to nearest, ties to even (no NaN among them)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to float32."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def recipe(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> np.ndarray:
    """bf16 bits of tensor `name`, seed 0: engine.md §7."""
    count = int(np.prod(shape))
    generator = np.random.Philox(key=[0, zlib.crc32(name.encode())], counter=[0, 0, 0, 0])
    words = generator.random_raw(-(-count // 4)).view("<u2")[:count].astype(np.float32)
    scale = np.float32(std * np.sqrt(3.0) / 32768)
    values = (words - np.float32(32767.5)) * scale + np.float32(mean)
    return to_bf16(values).reshape(shape)


def rope_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inv_freq (32,), cos (2048, 64), sin (2048, 64)) float32, by the C library's functions."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    for name, count in (("powf", 2), ("cosf", 1), ("sinf", 1)):
        getattr(libm, name).argtypes = (ctypes.c_float,) * count
        getattr(libm, name).restype = ctypes.c_float
    f32 = np.float32
    frequencies = np.empty(32, f32)
    for i in range(32):
        plain = f32(1) / f32(libm.powf(500000.0, f32(2 * i) / f32(64)))
        wavelength = f32(2 * np.pi / float(plain))
        if wavelength > 8192:
            plain = plain / f32(32)
        elif wavelength >= 2048:
            smooth = (f32(8192) / wavelength - f32(1)) / (f32(4) - f32(1))
            plain = (f32(1) - smooth) * plain / f32(32) + smooth * plain
        frequencies[i] = plain
    angles = np.arange(2048, dtype=f32)[:, None] * frequencies[None, :]  # (2048, 32)
    flat = angles.ravel().tolist()
    cos = np.array([libm.cosf(a) for a in flat], f32).reshape(2048, 32)
    sin = np.array([libm.sinf(a) for a in flat], f32).reshape(2048, 32)
    return frequencies, np.repeat(cos, 2, axis=1), np.repeat(sin, 2, axis=1)


class Bench:
    """An executor with NumPy arrays going in and out."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.file = executor.file

    def put(self, values: np.ndarray, name: str = "") -> int:
        values = np.ascontiguousarray(values)
        address = self.executor.allocate(values.nbytes, name)
        ctypes.memmove(address, values.ctypes.data, values.nbytes)
        return address

    def new(self, shape: tuple[int, ...], dtype: Any = np.uint16, name: str = "") -> int:
        return self.executor.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize, name)

    def get(self, address: int, shape: tuple[int, ...], dtype: Any = np.uint16) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(address, count), dtype).reshape(shape)

    def call(self, name: str, *values: int | float, **options: Any) -> None:
        launch = self.file.call(name, *values, **options)
        assert isinstance(launch, Launch)
        self.executor.launch(launch)

    def run(
        self, kernel: str, grid: int, block: int, *arguments: int | float, shared: int = 0
    ) -> None:
        self.executor.launch(Launch(kernel, (grid, 1, 1), (block, 1, 1), arguments, shared))


def bench_of(text: str, schedule: str = "benign", threads: int | None = None) -> Bench:
    """A bench for a small kernels file given as text."""
    return Bench(Executor(lift_text(text, Path("user.cu")), schedule, threads))


def paged_attention_inputs(
    lengths: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, kv_cache, block_table, seq_lens, active_slots of digests.json's pagedAttention entries."""
    table = np.full((2, 16, 128), -1, np.int32)
    given = 0
    for slot, length in zip((1, 0), lengths, strict=True):
        for block in range(-(-length // 16)):
            table[slot, 7, block] = (37 * given + 11) % 256
            given += 1
    return (
        recipe("golden/attention/q", (2, 2048), 1.0),
        recipe("golden/attention/kv_cache", (256, 2, 16, 512), 1.0),
        table,
        np.array(lengths, np.int32),
        np.array([1, 0], np.int32),
    )
