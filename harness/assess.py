"""From observations to the rows of the report: judge each, then merge the slots that agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from harness.bounds import bound_of
from harness.equivalents import equivalents_of
from harness.memory import Change
from harness.probe import Case, Observation
from harness.races import Found, diagnoses, found_in, is_race
from harness.result import MODEL_INPUT, Result, Stray
from harness.taps import DECODE, PREFILL
from harness.verdict import Judgement, judge

_N = TypeVar("_N", int, float)


@dataclass(frozen=True)
class Row:
    """A row of the report, what was seen with it, and the observations that it stands for."""

    result: Result
    strays: tuple[Stray, ...]
    observations: tuple[Observation, ...]
    races: tuple[Found, ...] = ()


def rows_of(observations: Iterable[Observation]) -> list[Row]:
    """Judge observations; those of one op at one place that differ only in the slot become one row,
    unless their verdicts differ."""
    groups: dict[tuple[str, int | None, int | None, str, str], list[Row]] = {}
    for observation in observations:
        row = _row(observation)
        result = row.result
        key = (result.phase, result.step, result.layer, result.op, result.input)
        groups.setdefault(key, []).append(row)
    rows = []
    for group in groups.values():
        if len({row.result.verdict for row in group}) == 1:
            rows.append(_merged(group))
        else:
            rows += group
    return rows


def _row(observation: Observation) -> Row:
    case = observation.case
    place = place_of(case)
    if observation.got is None:
        note = _incident_note(observation) or "the engine never ran it"
        return Row(replace(place, verdict="not_run", note=note), (), (observation,))
    written = list(observation.changes) + [
        incident for incident in observation.incidents if incident.kind == "guard"
    ]
    judgement = judge(
        observation.got,
        case.real,
        bound_of(case.tap.op, case.inputs, case.real),
        want=case.ideal,
        unchanged=observation.unchanged,
        stray=bool(written),
        equivalents=equivalents_of(case.tap.op, case.inputs, case.real),
    )
    result = _with_figures(place, judgement)
    result = replace(
        result,
        noise_floor=noise_floor(case),
        note="; ".join(filter(None, (judgement.note, _incident_note(observation)))) or None,
    )
    races = found_in(observation.incidents, result.phase, result.step, result.layer, result.op)
    if races and result.failed():
        notes = [result.note, *(each.race.sentence for each in races)]
        result = replace(result, note="; ".join(filter(None, notes)))
    elif races:
        result = replace(result, verdict="race", diagnosis=diagnoses(races))
    strays = tuple(
        Stray(result.phase, result.step, result.layer, result.op, _stray_sentence(change))
        for change in observation.changes
    ) + tuple(
        Stray(result.phase, result.step, result.layer, result.op, incident.message)
        for incident in observation.incidents
        if incident.kind == "guard"
    )
    return Row(result, strays, (observation,), races)


def place_of(case: Case) -> Result:
    """A row without figures, for where the case is."""
    event = case.event
    return Result(
        phase=event.phase,
        step=event.index if event.phase == DECODE else None,
        slot=event.slots[0] if event.phase == PREFILL and case.input == MODEL_INPUT else None,
        layer=case.layer,
        op=case.tap.op,
        input=case.input,
        verdict="exact",
        shape=tuple(case.real.shape),
        upstream=case.tap.upstream,
    )


def _with_figures(place: Result, judgement: Judgement) -> Result:
    return replace(
        place,
        verdict=judgement.verdict,
        impossible=judgement.impossible,
        improbable=judgement.improbable,
        elements=judgement.elements,
        worst=judgement.worst,
        first_nan=judgement.first_nan,
        passing_tolerance=judgement.passing_tolerance,
        max_abs=judgement.max_abs,
        rel_l2=judgement.rel_l2,
        cosine=judgement.cosine,
        max_ulp=judgement.max_ulp,
    )


def noise_floor(case: Case) -> float | None:
    """Relative L2 of the ideal against the exact run: what bf16 itself costs up to here."""
    if case.exact is None or not case.real.is_floating_point():
        return None
    return relative_l2(case.ideal, case.exact)


def relative_l2(value: torch.Tensor, want: torch.Tensor) -> float | None:
    """|value - want| / |want| over the elements where both are finite; None where want is 0."""
    error = value - want
    if not torch.isfinite(torch.linalg.vector_norm(error)):
        finite = value.isfinite() & want.isfinite()
        error, want = error[finite], want[finite]
    norm = torch.linalg.vector_norm(want)
    return float(torch.linalg.vector_norm(error) / norm) if norm != 0 else None


def _incident_note(observation: Observation) -> str | None:
    messages = dict.fromkeys(each.message for each in observation.incidents if not is_race(each))
    return "; ".join(messages) or None


def _stray_sentence(change: Change) -> str:
    return f"{change.bytes:,} bytes of {change.buffer} changed, the first at byte {change.offset:,}"


def _merged(rows: Sequence[Row]) -> Row:
    """One row for slots of the same verdict: counts added, every figure the worst slot's."""
    if len(rows) == 1:
        return rows[0]
    results = [row.result for row in rows]
    leading = max(results, key=_badness)
    merged = replace(
        leading,
        slot=None,
        impossible=_total(result.impossible for result in results),
        improbable=_total(result.improbable for result in results),
        elements=_total(result.elements for result in results),
        passing_tolerance=_worst(result.passing_tolerance for result in results),
        max_abs=_worst(result.max_abs for result in results),
        rel_l2=_worst(result.rel_l2 for result in results),
        cosine=_worst((result.cosine for result in results), least=True),
        max_ulp=_worst(result.max_ulp for result in results),
        noise_floor=_worst(result.noise_floor for result in results),
        note="; ".join(dict.fromkeys(result.note for result in results if result.note)) or None,
    )
    return Row(
        merged,
        tuple(stray for row in rows for stray in row.strays),
        tuple(observation for row in rows for observation in row.observations),
        tuple(found for row in rows for found in row.races),
    )


def _badness(result: Result) -> tuple[int, float]:
    tolerance = result.passing_tolerance
    return (
        result.impossible or 0,
        math.inf if tolerance is None or math.isnan(tolerance) else tolerance,
    )


def _total(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _worst(numbers: Iterable[_N | None], least: bool = False) -> _N | None:
    known = [number for number in numbers if number is not None]
    if not known:
        return None
    return min(known) if least else max(known)
