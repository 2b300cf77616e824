"""The weights on their way into the port: whole tensors, or only the rows that a run needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from port import main as engine_main
from port.device import MemcpyKind
from port.main import Engine, copy_weights
from port.weights import ModelFile, SafetensorsFile
from reference.checkpoint import Checkpoint
from reference.config import EMBED


class SyntheticFile:
    """A synthetic checkpoint in the form of the file that the port's loader expects."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def header(self) -> Mapping[str, Mapping[str, Any]]:
        return self._checkpoint.header()

    def read(self, name: str) -> np.ndarray:
        return _bytes(self._checkpoint.tensor(name))


def model_file(checkpoint: Checkpoint) -> ModelFile:
    """What the port loads. A real file is read by the port's own reader, not the reference's."""
    return (
        SyntheticFile(checkpoint) if checkpoint.path is None else SafetensorsFile(checkpoint.path)
    )


class Loader:
    """Brings weights to an engine's device when they are first needed, and only once."""

    def __init__(self, engine: Engine, file: ModelFile, checkpoint: Checkpoint) -> None:
        self._engine, self._file, self._checkpoint = engine, file, checkpoint
        self._loaded: set[str] = set()

    def load(self, names: Collection[str]) -> None:
        missing = [name for name in names if name not in self._loaded]
        copy_weights(self._engine.device, self._file, self._engine.weights, missing)
        self._loaded.update(missing)

    def load_embedding_rows(self, tokens: Iterable[int]) -> None:
        """Rows of the embedding table; the others stay poison, so that reading one shows."""
        if EMBED in self._loaded:
            return
        ids = sorted(set(tokens))
        rows = self._checkpoint.rows(EMBED, torch.tensor(ids, dtype=torch.int64))
        row_bytes = engine_main.EMBEDDING_LENGTH * engine_main.BF16
        for token, row in zip(ids, rows, strict=True):
            pointer = self._engine.weights.embed_tokens + token * row_bytes
            self._engine.device.memcpy(pointer, _bytes(row), row_bytes, MemcpyKind.HOST_TO_DEVICE)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
