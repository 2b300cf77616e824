"""The engine's whole control flow without a computation: every call, in order, at no cost."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels.lift import KernelsFile, Launch
from port.device import HostOrDevice, Incident, MemcpyKind, Operation, Pointer, raise_incident
from port.log import Entry, LoggedDevice
from port.main import BATCH_SIZE, CHAT_PROMPTS, Engine, decode_step, prefill
from port.observer import Observer
from port.weights import ModelFile

_FIRST_ADDRESS = 1 << 40
_PAGE = 4096


class NullDevice:
    """A device that accepts every call and does nothing but remember.

    launches: all of them, in order. uploads: what was last copied from the host to an address.
    """

    name = "none"

    def __init__(self) -> None:
        self.on_incident: Callable[[Incident], None] = raise_incident
        self.launches: list[Launch] = []
        self.uploads: dict[Pointer, np.ndarray] = {}
        self._next = _FIRST_ADDRESS

    def describe(self) -> list[str]:
        return []

    def malloc(self, size: int, name: str = "") -> Pointer:
        pointer = self._next
        self._next += -(-size // _PAGE) * _PAGE
        return pointer

    def free(self, pointer: Pointer) -> None:
        """Nothing is held."""

    def memcpy(self, dst: HostOrDevice, src: HostOrDevice, count: int, kind: MemcpyKind) -> None:
        if isinstance(src, np.ndarray) and not isinstance(dst, np.ndarray):
            self.uploads[dst] = src.copy()

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)

    def gemm_ex(
        self,
        transa: Operation,
        transb: Operation,
        m: int,
        n: int,
        k: int,
        alpha: float,
        a: Pointer,
        lda: int,
        b: Pointer,
        ldb: int,
        beta: float,
        c: Pointer,
        ldc: int,
    ) -> int:
        return 0

    def synchronize(self) -> None:
        """Nothing is on its way."""


@dataclass
class Stage:
    """One prefill or one decode step as it was asked of the device.

    slots: its slot, or the active ones. positions: of the fed tokens, one a slot, before the step
    (in prefill: the number of tokens). popped: blocks taken from the free list. seq_lens: as
    attention was told them (decode). ops: (op, entries) in order; what was asked between ops has
    the op "".
    """

    phase: str
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    popped: int = 0
    seq_lens: tuple[int, ...] = ()
    ops: list[tuple[str, list[Entry]]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        return [entry for _, entries in self.ops for entry in entries]

    def counts(self) -> Counter[str]:
        """Calls by kernel, "gemm_ex" or kind of copy."""
        return Counter(entry.what for entry in self.entries)


class DryRun(Observer):
    """Runs prefills and decode steps on nothing, and keeps what each stage asked for.

    Every emitted token is 0, so that no sequence ends.
    """

    def __init__(
        self,
        kernels: KernelsFile,
        file: ModelFile,
        prompts: Sequence[Sequence[int]] = CHAT_PROMPTS,
    ) -> None:
        self._nothing = NullDevice()
        self.device = LoggedDevice(self._nothing)
        self.stages: list[Stage] = []
        self._seen = 0
        self.engine = Engine(
            self.device,
            kernels,
            file,
            prompts=prompts,
            observer=self,
            wanted=(),
            out=io.StringIO(),
        )
        self.engine.embed_proj_cpu[:] = 0
        self.entries_at_start = list(self._fresh())

    def prefill_all(self) -> None:
        """A prompt for each slot, as main does first (main.cpp:695-708)."""
        for slot in range(BATCH_SIZE):
            if self.engine.prompt_queue:
                prefill(self.engine, slot)

    def step(self) -> Stage:
        """One decode step."""
        decode_step(self.engine)
        return self.stages[-1]

    # --- watching ---

    def op(self, names: str | tuple[str, ...], layer: int | None) -> Iterable[None]:
        return self._watched(names if isinstance(names, str) else names[0])

    def _watched(self, name: str) -> Iterator[None]:
        self._take("")
        yield
        self._take(name)

    def prefill_begins(self, engine: Engine, slot: int, num_tokens: int) -> None:
        self._begin(Stage("prefill", (slot,), (num_tokens,)))

    def step_begins(self, engine: Engine, active_slots: list[int]) -> None:
        positions = tuple(engine.current_prompt_len[slot] for slot in active_slots)
        lengths = self._nothing.uploads[engine.gpu_seq_lens][: len(active_slots)]
        stage = Stage("decode", tuple(active_slots), positions)
        stage.seq_lens = tuple(int(length) for length in lengths)
        self._begin(stage)

    def prefill_ends(self, engine: Engine, slot: int) -> None:
        self._end()

    def step_ends(self, engine: Engine, active_slots: list[int]) -> None:
        self._end()

    def _begin(self, stage: Stage) -> None:
        self._nothing.launches.clear()
        stage.popped = len(self.engine.free_blocks)
        self.stages.append(stage)
        self._take("")

    def _end(self) -> None:
        self._take("")
        self.stages[-1].popped -= len(self.engine.free_blocks)
        self.stages[-1].launches = list(self._nothing.launches)

    def _take(self, op: str) -> None:
        entries = self._fresh()
        if entries:
            self.stages[-1].ops.append((op, entries))

    def _fresh(self) -> list[Entry]:
        entries = self.device.log.entries[self._seen :]
        self._seen += len(entries)
        return entries
