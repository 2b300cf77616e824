"""The control flow: what the reference scheduler expects, what the port did, where they part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from harness.probe import Event
from harness.result import MODEL_INPUT, Result
from harness.taps import CONTROL_UPSTREAM, DECODE, PREFILL
from port.device import MemcpyKind
from port.main import Engine
from reference.scheduler import Event as ReferenceEvent
from reference.scheduler import ForcedTokens, Prefill, Scheduler, Step, Tokens

Lists = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who ran and what was said, in one prefill or one decode step. None: of a free slot, anything.

    slots: the prompt's, or the active ones. fed: the prompt's tokens, or one token an active slot.
    seq_lens: as attention is told them (decode). The rest: after the event, by slot.
    """

    slots: tuple[int, ...]
    fed: tuple[int, ...]
    seq_lens: tuple[int, ...]
    is_slot_free: tuple[bool, ...]
    current_prompt_len: tuple[int | None, ...]
    generated_tokens: Lists


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Which blocks are where after the event: int32 (2, 16, 128) tables, and the free list."""

    host_table: np.ndarray
    device_table: np.ndarray
    free_blocks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class State:
    """One event of the control flow, of the reference or of the port."""

    phase: str
    schedule: Schedule
    block_table: BlockTable


@dataclass(frozen=True)
class Plan:
    """How a run should go: its events for the probe, and the states to compare the port with."""

    events: tuple[Event, ...]
    states: tuple[State, ...]


def plan(prompts: Sequence[Sequence[int]], tokens: Tokens, *, layers: int, steps: int) -> Plan:
    """The reference scheduler's events for `prompts`, up to and with decode step `steps`."""
    scheduler = Scheduler(prompts, tokens, layers=layers)
    events: list[Event] = []
    states: list[State] = []
    counts = {PREFILL: 0, DECODE: 0}
    sequences: dict[int, int] = {}
    table = scheduler.host_table.copy()
    for reference in scheduler.run(steps):
        for page in reference.popped:
            table[page.slot, page.layer, page.logical] = page.block
        if isinstance(reference, Prefill):
            sequences[reference.slot] = reference.prompt_index
        event = _event(reference, table.copy(), counts, sequences)
        counts[event.phase] += 1
        events.append(event)
        states.append(_expected(reference, scheduler))
        table = reference.host_table.copy()
    return Plan(tuple(events), tuple(states))


def forced_tokens(
    decode_ids: Sequence[Sequence[int]] | None, chat_prompts: Sequence[Sequence[int]], slots: int
) -> ForcedTokens:
    """What decode is fed: slot s takes its own list, or hard-coded prompt (s + 2) mod 4."""
    given = list(decode_ids or ())
    rest = [chat_prompts[(slot + 2) % len(chat_prompts)] for slot in range(len(given), slots)]
    return ForcedTokens([*given, *rest])


def _event(
    reference: ReferenceEvent,
    table: np.ndarray,
    counts: dict[str, int],
    sequences: dict[int, int],
) -> Event:
    if isinstance(reference, Prefill):
        return Event(
            PREFILL,
            counts[PREFILL],
            (reference.slot,),
            tuple(range(len(reference.tokens))),
            reference.tokens,
            table,
            (reference.prompt_index,),
        )
    assert isinstance(reference, Step)
    return Event(
        DECODE,
        counts[DECODE],
        reference.active_slots,
        reference.positions,
        reference.tokens_fed,
        table,
        tuple(sequences[slot] for slot in reference.active_slots),
    )


def _expected(reference: ReferenceEvent, scheduler: Scheduler) -> State:
    phase = PREFILL
    slots: tuple[int, ...]
    seq_lens: tuple[int, ...] = ()
    if isinstance(reference, Prefill):
        slots, fed = (reference.slot,), reference.tokens
    else:
        assert isinstance(reference, Step)
        phase, slots = DECODE, reference.active_slots
        fed, seq_lens = reference.tokens_fed, reference.seq_lens
    schedule = _schedule(
        slots, fed, seq_lens, reference.free, reference.lengths, scheduler.generated
    )
    tables = BlockTable(reference.host_table, reference.device_table, tuple(scheduler.free_blocks))
    return State(phase, schedule, tables)


def _schedule(
    slots: Sequence[int],
    fed: Sequence[int],
    seq_lens: Sequence[int],
    free: Sequence[bool],
    lengths: Sequence[int],
    generated: Sequence[Sequence[int]],
) -> Schedule:
    return Schedule(
        tuple(slots),
        tuple(int(token) for token in fed),
        tuple(int(length) for length in seq_lens),
        tuple(free),
        tuple(None if f else length for f, length in zip(free, lengths, strict=True)),
        tuple(None if f else tuple(own) for f, own in zip(free, generated, strict=True)),
    )


class ControlRecorder:
    """Takes down the port's states; called at each event. events: the plan's."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self._events = events
        self.states: list[State] = []
        self.stale: dict[int, list[str]] = {}  # decode step -> what attention would have read
        self._fed: tuple[int, ...] = ()
        self._seq_lens: tuple[int, ...] = ()

    def begins(self, engine: Engine, phase: str, slots: Sequence[int], rows: int) -> None:
        """The event's inputs were uploaded: read back what the device was given."""
        tokens = engine.gpu_input_tokens if phase == PREFILL else engine.gpu_last_tokens
        self._fed = tuple(_read_ints(engine, tokens, (rows,)))
        lengths = () if phase == PREFILL else _read_ints(engine, engine.gpu_seq_lens, (rows,))
        self._seq_lens = tuple(lengths)

    def ends(self, engine: Engine, phase: str, slots: Sequence[int]) -> None:
        schedule = _schedule(
            slots,
            self._fed,
            self._seq_lens,
            engine.is_slot_free,
            engine.current_prompt_len,
            engine.generated_tokens,
        )
        device_table = _read_ints(engine, engine.gpu_block_table, engine.block_table.shape)
        tables = BlockTable(engine.block_table.copy(), device_table, tuple(engine.free_blocks))
        self.states.append(State(phase, schedule, tables))

    def attention(self, engine: Engine, index: int, layer: int) -> None:
        """What attention is about to read must already be there, not only at the step's end."""
        event = next((e for e in self._events if (e.phase, e.index) == (DECODE, index)), None)
        if event is None:
            return
        device_table = _read_ints(engine, engine.gpu_block_table, engine.block_table.shape)
        for slot in event.slots:
            own, right = device_table[slot, layer], event.table[slot, layer]
            if not np.array_equal(own, right):
                logical = int(np.flatnonzero(own != right)[0])
                self.stale.setdefault(index, []).append(
                    f"when attention runs in layer {layer}, the device table's entry for slot "
                    f"{slot}, logical block {logical} must be {right[logical]} (got {own[logical]})"
                )


def control_results(
    plan: Plan, recorder: ControlRecorder, phases: Iterable[str], abort: str | None
) -> list[Result]:
    """`schedule` and `block_table` rows: one each for all prefills, and for each decode step.

    abort: the assert that stopped the port, if one did.
    """
    rows: dict[tuple[str, int | None, str], list[str]] = {}
    events = [*plan.events]
    own = {PREFILL: [], DECODE: []}  # type: dict[str, list[State]]
    for state in recorder.states:
        own[state.phase].append(state)
    order = [state.phase for state in recorder.states]
    for event, expected in zip(events, plan.states, strict=True):
        step = event.index if event.phase == DECODE else None
        schedule = rows.setdefault((event.phase, step, "schedule"), [])
        table = rows.setdefault((event.phase, step, "block_table"), [])
        where = f"step {event.index}" if step is not None else f"prefill {event.index}"
        if event.index >= len(own[event.phase]):
            schedule.append(f"{where} must take place (the engine ended before it)")
            if abort:
                table.append(abort)
            continue
        got = own[event.phase][event.index]
        schedule += _differences(where, expected.schedule, got.schedule)
        table += _differences(where, expected.block_table, got.block_table)
        if event.phase == DECODE:
            table += recorder.stale.get(event.index, [])
    wanted = [event.phase for event in events]
    if order[: len(wanted)] != wanted[: len(order)] and not any(rows.values()):
        first = next(iter(rows.values()))
        first.append(f"prefills and steps must come in the order {wanted} (got {order})")
    return [
        Result(
            phase=phase,
            step=step,
            slot=None,
            layer=None,
            op=op,
            input=MODEL_INPUT,
            verdict="diverged" if notes else "exact",
            note="; ".join(dict.fromkeys(notes)) or None,
            upstream=CONTROL_UPSTREAM[phase, op],
        )
        for (phase, step, op), notes in rows.items()
        if phase in phases
    ]


def _differences(
    where: str, expected: Schedule | BlockTable, got: Schedule | BlockTable
) -> list[str]:
    """One sentence a field that differs."""
    found = []
    for field in fields(expected):
        want, have = getattr(expected, field.name), getattr(got, field.name)
        if isinstance(want, np.ndarray):
            if want.shape == have.shape and not np.array_equal(want, have):
                slot, layer, logical = np.argwhere(want != have)[0]
                place = slot, layer, logical
                found.append(
                    f"{where}: {field.name} must hold {want[place]} for slot {slot}, "
                    f"layer {layer}, logical block {logical} (got {have[place]}; "
                    f"{np.count_nonzero(want != have)} entries differ)"
                )
        elif field.name == "free_blocks":
            if want != have:
                found.append(_free_list_difference(where, want, have))
        elif want != have:
            found.append(f"{where}: {field.name} must be {_show(want)} (got {_show(have)})")
    return found


def _free_list_difference(where: str, want: tuple[int, ...], have: tuple[int, ...]) -> str:
    twice = len(have) - len(set(have))
    if twice:
        return f"{where}: no block may be free twice (got {twice} doubled)"
    if len(want) != len(have):
        return f"{where}: {len(want)} blocks must be free (got {len(have)})"
    place = next(i for i in range(1, len(want) + 1) if want[-i] != have[-i])
    return (
        f"{where}: block {place} from the free list's end must be {want[-place]} "
        f"(got {have[-place]})"
    )


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join("free" if v is None else str(v) for v in value) + "]"
    return str(value)


def _read_ints(engine: Engine, pointer: int, shape: tuple[int, ...]) -> np.ndarray:
    out = np.empty(shape, np.int32)
    engine.device.memcpy(out, pointer, out.nbytes, MemcpyKind.DEVICE_TO_HOST)
    return out
