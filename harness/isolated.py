"""Isolated mode: each op of the port on the ideal's own inputs, so that it answers only for itself.

The only mode that blames. A layer at a time: the judges walk it, the port's whole control flow
runs with nothing but the cases' ops, and at the first layer once more with the stress battery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from harness.assess import Row, rows_of
from harness.battery import battery
from harness.battery_cases import BatteryPass
from harness.context import diagnoses_of
from harness.control import ControlRecorder, control_results, plan
from harness.probe import Case, Event, Probe
from harness.races import schedules
from harness.session import Session
from harness.taps import LAYERLESS
from harness.walk import Walk

# Verdicts that say what the output is, so that a hypothesis can be asked to give the same.
_EXPLAINED = frozenset({"systematic", "diverged", "poisoned", "unchanged"})


class Isolated:
    """One isolated comparison."""

    def __init__(self, session: Session) -> None:
        self._session, self._request = session, session.request
        self._plan = plan(
            session.prompts, session.forced, layers=session.checkpoint.layers, steps=session.steps
        )
        self._probe = Probe(session.engine, session.forced.ids, schedules(self._request.schedules))
        self._diagnosed: set[tuple[str, str]] = set()  # (phase, op)

    def rows(self) -> list[Row]:
        """All rows; with fail_fast none beyond the stage of the first that fails."""
        rows: list[Row] = []
        for batch in self._stages():
            rows += batch
            strict = self._request.strict
            if self._request.fail_fast and any(row.result.failed(strict) for row in rows):
                break
        return rows

    def _stages(self) -> Iterator[list[Row]]:
        """The rows of the control flow, of one layer, or of what is around the layers."""
        session = self._session
        yield self._control()
        around = {op for op in LAYERLESS if session.wants_around(op)}
        after = around - {"embed"}
        inside = session.ops_inside()
        walk = Walk(session.checkpoint, self._plan.events)
        embed = walk.embed()
        if "embed" in around:
            yield self._stage(embed, around, None, first=True)
        end = session.checkpoint.layers if after else session.layers[-1] + 1 if inside else 0
        for layer in range(end):
            session.progress.update("layer", layer, end)
            wanted = bool(inside) and layer in session.layers
            cases = walk.layer(layer, wanted)
            if wanted:
                yield self._stage(cases, inside, layer, first=layer == session.layers[0])
            del cases  # and with them the layer's weights, before the next layer's are made
        if after:
            session.progress.update("logits")
            yield self._stage(walk.final(), around, None, first=True)

    def _control(self) -> list[Row]:
        """One run without any op: the control flow needs no activations."""
        recorder = ControlRecorder(self._plan.events)
        self._probe.control = recorder
        self._session.poison(self._probe.memory, self._plan.events)
        self._probe.begin([])
        abort = self._session.run()
        self._probe.control = None
        results = control_results(self._plan, recorder, self._request.phases, abort)
        return [Row(result, (), ()) for result in results]

    def _stage(
        self, cases: Sequence[Case], ops: set[str], layer: int | None, first: bool
    ) -> list[Row]:
        """Run and judge the cases of these ops, and, at the first layer, the battery."""
        weights = _weights_by_op(cases)
        phases = self._request.phases
        wanted = [case for case in cases if case.tap.op in ops and case.event.phase in phases]
        tokens = [token for event in self._plan.events for token in event.tokens]
        self._session.load({case.tap.op for case in wanted}, layer, tokens)
        rows = self._observed(wanted, cases, self._plan.events, self._session.run)
        if first and self._request.battery:
            rows += self._battery(wanted, layer, weights)
        return rows

    def _battery(
        self,
        cases: Sequence[Case],
        layer: int | None,
        weights: Mapping[str, Mapping[str, Tensor]],
    ) -> list[Row]:
        session = self._session
        rows: list[Row] = []
        for phase in self._request.phases:
            ops = {case.tap.op for case in cases if case.event.phase == phase}
            for each in battery(phase, ops) if ops else ():
                stress = BatteryPass(each, layer or 0, weights, session.checkpoint)
                session.loader.load_embedding_rows(stress.tokens())
                run = partial(stress.run, session.engine)
                rows += self._observed(stress.cases, stress.cases, [stress.event], run)
        return rows

    def _observed(
        self,
        cases: Sequence[Case],
        around: Sequence[Case],
        events: Sequence[Event],
        run: Callable[[], object],
    ) -> list[Row]:
        """Run the engine for these cases, judge what they did, and say why.

        around: all cases of the layer, run or not, for the diagnosis.
        """
        memory = self._probe.memory
        for everything in (False, True):
            self._session.poison(memory, events, everything)
            self._probe.begin(cases)
            run()
            # Something far away was written: once more, looking everywhere after each op.
            if everything or memory.far_is_poison():
                break
        return [self._explained(row, around) for row in rows_of(self._probe.finish())]

    def _explained(self, row: Row, around: Sequence[Case]) -> Row:
        """The row with its diagnosis, if it is the first failing one of its op and phase; without
        its observations, which hold on to a layer's weights."""
        result = row.result
        if result.verdict not in _EXPLAINED or (result.phase, result.op) in self._diagnosed:
            return replace(row, observations=())
        self._diagnosed.add((result.phase, result.op))
        self._session.progress.update(f"diagnosing {result.op}")
        found = diagnoses_of(row.observations, around, self._session.checkpoint)
        return replace(row, result=replace(result, diagnosis=found), observations=())


def _weights_by_op(cases: Iterable[Case]) -> dict[str, dict[str, Tensor]]:
    """What the model supplies to each op, for the battery."""
    return {
        case.tap.op: {
            name: case.inputs[name] for name in ("weight", "inv_freq") if name in case.inputs
        }
        for case in cases
    }
