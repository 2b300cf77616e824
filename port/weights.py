"""The model file that the port loads: a header, and the bytes of one tensor at a time.

The port has a reader of its own, apart from the reference's, so that a fault in one cannot hide
in the other. Whether dtypes and shapes are right is not asked here (upstream never does).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_LENGTH_BYTES = 8


class WeightsError(Exception):
    """A model file that the port cannot read."""


class ModelFile(Protocol):
    """What `load_weights` reads: names with `data_offsets`, and the bytes between them."""

    def header(self) -> Mapping[str, Mapping[str, Any]]:
        """Tensor name -> {"dtype", "shape", "data_offsets": [begin, end]}, offsets in bytes."""

    def read(self, name: str) -> np.ndarray:
        """The bytes of one tensor, uint8, contiguous."""


@dataclass(frozen=True)
class _Place:
    data: mmap.mmap
    begin: int
    end: int


class SafetensorsFile:
    """A `.safetensors` file, or a folder with `model.safetensors` or with shards and their index.

    Shards count as one file: each shard's offsets go on where the previous one's ended.
    """

    def __init__(self, path: Path) -> None:
        self._header: dict[str, dict[str, Any]] = {}
        self._places: dict[str, _Place] = {}
        base = 0
        for file in _files_of(path):
            base = self._add(file, base)

    def _add(self, file: Path, base: int) -> int:
        try:
            with file.open("rb") as stream:
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(data[:_LENGTH_BYTES], "little")
            start = _LENGTH_BYTES + length
            header = json.loads(data[_LENGTH_BYTES:start])
            end = 0
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                first, last = entry["data_offsets"]
                self._places[name] = _Place(data, start + first, start + last)
                self._header[name] = {**entry, "data_offsets": [base + first, base + last]}
                end = max(end, last)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(
                f"{file} must be a safetensors file (got: {error}); give the path of another"
            ) from error
        return base + end

    def header(self) -> Mapping[str, Mapping[str, Any]]:
        return self._header

    def read(self, name: str) -> np.ndarray:
        place = self._places[name]
        return np.frombuffer(place.data, np.uint8, place.end - place.begin, place.begin)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{index} must hold a weight_map (got: {error}); download the folder again"
        ) from error
    return [path / shard for shard in sorted(shards)]
