"""Faults planted in the port's control flow are found, and the right tap is named."""

from __future__ import annotations

import io

import pytest
from control_faults import CONTROL_FAULTS, ControlFault
from plant import plant_in_port

from harness.compare import compare
from harness.progress import Progress
from harness.request import CompareRequest
from harness.result import Report

# What upstream's own decode RoPE is blamed for, with or without a planted fault.
UPSTREAM = {("prefill", "softmax"), ("decode", "q_rope"), ("decode", "k_rope")}
CONTROL = "^(schedule|block_table|kv_write|embed|.*rope|attention)$"


def run(fault: ControlFault) -> Report:
    prompts = tuple(tuple(range(100, 100 + length)) for length in fault.prompts)
    request = CompareRequest(
        layers=(fault.layer,),
        op=CONTROL,
        prompt_ids=prompts,
        decode_ids=fault.decode_ids,
        steps=fault.steps,
        battery=False,
    )
    return compare(request, Progress(io.StringIO()))


def blamed(report: Report) -> set[tuple[str, str]]:
    return {(culprit.phase, culprit.op) for culprit in report.culprits}


@pytest.mark.parametrize("fault", CONTROL_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_control_fault_is_blamed_on_its_tap(
    fault: ControlFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = blamed(run(fault))
    assert clean <= UPSTREAM
    plant_in_port(monkeypatch, fault.function, *fault.edits)
    found = blamed(run(fault))
    assert fault.blamed <= found
    assert found <= fault.blamed | fault.also | clean
