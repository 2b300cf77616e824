"""What lay around a failing op, for its diagnosis: other taps, weights, steps and sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.hypotheses import Context, Evidence, diagnose
from harness.probe import Case, Observation
from harness.result import Diagnosis
from harness.taps import DECODE
from reference.checkpoint import Checkpoint, CheckpointError


def diagnoses_of(
    observations: Sequence[Observation], cases: Sequence[Case], checkpoint: Checkpoint
) -> tuple[Diagnosis, ...]:
    """The hypotheses that explain every one of these observations of one op, in the first's words.

    cases: all of the same layer, whose results may be what the op took or left by mistake.
    """
    found: tuple[Diagnosis, ...] | None = None
    for observation in observations:
        if observation.got is None:
            return ()
        here = diagnose(_evidence(observation, cases, checkpoint))
        names = {each.hypothesis for each in here}
        found = here if found is None else tuple(d for d in found if d.hypothesis in names)
        if not found:
            return ()
    return found or ()


def _evidence(observation: Observation, cases: Sequence[Case], checkpoint: Checkpoint) -> Evidence:
    case = observation.case
    assert observation.got is not None
    around = [each for each in cases if each.event is case.event and each.tap.op != case.tap.op]
    earlier: dict[str, list[Tensor]] = {}
    for each in cases:
        if each.event.phase == case.event.phase and each.event.index < case.event.index:
            earlier.setdefault(each.tap.op, []).append(each.ideal)
    return Evidence(
        phase=case.event.phase,
        op=case.tap.op,
        layer=case.layer,
        inputs=case.inputs,
        real=case.real,
        got=observation.got,
        before=observation.before,
        upstream=case.tap.upstream,
        context=Context(
            weight=lambda name: _tensor(checkpoint, name),
            rows=lambda name, ids: _rows(checkpoint, name, ids),
            taps={each.tap.op: each.ideal for each in around},
            earlier=earlier,
            slots=case.event.slots,
            positions=case.event.positions,
            table=case.event.table,
            other_slots=_other_slots(case),
            unrotated=_unrotated(case, cases),
            changes=observation.changes,
        ),
    )


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor | None:
    try:
        return checkpoint.tensor(name)
    except (KeyError, CheckpointError):
        return None


def _rows(checkpoint: Checkpoint, name: str, ids: Tensor) -> Tensor | None:
    entry = checkpoint.header().get(name)
    if entry is None:
        return None
    if len(entry["shape"]) == 1:  # a norm's weight: its elements are its rows
        whole = _tensor(checkpoint, name)
        return None if whole is None else whole[ids]
    try:
        return checkpoint.rows(name, ids)
    except (KeyError, IndexError, CheckpointError):
        return None


def _other_slots(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """The pages that a row of decode attention could take for its own."""
    if "keys" not in case.inputs:
        return {}
    return {
        f"slot {slot}": (case.inputs["keys"][row], case.inputs["values"][row])
        for row, slot in enumerate(case.event.slots)
    }


def _unrotated(case: Case, cases: Sequence[Case]) -> list[Tensor] | None:
    """The keys of each row's sequence as k_proj made them, before RoPE."""
    if "keys" not in case.inputs:
        return None
    made = [each for each in cases if each.tap.op == "k_proj"]
    found = []
    for sequence in case.event.sequences:
        parts = []
        for each in made:
            event = each.event
            if event.phase == DECODE and event.index > case.event.index:
                continue
            if sequence in event.sequences:
                row = event.sequences.index(sequence)
                parts.append(each.ideal[row : row + 1] if event.phase == DECODE else each.ideal)
        if not parts:
            return None
        found.append(torch.cat(parts))
    if [len(rows) for rows in found] != [len(keys) for keys in case.inputs["keys"]]:
        return None
    return found
