"""What the GPU tests share: arrays in and out of a device, an engine that is watched, figures."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.repairs import apply_repairs
from kernels.lift import KernelsFile, lift
from port.cuda_device import CudaDevice
from port.device import Device, MemcpyKind, Pointer
from port.host_calls import HostCalls
from port.main import CHAT_PROMPTS, HEAD_DIM, MAX_SEQ_LEN, Engine, run
from port.observer import Observer
from port.weights import ModelFile
from reference.synthetic import synthetic_values

GOLDEN = Path(__file__).parents[1] / "golden"
ENGINE_MAX_SEQ_LEN = 48  # of engine.json
ROPE = (HEAD_DIM, MAX_SEQ_LEN, 500000.0, 32.0, 1.0, 4.0, 8192)
LINE = re.compile(r"Output token: (\S+), token index: (\d+)")


class Figures:
    """Name and value, in the order in which they came."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def note(self, name: str, value: str) -> None:
        self.rows[name] = value

    def count(self, name: str, good: bool) -> None:
        """One more of `name`, which shows as 'good/all'."""
        had, of = (int(part) for part in self.rows.get(name, "0/0").split("/"))
        self.rows[name] = f"{had + good}/{of + 1}"

    def lines(self) -> list[str]:
        width = max(map(len, self.rows))
        return [f"{name:<{width}}  {value}" for name, value in self.rows.items()]


def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "kernels.npz") as data:
        return dict(data)


def digests() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((GOLDEN / "digests.json").read_text())
    return made


def engine_lines(what: str) -> list[list[Any]]:
    """The [logit, token] lines of the upstream program."""
    made: list[list[Any]] = json.loads((GOLDEN / "engine.json").read_text())["engine"][what]
    return made


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def recipe(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> np.ndarray:
    """bf16 bits of the golden input `name`, seed 0."""
    return synthetic_values(0, f"golden/{name}", int(np.prod(shape)), std, mean).reshape(shape)


def to_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to float64."""
    wide = (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
    return wide.reshape(bits.shape).astype(np.float64)


class Bench:
    """Arrays in and out of a device, and the eleven host calls on it. Frees what it took."""

    def __init__(self, device: Device, kernels: KernelsFile) -> None:
        self.device = device
        self.calls = HostCalls(kernels, device, io.StringIO())
        self._taken: list[Pointer] = []

    def new(self, shape: tuple[int, ...], dtype: Any = np.uint16) -> Pointer:
        pointer = self.device.malloc(int(np.prod(shape)) * np.dtype(dtype).itemsize, "bench")
        self._taken.append(pointer)
        return pointer

    def put(self, values: np.ndarray) -> Pointer:
        values = np.ascontiguousarray(values)
        pointer = self.new(values.shape, values.dtype)
        self.device.memcpy(pointer, values, values.nbytes, MemcpyKind.HOST_TO_DEVICE)
        return pointer

    def get(self, pointer: Pointer, shape: tuple[int, ...], dtype: Any = np.uint16) -> np.ndarray:
        out = np.zeros(shape, dtype)
        self.device.memcpy(out, pointer, out.nbytes, MemcpyKind.DEVICE_TO_HOST)
        return out

    def close(self) -> None:
        for pointer in self._taken:
            self.device.free(pointer)
        self._taken.clear()


def repaired_kernels(*repairs: str) -> KernelsFile:
    """Our kernels with these repairs in them."""
    return apply_repairs(lift(), repairs)


class CachedFile:
    """A model file whose tensors are made once."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._tensors: dict[str, np.ndarray] = {}

    def header(self) -> Mapping[str, Mapping[str, Any]]:
        return self._file.header()

    def read(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            self._tensors[name] = self._file.read(name)
        return self._tensors[name]


class Watch(Observer):
    """Which prompt each printed line belongs to, its row of logits and how close the second was.

    Lines are counted as they are printed. margins: top-1 minus top-2 logit.
    """

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.margins: list[float] = []
        self.logits: list[str] = []  # sha256 of the row's bits
        self._prompt_of: dict[int, int] = {}
        self._rows: dict[int, np.ndarray] = {}

    def prefill_begins(self, engine: Engine, slot: int, num_tokens: int) -> None:
        self._prompt_of[slot] = len(set(self.prompts) | set(self._prompt_of.values()))
        self._rows = {slot: engine.embed_proj_cpu[num_tokens - 1]}

    def step_begins(self, engine: Engine, active_slots: list[int]) -> None:
        self._rows = {slot: engine.embed_proj_cpu[row] for row, slot in enumerate(active_slots)}

    def token(self, slot: int, token: int) -> int:
        row = self._rows[slot]
        second, first = np.sort(np.partition(to_float(row), -2)[-2:])
        self.prompts.append(self._prompt_of[slot])
        self.margins.append(float(first - second))
        self.logits.append(sha256(row))
        return token


def make_engine(device: Device, kernels: KernelsFile, file: ModelFile) -> Engine:
    return Engine(device, kernels, file, max_seq_len=ENGINE_MAX_SEQ_LEN, out=io.StringIO())


def move_engine(engine: Engine, device: Device, kernels: KernelsFile) -> None:
    """The engine goes on through `device`, which must be another way to the same GPU memory."""
    engine.device = device
    engine.calls = HostCalls(kernels, device, engine.out)
    engine.calls.init_rope_frequencies(*ROPE)


def run_engine(
    engine: Engine, prompts: Sequence[Sequence[int]] = CHAT_PROMPTS
) -> tuple[list[list[Any]], Watch]:
    """The whole program from an empty queue state: its [logit, token] lines, and what was seen."""
    engine.reset(prompts)
    watch = engine.observer = Watch()
    engine.out = io.StringIO()
    run(engine)
    lines = [[logit, int(token)] for logit, token in LINE.findall(engine.out.getvalue())]
    return lines, watch


def bf16_step(value: float) -> float:
    """The distance of neighbouring bf16 values at `value`."""
    return float(2.0 ** (np.floor(np.log2(abs(value))) - 7)) if value else 2.0**-133


def compare_lines(
    got: list[list[Any]], wanted: list[list[Any]], watch: Watch
) -> tuple[int, list[str], list[str]]:
    """(lines that are equal, near ties that fell the other way, differences that nothing excuses).

    A token may differ where our own two best logits are at most 2 bf16 steps apart; from there on
    that prompt's tokens are another text and are not looked at. A logit may differ by 4 steps: sums
    of another cuBLAS version in another order.
    """
    equal, ties, wrong = 0, [], []
    parted: set[int] = set()
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=False)):
        prompt = watch.prompts[index]
        if ours == theirs:
            equal += 1
        elif prompt not in parted:
            told = f"line {index} (prompt {prompt}): got {ours}, upstream {theirs}"
            step = bf16_step(float(theirs[0])) if theirs[0] != "nan" else 0.0
            margin = watch.margins[index]
            if ours[1] != theirs[1] and margin <= 2 * step:
                ties.append(f"{told}, margin {margin:g}")
                parted.add(prompt)
            elif ours[1] != theirs[1] or not abs(float(ours[0]) - float(theirs[0])) <= 4 * step:
                wrong.append(told)
    if len(got) != len(wanted):
        wrong.append(f"{len(got)} lines, upstream {len(wanted)}")
    return equal, ties, wrong


def incidents_of(device: CudaDevice, work: Callable[[], Any]) -> list[str]:
    """Kinds of the incidents that `work` makes."""
    before, kinds = device.on_incident, []
    device.on_incident = lambda incident: kinds.append(incident.kind)
    try:
        work()
    finally:
        device.on_incident = before
    return kinds
