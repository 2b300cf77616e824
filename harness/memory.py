"""The engine's buffers seen from outside: read, write, poison, and what an op changed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kernels.simt import first_difference
from port import main as engine_main
from port.device import MemcpyKind
from port.main import Engine

POISON = 0xFF  # every bf16 of such bytes is a NaN that no CUDA kernel stores (0xFFFF, not 0x7FFF)


@dataclass(frozen=True)
class Region:
    """`size` bytes from `offset` of one of the engine's buffers."""

    buffer: str
    offset: int
    size: int


@dataclass(frozen=True)
class Change:
    """Bytes that changed outside what an op may write: the first one's place, and how many."""

    buffer: str
    offset: int
    bytes: int


_INT, _BF16 = engine_main.INT, engine_main.BF16
_ROWS, _PROMPT, _BATCH = (
    engine_main.MAX_BUFFER_SIZE,
    engine_main.MAX_PROMPT_LEN,
    engine_main.BATCH_SIZE,
)
# main.cpp:574-581, 607-693: rows, elements a row, bytes an element.
_BUFFERS = {
    "gpu_active_slots": (_BATCH, 1, _INT),
    "gpu_seq_lens": (_BATCH, 1, _INT),
    "gpu_last_tokens": (_BATCH, 1, _INT),
    "gpu_input_tokens": (_PROMPT, 1, _INT),
    "gpu_block_table": (_BATCH, engine_main.N_LAYERS * engine_main.MAX_BLOCKS_PER_SEQ, _INT),
    "input_embeddings": (_PROMPT, engine_main.EMBEDDING_LENGTH, _BF16),
    "hidden_state": (_ROWS, engine_main.EMBEDDING_LENGTH, _BF16),
    "rms_norms": (_ROWS, engine_main.EMBEDDING_LENGTH, _BF16),
    "buf_2048_1": (_ROWS, engine_main.EMBEDDING_LENGTH, _BF16),
    "buf_2048_2": (_ROWS, engine_main.EMBEDDING_LENGTH, _BF16),
    "k_proj_temp_buf": (_PROMPT, engine_main.KV_DIM, _BF16),
    "v_proj_temp_buf": (_PROMPT, engine_main.KV_DIM, _BF16),
    "prefill_attn_scores": (_PROMPT, engine_main.NUM_Q_HEADS * _PROMPT, _BF16),
    "gate": (_ROWS, engine_main.HIDDEN_DIM, _BF16),
    "up": (_ROWS, engine_main.HIDDEN_DIM, _BF16),
    "embed_proj": (_ROWS, engine_main.VOCAB_SIZE, _BF16),
    "k_proj_batched_buffer": (_BATCH, engine_main.KV_DIM, _BF16),
    "v_proj_batched_buffer": (_BATCH, engine_main.KV_DIM, _BF16),
    "kv_cache": (engine_main.NUM_BLOCKS, engine_main.BLOCK_BYTES // _BF16, _BF16),
}


_CACHE = "kv_cache"


def _row_bytes(buffer: str, rows: int) -> int:
    """Bytes that a run of `rows` rows uses of a buffer for each row."""
    if buffer == "prefill_attn_scores":
        return engine_main.NUM_Q_HEADS * rows * _BF16  # dense: (32, rows, rows)
    return _BUFFERS[buffer][1] * _BUFFERS[buffer][2]


def row_width(buffer: str) -> int:
    """Elements of one row of a buffer that holds a row a token or a slot."""
    return _BUFFERS[buffer][1]


def buffer_sizes() -> dict[str, int]:
    """The engine's device buffers and their bytes."""
    return {name: rows * width * size for name, (rows, width, size) in _BUFFERS.items()}


class Memory:
    """Reads and writes an engine's buffers, and keeps a shadow of what they should hold.

    The shadow is what the harness last wrote or accepted; whatever differs from it after an op,
    outside the op's own output, was written by mistake. Shadowed is twice what a run can use of
    each buffer; the rest must still be poison at the run's end (`far_is_poison`), since comparing
    all of 200 MB after each op would take most of the time. Of the 2 GiB cache only the last
    blocks are looked at: blocks are handed out from its end.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sizes = buffer_sizes()
        self._shadows: dict[str, np.ndarray] = {}
        self._starts = dict.fromkeys(self._sizes, 0)
        self._used = dict.fromkeys(self._sizes, 0)  # may have been written since it was poisoned
        self._on_host = engine.device.name == "host"

    def begin(self, rows: int | None, cache_blocks: int) -> None:
        """Poison and shadow what a run of `rows` rows can use (None: everything), and so many
        blocks from the cache's end."""
        for name, size in self._sizes.items():
            if name == _CACHE:
                self._starts[name] = size - cache_blocks * engine_main.BLOCK_BYTES
                near = size - self._starts[name]
            else:
                near = size if rows is None else min(size, 2 * rows * _row_bytes(name, rows))
            self._shadows[name] = np.empty(near, np.uint8)
            self.poison([Region(name, self._starts[name], max(near, self._used[name]))])
            self._used[name] = 0 if name == _CACHE else near

    def far_is_poison(self) -> bool:
        """Whether nothing was written beyond what is shadowed. (The cache's front is not read.)"""
        for name, shadow in self._shadows.items():
            rest = self._sizes[name] - shadow.size
            if name == _CACHE or rest == 0:
                continue
            far = self._contents(name, shadow.size, rest)
            first = far.ctypes.data
            if far[0] != POISON or first_difference(first, first + 1, rest - 1) is not None:
                self._used[name] = self._sizes[name]
                return False
        return True

    # --- plain access ---

    def size(self, buffer: str) -> int:
        return self._sizes[buffer]

    def read(self, region: Region) -> np.ndarray:
        """A copy of the region's bytes, uint8."""
        out = np.empty(region.size, np.uint8)
        pointer = self._pointer(region.buffer) + region.offset
        self._engine.device.memcpy(out, pointer, region.size, MemcpyKind.DEVICE_TO_HOST)
        return out

    def write(self, region: Region, data: np.ndarray) -> None:
        """Write `data` (any dtype, contiguous, region.size bytes) and note it in the shadow."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if flat.size != region.size:
            raise ValueError(f"data must be {region.size} bytes (got {flat.size})")
        pointer = self._pointer(region.buffer) + region.offset
        self._engine.device.memcpy(pointer, flat, region.size, MemcpyKind.HOST_TO_DEVICE)
        self._note(region, flat)

    def poison(self, regions: Iterable[Region]) -> None:
        for region in regions:
            self.write(region, np.full(region.size, POISON, np.uint8))

    def poison_cache(self) -> None:
        """Poison what is shadowed of the cache."""
        start = self._starts[_CACHE]
        self.poison([Region(_CACHE, start, self._sizes[_CACHE] - start)])

    # --- the shadow ---

    def watch(self, buffers: Sequence[str]) -> None:
        """Take the present contents of these buffers for what they should hold."""
        for name in buffers:
            shadow = self._shadows[name]
            shadow[:] = self.read(Region(name, self._starts[name], shadow.size))

    def expected(self, regions: Iterable[Region]) -> np.ndarray:
        """What the shadows hold of the regions, uint8; poison where nothing is shadowed."""
        parts = []
        for region in regions:
            part = np.full(region.size, POISON, np.uint8)
            begin = region.offset - self._starts[region.buffer]
            if begin >= 0:
                held = self._shadows[region.buffer][begin : begin + region.size]
                part[: held.size] = held
            parts.append(part)
        return np.concatenate(parts)

    def accept(self, regions: Iterable[Region]) -> None:
        """Take the regions' present contents for right."""
        for region in regions:
            if region.buffer in self._shadows:
                self._note(region, self.read(region))

    def changes(self) -> list[Change]:
        """What differs from the shadows, one entry a buffer; puts the shadow's contents back."""
        found = []
        for name, shadow in self._shadows.items():
            start = self._starts[name]
            current = self._contents(name, start, shadow.size)
            if first_difference(current.ctypes.data, shadow.ctypes.data, shadow.size) is None:
                continue
            differing = np.flatnonzero(current != shadow)
            found.append(Change(name, start + int(differing[0]), int(differing.size)))
            self.write(Region(name, start, shadow.size), shadow)
        return found

    def _contents(self, name: str, start: int, size: int) -> np.ndarray:
        if not self._on_host:
            return self.read(Region(name, start, size))
        address = self._pointer(name) + start
        return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))

    def _note(self, region: Region, flat: np.ndarray) -> None:
        shadow = self._shadows.get(region.buffer)
        begin = region.offset - self._starts[region.buffer]
        if shadow is not None and begin >= 0:
            part = shadow[begin : begin + region.size]
            part[:] = flat[: part.size]

    def _pointer(self, buffer: str) -> int:
        pointer: int = getattr(self._engine, buffer)
        return pointer
