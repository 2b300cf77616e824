"""The port running freely: every op on what the op before it left, errors and all.

Reported as distance from the exact run beside the noise floor (the ideal's distance), and never
used to blame an op: an error shows in every op after the one that made it. Through all layers the
port's own argmax feeds it, and its tokens are compared with the ideal's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harness.assess import Row, place_of, relative_l2
from harness.control import ControlRecorder, Plan, control_results, plan
from harness.memory import Memory, row_width
from harness.probe import Case, Event, output_regions
from harness.result import Flip, Result, Tokens
from harness.session import Session
from harness.taps import DECODE, LAYERLESS, PREFILL, TAPS, Tap
from harness.walk import FreeWalk, Walk
from port import main as engine_main
from port.device import Incident
from port.main import Engine
from port.observer import Observer
from reference.rounding import from_bits

Key = tuple[str, int, str, int | None]  # phase, event index, op, layer
Judged = tuple[list[Result], Plan, Tokens | None]


@dataclass(frozen=True)
class Taken:
    """What one op left behind in a free run. got: bf16 bits, uint16, flat."""

    slots: tuple[int, ...]
    got: np.ndarray
    note: str | None


class Listener(Observer):
    """Takes down the output of every op up to layer `last`; the ops beyond it do not run.

    forced: as the probe's; None lets the port's own argmax feed it. wanted: which ops to take down.
    """

    def __init__(
        self,
        engine: Engine,
        last: int | None,
        layers: Sequence[int],
        ops: Iterable[str],
        forced: Sequence[Sequence[int]] | None,
    ) -> None:
        self.taken: dict[Key, Taken] = {}
        self.tokens: list[list[int]] = []  # every emitted token, one list a prompt, in order
        self.control: ControlRecorder | None = None
        self._engine, self._memory = engine, Memory(engine)
        self._last, self._layers, self._ops = last, set(layers), set(ops)
        self._forced = forced
        self._counts = {PREFILL: 0, DECODE: 0}
        self._event = Event(PREFILL, 0, (), (), (), engine.block_table)
        self._sequence: dict[int, list[int]] = {}
        self._emitted: dict[int, int] = {}
        self._incidents: list[Incident] = []
        engine.observer = self
        engine.device.on_incident = self._incidents.append

    def prefill_begins(self, engine: Engine, slot: int, num_tokens: int) -> None:
        self._sequence[slot] = []
        self.tokens.append(self._sequence[slot])
        self._enter(PREFILL, (slot,), tuple(range(num_tokens)))

    def step_begins(self, engine: Engine, active_slots: list[int]) -> None:
        positions = tuple(engine.current_prompt_len[slot] for slot in active_slots)
        self._enter(DECODE, tuple(active_slots), positions)

    def prefill_ends(self, engine: Engine, slot: int) -> None:
        self._leave()

    def step_ends(self, engine: Engine, active_slots: list[int]) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.control is not None:
            self.control.ends(self._engine, self._event.phase, self._event.slots)

    def _enter(self, phase: str, slots: tuple[int, ...], positions: tuple[int, ...]) -> None:
        if self.control is not None:
            self.control.begins(self._engine, phase, slots, len(positions))
        # The table is the engine's own and fills up as the event goes on.
        self._event = Event(
            phase, self._counts[phase], slots, positions, (), self._engine.block_table
        )
        self._counts[phase] += 1

    def token(self, slot: int, token: int) -> int:
        if self._forced is not None:
            own = self._forced[slot]
            count = self._emitted.get(slot, 0)
            self._emitted[slot] = count + 1
            token = own[count % len(own)]
        self._sequence[slot].append(token)
        return token

    def op(self, names: str | tuple[str, ...], layer: int | None) -> Iterable[None]:
        names = (names,) if isinstance(names, str) else names
        if self._last is not None and (layer is None or layer > self._last) and names[0] != "embed":
            return (None,) if "kv_write" in names else ()
        return self._listened(names, layer)

    def _listened(self, names: tuple[str, ...], layer: int | None) -> Iterator[None]:
        self._incidents.clear()
        yield
        note = "; ".join(dict.fromkeys(incident.message for incident in self._incidents)) or None
        if layer is not None and layer not in self._layers:
            return
        for op in names:
            if op in self._ops and op != "argmax":
                tap, event = TAPS[self._event.phase][op], self._event
                elements = _elements(tap, len(event.positions))
                regions = output_regions(tap, event, layer, elements)
                got = np.concatenate([self._memory.read(region) for region in regions])
                self.taken[event.phase, event.index, op, layer] = Taken(
                    event.slots, got.view(np.uint16), note
                )


def _elements(tap: Tap, rows: int) -> int:
    """Elements of a tap's result of `rows` tokens or slots."""
    if tap.output == "kv_cache":
        return rows * 2 * engine_main.KV_DIM
    if tap.output == "prefill_attn_scores":
        return engine_main.NUM_Q_HEADS * rows * rows
    return rows * row_width(tap.output)


def propagated_results(cases: Iterable[Case], taken: dict[Key, Taken]) -> list[Result]:
    """A row for each tap of the exact run; slots of one place share it, with the worst figures."""
    rows: dict[tuple[str, int | None, int | None, str], Result] = {}
    for case in cases:
        if case.exact is None or not case.real.is_floating_point():
            continue
        result = _result(case, taken.get((case.event.phase, case.event.index, *_at(case))))
        key = (result.phase, result.step, result.layer, result.op)
        known = rows.get(key)
        if known is None or _size(result.propagated) > _size(known.propagated):
            rows[key] = result
    return list(rows.values())


def _at(case: Case) -> tuple[str, int | None]:
    return case.tap.op, case.layer


def _size(ratio: float | None) -> float:
    return -1.0 if ratio is None else ratio


def _result(case: Case, taken: Taken | None) -> Result:
    place = replace(place_of(case), slot=None)
    if taken is None or taken.slots != case.event.slots:
        note = "the port did not come to it with these slots"
        return replace(place, verdict="not_run", shape=None, note=note)
    assert case.exact is not None
    ideal = case.ideal
    port = from_bits(taken.got).reshape(case.real.shape)
    floor = relative_l2(ideal, case.exact)
    lost = case.exact.isfinite() & ~port.isfinite()
    error = math.inf if lost.any() else relative_l2(port, case.exact)
    same = bool(torch.equal(port, ideal))
    lost_note = f"{int(lost.sum())} elements are NaN or infinity" if lost.any() else None
    first = np.unravel_index(int(lost.flatten().nonzero()[0]), lost.shape) if lost.any() else None
    return replace(
        place,
        verdict="exact" if same else "rounding",
        elements=case.real.numel(),
        first_nan=None if first is None else tuple(int(i) for i in first),
        rel_l2=error,
        noise_floor=floor,
        propagated=error / floor if floor and error is not None else None,
        note="; ".join(filter(None, (lost_note, taken.note))) or None,
    )


# --- tokens -------------------------------------------------------------------------------------


def compare_tokens(
    port: Sequence[Sequence[int]],
    ideal: Sequence[Sequence[int]],
    logits: Sequence[Sequence[tuple[Tensor, Tensor]]],
) -> Tokens:
    """The port's tokens beside the ideal's, one list a prompt, and the first flip of each.

    logits: (ideal, exact) rows (128256,) float64 behind each of the ideal's tokens. Behind a flip
    the two runs read different histories, so later differences say nothing and are not listed.

    A flip is a tie within rounding if the exact run's margin between the two tokens is within what
    bf16 costs: 4 times the root mean square of ideal - exact, and half a bf16 step, for each.
    """
    flips, agree = [], 0
    for number, (own, right) in enumerate(zip(port, ideal, strict=True)):
        agree += sum(a == b for a, b in zip(own, right, strict=False))
        index = next((i for i, (a, b) in enumerate(zip(own, right, strict=False)) if a != b), None)
        if index is None:
            continue
        ideal_row, exact_row = logits[number][index]
        top = ideal_row.topk(2).values
        noise = allowance(ideal_row, exact_row)
        gap = float((exact_row[right[index]] - exact_row[own[index]]).abs())
        allowed = float(noise[right[index]] + noise[own[index]])
        flips.append(
            Flip(
                slot=number,
                index=index,
                port=own[index],
                ideal=right[index],
                margin=float(top[0] - top[1]),
                error=allowed,
                kind="tie_within_rounding" if gap <= allowed else "flip",
            )
        )
    return Tokens(
        tuple(tuple(own) for own in port), tuple(tuple(own) for own in ideal), agree, tuple(flips)
    )


def allowance(ideal: Tensor, exact: Tensor) -> Tensor:
    """How far a bf16 engine's logits may lie from the exact ones, float64 of the same shape."""
    rms = (ideal - exact).square().mean().sqrt()
    half_step = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 8)
    return 4 * rms + half_step


# --- the run ------------------------------------------------------------------------------------


class Propagated:
    """One free comparison: the port first, then the judges, who drop each layer once compared."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._free = session.request.all_layers

    def rows(self) -> tuple[list[Row], Tokens | None]:
        """The rows, and the tokens where the port's own argmax fed it."""
        session = self._session
        last = session.layers[-1]
        inside = session.ops_inside()
        around = {op for op in LAYERLESS if session.wants_around(op)}
        self._load(last)
        listener = Listener(
            session.engine,
            None if self._free else last,
            session.layers,
            inside | around,
            None if self._free else session.forced.ids,
        )
        listener.control = recorder = ControlRecorder()
        session.poison(Memory(session.engine), (), everything=True)
        abort = session.run()
        judge = self._judge_freely if self._free else self._judge_forced
        results, expected, tokens = judge(listener, inside | around)
        results += control_results(expected, recorder, session.request.phases, abort)
        return [Row(result, (), ()) for result in results], tokens

    def _load(self, last: int) -> None:
        session = self._session
        for layer in range(last + 1):
            session.progress.update("weights", layer, last + 1)
            session.load({"any"}, layer)
        if self._free:
            session.load({"logits", "final_norm"}, None)
        fed = [token for ids in (*session.prompts, *session.forced.ids) for token in ids]
        session.load({"embed"}, None, fed)

    def _judge_forced(self, listener: Listener, ops: set[str]) -> Judged:
        session = self._session
        expected = plan(
            session.prompts, session.forced, layers=session.checkpoint.layers, steps=session.steps
        )
        walk = Walk(session.checkpoint, expected.events)
        results = self._results(walk.embed(), listener, ops)
        for layer in range(session.layers[-1] + 1):
            session.progress.update("layer", layer, session.layers[-1] + 1)
            wanted = layer in session.layers
            results += self._results(walk.layer(layer, wanted), listener, ops)
        return results, expected, None

    def _judge_freely(self, listener: Listener, ops: set[str]) -> Judged:
        session = self._session
        results: list[Result] = []
        walk = FreeWalk(
            session.checkpoint, lambda cases: results.extend(self._results(cases, listener, ops))
        )
        expected = plan(
            session.prompts, walk, layers=session.checkpoint.layers, steps=session.steps
        )
        tokens = compare_tokens(listener.tokens, walk.tokens, walk.logits)
        return results, expected, tokens

    def _results(self, cases: Iterable[Case], listener: Listener, ops: set[str]) -> list[Result]:
        phases = self._session.request.phases
        wanted = [case for case in cases if case.tap.op in ops and case.event.phase in phases]
        return propagated_results(wanted, listener.taken)
