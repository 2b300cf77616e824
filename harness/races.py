"""What --races and --schedules find: races of an op's kernels, as rows and reports have them.

The host device tells them as incidents: "race" and "block-race" (two accesses that no barrier
orders, within a block or between two) from the detector, "schedule" from here, where the same op
gave other bits when its threads ran in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from harness.report.format import counted, number, place
from harness.result import Diagnosis, Race
from port.device import Incident

# The name of each kind's explanation.
_HYPOTHESES: Final = {
    "race": "missing-barrier",
    "block-race": "unordered-blocks",
    "schedule": "depends-on-schedule",
}
# The first one shows most races: see simt.md's trial. Random warp orders go on without an end.
_SCHEDULES: Final = ("ahead", "reversed", "ahead-reversed")
_MEANINGS: Final = {
    "ahead": "each warp runs as far as its barriers allow, warp 0 first",
    "reversed": "threads and blocks run in reverse",
    "ahead-reversed": "each warp runs as far as its barriers allow, the last warp first",
}


@dataclass(frozen=True)
class Found:
    """A race of one row, and what to do about it."""

    race: Race
    hypothesis: str
    remedy: str


def schedules(count: int) -> tuple[str, ...]:
    """The `count` schedules that are tried beside the benign one."""
    seeds = range(1, count - len(_SCHEDULES) + 1)
    return (*_SCHEDULES[:count], *(f"random:{seed}" for seed in seeds))


def difference(schedule: str, op: str, benign: np.ndarray, other: np.ndarray) -> Incident | None:
    """What another schedule changed in an op's output (bf16 bits, uint16); None: nothing."""
    differ = benign != other
    count = int(differ.sum())
    if not count:
        return None
    first = tuple(int(i) for i in np.argwhere(differ)[0])
    was, now = (number(float(_value(bits[first]))) for bits in (benign, other))
    meaning = _MEANINGS.get(schedule, "warps take turns at random")
    return Incident(
        "schedule",
        f"under schedule {schedule} ({meaning}), {counted(count)} of {counted(benign.size)} "
        f"elements of {op} are others than under the benign one; the first, at {place(first)}, "
        f"is {now} and was {was}.",
        remedy="the result depends on the order in which warps run, which no GPU promises; "
        "--races names the lines.",
    )


def _value(bits: np.uint16) -> np.float32:
    return (np.uint32(bits) << np.uint32(16)).view(np.float32)


def is_race(incident: Incident) -> bool:
    return incident.kind in _HYPOTHESES


def found_in(
    incidents: Iterable[Incident], phase: str, step: int | None, layer: int | None, op: str
) -> tuple[Found, ...]:
    """The races among an op's incidents, each once."""
    races = {
        incident.remedy or incident.message: Found(
            Race(phase, step, layer, op, incident.message),
            _HYPOTHESES[incident.kind],
            incident.remedy or "",
        )
        for incident in reversed([each for each in incidents if is_race(each)])
    }
    return tuple(reversed(races.values()))


def diagnoses(found: Sequence[Found]) -> tuple[Diagnosis, ...]:
    """Why a row with these races has the verdict `race`, one a hypothesis.

    That the result depends on the schedule says nothing more where the lines are known.
    """
    sentences: dict[str, list[str]] = {}
    with_lines = [each for each in found if each.hypothesis != _HYPOTHESES["schedule"]]
    for each in with_lines or found:
        known = sentences.setdefault(each.hypothesis, [])
        if each.remedy not in known:
            known.append(each.remedy)
    return tuple(Diagnosis(name, " ".join(parts)) for name, parts in sentences.items())


def told_once(found: Iterable[Found]) -> tuple[Race, ...]:
    """Races for the report: the same two lines of one op at one place once, whatever the input."""
    races: dict[tuple[object, ...], Race] = {}
    for each in found:
        race = each.race
        key = (race.phase, race.step, race.layer, race.op, each.hypothesis, each.remedy)
        races.setdefault(key, race)
    return tuple(races.values())
