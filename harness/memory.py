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


def row_width(buffer: str) -> int:
    """Elements of one row of a buffer that holds a row a token or a slot."""
    return _BUFFERS[buffer][1]


def buffer_sizes() -> dict[str, int]:
    """The engine's device buffers and their bytes."""
    return {name: rows * width * size for name, (rows, width, size) in _BUFFERS.items()}


class Memory:
    """Reads and writes an engine's buffers, and keeps a shadow of what they should hold.

    The shadow of a buffer is what the harness last wrote or accepted there; whatever differs from
    it after an op, outside the op's own output, was written by mistake. Of the 2 GiB cache only the
    last `cache_blocks` blocks are shadowed: blocks are handed out from its end.
    """

    cache_blocks = 64

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sizes = buffer_sizes()
        self._shadows: dict[str, np.ndarray] = {}
        self._starts = dict.fromkeys(self._sizes, 0)
        self._on_host = engine.device.name == "host"

    # --- plain access ---

    def size(self, buffer: str) -> int:
        return self._sizes[buffer]

    def read(self, region: Region) -> np.ndarray:
        """A copy of the region's bytes, uint8."""
        out = np.empty(region.size, np.uint8)
        pointer = self._pointer(region.buffer) + region.offset
        self._engine.device.memcpy(out, pointer, region.size, MemcpyKind.DEVICE_TO_HOST)
        return out

    def read_bits(self, regions: Iterable[Region], shape: tuple[int, ...]) -> np.ndarray:
        """The regions' bf16 bits one after the other, uint16 of `shape`."""
        data = [self.read(region) for region in regions]
        return np.concatenate(data).view(np.uint16).reshape(shape)

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

    def poison_all(self, buffers: Iterable[str]) -> None:
        """Poison what is watched of the buffers."""
        for name in buffers:
            self.poison([Region(name, self._starts[name], self._sizes[name] - self._starts[name])])

    # --- the shadow ---

    def watch(self, buffers: Sequence[str]) -> None:
        """Take the present contents of these buffers for what they should hold."""
        for name in buffers:
            if name == "kv_cache":
                watched = self.cache_blocks * engine_main.BLOCK_BYTES
                self._starts[name] = self._sizes[name] - watched
            start = self._starts[name]
            self._shadows[name] = self.read(Region(name, start, self._sizes[name] - start))

    def expected(self, regions: Iterable[Region]) -> np.ndarray:
        """What the shadows hold of the regions, uint8; poison where nothing is watched."""
        parts = []
        for region in regions:
            begin = region.offset - self._starts[region.buffer]
            shadow = self._shadows.get(region.buffer)
            if shadow is None or begin < 0:
                parts.append(np.full(region.size, POISON, np.uint8))
            else:
                parts.append(shadow[begin : begin + region.size].copy())
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
        if shadow is not None:
            begin = region.offset - self._starts[region.buffer]
            if begin >= 0:
                shadow[begin : begin + region.size] = flat

    def _pointer(self, buffer: str) -> int:
        pointer: int = getattr(self._engine, buffer)
        return pointer
