"""The synthetic checkpoint: values that are a pure function of (seed, tensor name, element index).

No real weights are needed: any tensor, or any rows of one, can be made without the rest, and every
machine makes the same bits. To add a tensor: its spread in SPREADS.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18  # elements a thread makes at once; a multiple of 16, and small enough for a cache
THREADS = 2

# (std, mean) of a tensor, by the end of its name
SPREADS = {
    "model.embed_tokens.weight": (0.02, 0.0),
    "input_layernorm.weight": (0.05, 0.5),
    "post_attention_layernorm.weight": (0.05, 0.5),
    "q_proj.weight": (0.05, 0.0),
    "k_proj.weight": (0.05, 0.0),
    "v_proj.weight": (0.02, 0.0),
    "o_proj.weight": (0.02, 0.0),
    "gate_proj.weight": (0.02, 0.0),
    "up_proj.weight": (0.02, 0.0),
    "down_proj.weight": (0.02, 0.0),
    "model.norm.weight": (0.1, 1.0),
}


def spread(name: str) -> tuple[float, float]:
    """(std, mean) of a checkpoint's tensor by its full name; KeyError if there is none such."""
    for end, values in SPREADS.items():
        if name == end or name.endswith("." + end):
            return values
    raise KeyError(name)


@lru_cache(maxsize=16)
def _table(std: float, mean: float) -> np.ndarray:
    """bfloat16 bits (uint16) by word: (word - 32767.5) * factor + mean in float32, rounded."""
    factor = np.float32(std * np.sqrt(3.0) / 32768)
    words = np.arange(65536, dtype=np.float32) - np.float32(32767.5)
    values = words * factor + np.float32(mean)
    bits = values.view(np.uint32)  # finite float32 to nearest bfloat16, ties to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _fill(out: np.ndarray, seed: int, name: str, start: int, table: np.ndarray) -> None:
    """Write the elements from `start` (a multiple of 16) on into `out`, uint16 of any length."""
    key, counter = [seed, zlib.crc32(name.encode())], [start // 16, 0, 0, 0]
    raw = np.random.Philox(key=key, counter=counter).random_raw(-(-out.size // 4))
    words = raw.astype("<u8", copy=False).view("<u2")[: out.size]
    np.take(
        table, words, out=out, mode="clip"
    )  # "clip" skips a buffered bounds check; none can fail


def synthetic_values(
    seed: int, name: str, count: int, std: float, mean: float = 0.0, start: int = 0
) -> np.ndarray:
    """`count` bfloat16 bit patterns (uint16) of the endless array `name`, from element `start` on.

    `start` must be a multiple of 16 (ValueError): a Philox counter stands for 16 words of 16 bits.
    """
    if start % 16:
        raise ValueError(f"start must be a multiple of 16 (got {start}); start earlier and cut")
    out = np.empty(count, dtype=np.uint16)
    table = _table(std, mean)
    if count <= CHUNK:
        _fill(out, seed, name, start, table)
        return out
    with ThreadPoolExecutor(THREADS) as pool:  # random_raw and take release the interpreter lock
        jobs = [
            pool.submit(_fill, out[at : at + CHUNK], seed, name, start + at, table)
            for at in range(0, count, CHUNK)
        ]
        for job in jobs:
            job.result()
    return out


def synthetic_tensor(
    seed: int,
    name: str,
    shape: tuple[int, ...],
    std: float,
    mean: float = 0.0,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """The bfloat16 tensor `name` of `shape`, or only its rows [first, last), at those rows' cost.

    Elements are numbered row-major over the whole tensor; the first element of the first row must
    be a multiple of 16 (ValueError).
    """
    first, last = rows if rows is not None else (0, shape[0])
    width = prod(shape[1:])
    values = synthetic_values(seed, name, (last - first) * width, std, mean, first * width)
    return (
        torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).view(last - first, *shape[1:])
    )
