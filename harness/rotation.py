"""What a RoPE kernel does, measured from what it makes of chosen rows: its pairs and its angles.

bf16 has 8 bits, an angle needs more. So a first row (1, 0) gives an angle to 8 bits, and a second
row, chosen so that turning it by that angle leaves almost nothing in its first element, gives the
rest: what is left is small, and bf16 stores a small number as precisely as a large one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from port.device import Device, MemcpyKind
from port.host_calls import HostCalls
from port.main import BF16, EMBEDDING_LENGTH, HEAD_DIM
from reference.rounding import bf16_bits, from_bits

Turn = Callable[[np.ndarray], np.ndarray]
PAIRS = HEAD_DIM // 2
_HEADS = EMBEDDING_LENGTH // HEAD_DIM


@dataclass(frozen=True)
class Rotation:
    """pairs: of elements of a head, by frequency index. angles: float64 (32,), in (-pi, pi].
    precision: how far each may be off, float64 (32,)."""

    pairs: tuple[tuple[int, int], ...]
    angles: np.ndarray
    precision: np.ndarray


def prefill_turn(device: Device, calls: HostCalls, position: int) -> Turn:
    """Prefill's kernel on one row (2048,) float64 at `position`, which is its row there."""

    def turn(row: np.ndarray) -> np.ndarray:
        rows = np.zeros((position + 1, EMBEDDING_LENGTH))
        rows[-1] = row
        return _run(device, rows, lambda x: calls.rope(x, position + 1, EMBEDDING_LENGTH))[-1]

    return turn


def decode_turn(device: Device, calls: HostCalls, position: int) -> Turn:
    """Decode's kernel on one row (2048,) float64 at `position`."""

    def turn(row: np.ndarray) -> np.ndarray:
        return _run(device, row, lambda x: calls.rope_decode(x, position, EMBEDDING_LENGTH))

    return turn


def _run(device: Device, values: np.ndarray, call: Callable[[int], None]) -> np.ndarray:
    """`call` on a copy of `values` (as bf16) on the device; what it left there, float64."""
    import torch

    bits = bf16_bits(torch.from_numpy(values))
    x = device.malloc(values.size * BF16, "row")
    try:
        device.memcpy(x, bits, bits.nbytes, MemcpyKind.HOST_TO_DEVICE)
        call(x)
        device.memcpy(bits, x, bits.nbytes, MemcpyKind.DEVICE_TO_HOST)
    finally:
        device.free(x)
    return from_bits(bits).numpy()


def measure(turn: Turn) -> Rotation:
    """Pairs and angles of a kernel. ValueError if it does not turn pairs of a head's elements."""
    pairs = _pairs(turn)
    first, second = (np.array(side) for side in zip(*pairs, strict=True))
    row = np.zeros(EMBEDDING_LENGTH)
    row[first] = 1.0
    turned = turn(row)
    c, s = turned[first], turned[second]  # (32,): cos and sin to 8 bits
    row[first], row[second] = s, c
    left = turn(row)[first]  # s*cos - c*sin = |(c, s)| * sin(coarse - angle)
    size = np.hypot(c, s)
    angles = np.arctan2(s, c) - np.arcsin(np.clip(left / size, -1, 1))
    angles = np.arctan2(np.sin(angles), np.cos(angles))
    # the store's half step, and the kernel's own float32 sine and cosine
    return Rotation(pairs, angles, np.abs(left) * 2.0**-8 + 2.0**-22 * np.abs(np.sin(angles)))


def _pairs(turn: Turn) -> tuple[tuple[int, int], ...]:
    """Which element each one of a head is turned with, found by giving each head one of them."""
    partner: dict[int, int] = {}
    heads = np.arange(_HEADS)
    for start in range(0, HEAD_DIM, _HEADS):
        row = np.zeros((_HEADS, HEAD_DIM))
        row[heads, start + heads] = 1.0
        turned = turn(row.reshape(-1)).reshape(_HEADS, HEAD_DIM)
        for head in range(_HEADS):
            others = set(np.flatnonzero(turned[head]).tolist()) - {start + head}
            if len(others) != 1:
                raise ValueError(f"element {start + head} of a head is turned with {others}")
            partner[start + head] = others.pop()
    pairs = tuple((one, two) for one, two in sorted(partner.items()) if one < two)
    if len(pairs) != PAIRS or any(partner[two] != one for one, two in pairs):
        raise ValueError(f"elements of a head must be turned in pairs (got {partner})")
    return pairs
