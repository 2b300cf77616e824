"""The probe: runs the port's ops one by one on given inputs, and takes down what each wrote.

It watches the engine (`port.observer`). Before an op it puts the case's inputs into the canonical
buffers and poison into the op's pure outputs; right after it copies the result (ops work in place,
buffers are shared), looks for changes anywhere else, and undoes those. An op without a case does
not run at all, so that one layer of sixteen, or one op of a layer, costs what it costs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.memory import Change, Memory, Region
from harness.races import difference
from harness.taps import DECODE, PREFILL, Tap
from harness.verdict import POISON
from port import main as engine_main
from port.device import Incident
from port.host_device import HostDevice
from port.main import Engine
from port.observer import Observer
from reference.rounding import bf16_bits, round_to_bf16

if TYPE_CHECKING:
    from harness.control import ControlRecorder

_ROW_BYTES = engine_main.KV_DIM * engine_main.BF16
# What the engine itself uploads between ops.
_CONTROL_BUFFERS = (
    "gpu_block_table",
    "gpu_seq_lens",
    "gpu_active_slots",
    "gpu_last_tokens",
    "gpu_input_tokens",
)


@dataclass(frozen=True)
class Event:
    """One prefill or one decode step, as it should go: what its rows are and where its pages lie.

    index: counts the prefills, and apart from them the steps. slots: of each row in decode; of the
    prompt in prefill. positions: of each row. tokens: fed, one a row. table: the block table
    int32 (2, 16, 128) once this event's blocks are handed out. sequences: which prompt each row
    belongs to (one entry in prefill).
    """

    phase: str
    index: int
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    table: np.ndarray
    sequences: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One op at one place: what goes in, and the real results of the ideal and of the exact run.

    inputs: as the reference recorded them. real: float64 (argmax: int64), unrounded. exact: the
    exact run's result at this tap, or None (battery).
    """

    event: Event
    tap: Tap
    layer: int | None
    input: str
    inputs: Mapping[str, Any]
    real: torch.Tensor
    exact: torch.Tensor | None = None

    @cached_property
    def ideal(self) -> torch.Tensor:
        """The real result rounded once to bf16, float64."""
        return round_to_bf16(self.real) if self.real.is_floating_point() else self.real


@dataclass(frozen=True)
class Observation:
    """What the port made of a case. got: bf16 bits uint16 of the real result's shape, or (argmax)
    token ids int64; None where the op never ran. unchanged: the output was never written. before:
    the output's bits before the op."""

    case: Case
    got: np.ndarray | None
    before: np.ndarray | None = None
    unchanged: bool = False
    changes: tuple[Change, ...] = ()
    incidents: tuple[Incident, ...] = ()


class Probe(Observer):
    """Feed it cases, run the engine, take its observations.

    forced: the k-th token chosen for slot s is forced[s][k] (wrapping), whatever argmax found.
    schedules: each op that launches a kernel runs once more under each of them, and what it writes
    must be the same bits (host device only). control: takes down the control flow of the next run,
    if given.
    """

    def __init__(
        self,
        engine: Engine,
        forced: Sequence[Sequence[int]] | None = None,
        schedules: Sequence[str] = (),
    ) -> None:
        self.memory = Memory(engine)
        self.engine = engine
        self.observations: list[Observation] = []
        self.control: ControlRecorder | None = None
        self._forced = forced
        self._schedules = schedules
        self._cases: dict[tuple[str, int, str, int | None], Case] = {}
        self._incidents: list[Incident] = []
        self._phase, self._counts = PREFILL, {PREFILL: 0, DECODE: 0}
        self._index = 0
        self._emitted: dict[int, int] = {}
        self._events: set[tuple[str, int, tuple[int, ...]]] = set()
        self._active: tuple[int, ...] = ()
        self._cache_moved = False
        self._argmax: dict[int, int] = {}
        self._pending: Case | None = None
        engine.observer = self
        engine.device.on_incident = self._incidents.append

    # --- the flow: before a run, and what the engine tells ---

    def begin(self, cases: Iterable[Case]) -> None:
        """Forget the last run; the next one runs these cases."""
        self._cases = {
            (case.event.phase, case.event.index, case.tap.op, case.layer): case for case in cases
        }
        self._counts = {PREFILL: 0, DECODE: 0}
        self._events.clear()
        self._emitted.clear()
        self._incidents.clear()
        self.observations = []
        if self._schedules:
            self._host().schedule = "benign"

    def finish(self) -> list[Observation]:
        """All observations, given up to the caller. A case whose op never ran, though its event
        took place, has `got` None; events that did not take place, or not with these slots, are
        for `schedule` to tell."""
        left = [
            Observation(case, None, incidents=tuple(self._incidents))
            for case in self._cases.values()
            if (case.event.phase, case.event.index, case.event.slots) in self._events
        ]
        made, self.observations, self._cases = self.observations + left, [], {}
        return made

    def prefill_begins(self, engine: Engine, slot: int, num_tokens: int) -> None:
        self._enter(PREFILL, (slot,), num_tokens)

    def prefill_ends(self, engine: Engine, slot: int) -> None:
        self._leave()

    def step_begins(self, engine: Engine, active_slots: list[int]) -> None:
        self._enter(DECODE, tuple(active_slots), len(active_slots))

    def step_ends(self, engine: Engine, active_slots: list[int]) -> None:
        self._leave()

    def _leave(self) -> None:
        self._take_argmax()
        if self.control is not None:
            self.control.ends(self.engine, self._phase, self._active)

    def _enter(self, phase: str, slots: tuple[int, ...], rows: int) -> None:
        if self.control is not None:
            self.control.begins(self.engine, phase, slots, rows)
        self._phase, self._index, self._active = phase, self._counts[phase], slots
        self._counts[phase] += 1
        self._events.add((phase, self._index, slots))
        self._argmax = {}

    def token(self, slot: int, token: int) -> int:
        self._argmax[slot] = token
        if self._forced is None:
            return token
        own = self._forced[slot]
        count = self._emitted.get(slot, 0)
        self._emitted[slot] = count + 1
        return own[count % len(own)]

    # --- one op ---

    def op(self, names: str | tuple[str, ...], layer: int | None) -> Iterable[None]:
        names = (names,) if isinstance(names, str) else names
        if self.control is not None and "attention" in names and layer is not None:
            self.control.attention(self.engine, self._index, layer)
        cases = []
        for name in names:
            key = (self._phase, self._index, name, layer)
            # Rows of other slots than expected can not be judged; `schedule` says what happened.
            if key in self._cases and self._cases[key].event.slots == self._active:
                cases.append(self._cases.pop(key))
        if cases:
            return self._watched(cases)
        # Which blocks kv_write hands out is control flow: it runs in every layer.
        return self._unwatched() if "kv_write" in names else ()

    def _unwatched(self) -> Iterator[None]:
        yield
        self._cache_moved = True

    def _watched(self, cases: list[Case]) -> Iterator[None]:
        if cases[0].tap.op == "argmax":
            yield from self._watched_argmax(cases[0])
            return
        outputs = {case.tap.op: self._output_regions(case) for case in cases}
        self.memory.watch(_CONTROL_BUFFERS)
        if self._cache_moved:
            self.memory.watch(["kv_cache"])
            self._cache_moved = False
        tables = self._control_inputs()
        self._prepare(cases, outputs)
        launches = self._launches()
        yield
        if cases[0].tap.output == "kv_cache":
            outputs = {case.tap.op: self._written_pages(case) for case in cases}
        before = {op: self.memory.expected(regions) for op, regions in outputs.items()}
        after = {op: self._bytes(regions) for op, regions in outputs.items()}
        for case in cases:
            self.memory.accept(outputs[case.tap.op])
            self.memory.accept(self._on_the_way(case))
        changes = tuple(self.memory.changes())
        incidents = {case.tap.op: list(self._incidents) for case in cases}
        if self._launches() != launches:
            for schedule in self._schedules:
                self._prepare(cases, outputs)
                self._host().schedule = schedule
                yield
                self._host().schedule = "benign"
                for case in cases:
                    op = case.tap.op
                    told = incidents[op]
                    told += self._other_turn(schedule, case, outputs[op], after[op], told)
                    self.memory.accept([*outputs[op], *self._on_the_way(case)])
                self.memory.changes()
        for region, contents in tables:
            self.memory.write(region, contents)
        for case in cases:
            op = case.tap.op
            shape = tuple(case.real.shape)
            self.observations.append(
                Observation(
                    case,
                    got=after[op].view(np.uint16).reshape(shape),
                    before=before[op].view(np.uint16).reshape(shape),
                    unchanged=bool(np.array_equal(before[op], after[op])),
                    changes=changes,
                    incidents=tuple(incidents[op]),
                )
            )

    def _prepare(self, cases: Sequence[Case], outputs: Mapping[str, Sequence[Region]]) -> None:
        """The inputs of these cases, and poison where they shall write."""
        for case in cases:
            self._inject(case)
            if not case.tap.in_place:
                self.memory.poison(outputs[case.tap.op])
        self._incidents.clear()

    def _host(self) -> HostDevice:
        device = self.engine.device
        assert isinstance(device, HostDevice), "schedules are the host's"
        return device

    def _launches(self) -> int:
        return self._host().launches if self._schedules else 0

    def _other_turn(
        self,
        schedule: str,
        case: Case,
        regions: Sequence[Region],
        benign: np.ndarray,
        known: Sequence[Incident],
    ) -> list[Incident]:
        """What an op did under another schedule that it did not do before. benign: its bytes."""
        shape = tuple(case.real.shape)
        bits = [each.view(np.uint16).reshape(shape) for each in (benign, self._bytes(regions))]
        changed = difference(schedule, case.tap.op, *bits)
        kinds = {incident.kind for incident in known}
        told = [each for each in self._incidents if each.kind not in kinds]
        return told if changed is None else [changed, *told]

    def _watched_argmax(self, case: Case) -> Iterator[None]:
        """Its result goes nowhere but to `token`, which the engine calls after this op."""
        logits = bf16_bits(case.inputs["logits"])  # (rows, 128256)
        first = len(case.event.positions) - len(logits)  # prefill looks at its last row only
        self.engine.embed_proj_cpu[: len(case.event.positions)] = POISON
        self.engine.embed_proj_cpu[first : first + len(logits)] = logits
        yield
        self._pending = case

    def _take_argmax(self) -> None:
        if self._pending is not None:
            case, self._pending = self._pending, None
            tokens = np.array([self._argmax[slot] for slot in case.event.slots], np.int64)
            self.observations.append(Observation(case, tokens))

    # --- where things lie ---

    def _inject(self, case: Case) -> None:
        for name, buffer in case.tap.inputs.items():
            value = case.inputs[name]
            if name == "tokens":
                data = value.numpy().astype(np.int32)
            elif name == "keys":
                self._inject_pages(case)
                continue
            elif name == "values":
                continue
            else:
                data = bf16_bits(value)
            self.memory.write(Region(buffer, 0, data.nbytes), data)

    def _inject_pages(self, case: Case) -> None:
        """All that attention reads beside q: pages, table, lengths and slots, as they should be."""
        event = case.event
        assert case.layer is not None
        self.memory.poison_cache()
        keys, values = case.inputs["keys"], case.inputs["values"]
        for row, slot in enumerate(event.slots):
            length = len(keys[row])
            blocks = event.table[slot, case.layer]
            for region, page_rows in _page_rows(blocks, 0, length):
                self.memory.write(region, bf16_bits(keys[row][page_rows]))
                self.memory.write(_values_of(region), bf16_bits(values[row][page_rows]))
        lengths = [len(rows) for rows in keys]
        for buffer, numbers in (
            ("gpu_block_table", event.table),
            ("gpu_seq_lens", np.array(lengths, np.int32)),
            ("gpu_active_slots", np.array(event.slots, np.int32)),
        ):
            self.memory.write(Region(buffer, 0, numbers.nbytes), numbers)

    def _control_inputs(self) -> list[tuple[Region, np.ndarray]]:
        """The port's own tables and lists, to put back after an op that was given right ones."""
        regions = [Region(name, 0, self.memory.size(name)) for name in _CONTROL_BUFFERS]
        return [(region, self.memory.read(region)) for region in regions]

    def _output_regions(self, case: Case) -> list[Region]:
        return output_regions(case.tap, case.event, case.layer, case.real.numel())

    def _written_pages(self, case: Case) -> list[Region]:
        """Where kv_write's rows belong by the port's own table: which blocks it took is for
        `block_table` to judge. Where that has no block, by the right table."""
        own = self.engine.block_table.copy()
        missing = (own < 0) | (own >= engine_main.NUM_BLOCKS)
        own[missing] = case.event.table[missing]
        return output_regions(
            case.tap, replace(case.event, table=own), case.layer, case.real.numel()
        )

    def _on_the_way(self, case: Case) -> list[Region]:
        size = case.real.numel() * engine_main.BF16
        return [Region(buffer, 0, size) for buffer in case.tap.also]

    def _bytes(self, regions: Sequence[Region]) -> np.ndarray:
        return np.concatenate([self.memory.read(region) for region in regions])


def output_regions(tap: Tap, event: Event, layer: int | None, elements: int) -> list[Region]:
    """Where an op's output lies, in the order of its result's elements."""
    if tap.output != "kv_cache":
        return [Region(tap.output, 0, elements * engine_main.BF16)]
    assert layer is not None
    keys: list[Region] = []
    if event.phase == PREFILL:
        blocks = event.table[event.slots[0], layer]
        keys = [region for region, _ in _page_rows(blocks, 0, len(event.positions))]
    else:
        for slot, position in zip(event.slots, event.positions, strict=True):
            blocks = event.table[slot, layer]
            keys += [region for region, _ in _page_rows(blocks, position, position + 1)]
    return keys + [_values_of(region) for region in keys]


def _page_rows(blocks: np.ndarray, first: int, last: int) -> Iterator[tuple[Region, slice]]:
    """Where the key rows of positions first..last-1 lie: a region a page, and its rows."""
    size = engine_main.BLOCK_SIZE
    position = first
    while position < last:
        logical, offset = divmod(position, size)
        rows = min(size - offset, last - position)
        start = int(blocks[logical]) * engine_main.BLOCK_BYTES + offset * _ROW_BYTES
        yield Region("kv_cache", start, rows * _ROW_BYTES), slice(position, position + rows)
        position += rows


def _values_of(keys: Region) -> Region:
    """The value rows beside key rows: one page further in the same block."""
    return Region(keys.buffer, keys.offset + engine_main.V_OFFSET, keys.size)
