"""--races and --schedules: what they blame, what they leave alone, and what they cost to misuse."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plant import Edit, plant_in_kernels

from harness.compare import compare
from harness.errors import UsageError
from harness.progress import Progress
from harness.races import Found, difference, schedules, told_once
from harness.report.json import as_json
from harness.report.text import as_text
from harness.request import CompareRequest
from harness.result import Race, Report
from kernels.lift import own_path
from port.device import Incident
from port.host_device import HostDevice

REPAIRED = ("softmax-nan", "decode-rope-pairing", "decode-rope-scaling", "attention-race")
KNOWN = {
    ("prefill", "softmax"): "poisoned",
    ("decode", "q_rope"): "diverged",
    ("decode", "k_rope"): "diverged",
}


def run(**options: Any) -> Report:
    return compare(CompareRequest(**options), Progress(io.StringIO()))


def blamed(report: Report) -> dict[tuple[str, str], str]:
    return {(culprit.phase, culprit.op): culprit.verdict for culprit in report.culprits}


def test_races_blames_decode_attention_beside_the_three_known_and_nothing_else() -> None:
    report = run(races=True)
    assert blamed(report) == {**KNOWN, ("decode", "attention"): "race"}
    racing = {row.input for row in report.results if row.verdict == "race"}
    inputs = {row.input for row in report.results if (row.phase, row.op) == ("decode", "attention")}
    assert racing == inputs
    assert len(inputs) > 1  # the model's and the battery's
    (race,) = report.races
    text = own_path().read_text().splitlines()
    read, write = (
        next(n for n, line in enumerate(text, 1) if words in line)
        for words in ("float score = dot_products[0];", "dot_products[threadIdx.x / 32] = product;")
    )
    assert (race.phase, race.step, race.layer, race.op) == ("decode", 0, 0, "attention")
    assert race.sentence == (
        "pagedAttentionKernel races on shared memory dot_products[0]: thread 32 reads it at line "
        f"{read}, thread 0 writes it at line {write}, and nothing orders the two."
    )
    culprit = report.culprits[-1]
    assert culprit.hypotheses == ("missing-barrier",)
    shown = " ".join(as_text(report).split())
    assert race.sentence in shown
    assert f"put a __syncthreads() after line {read}, before the loop comes round to" in shown
    assert json.loads(as_json(report))["races"][0]["sentence"] == race.sentence


def test_another_schedule_shows_the_race_of_attention_and_none_elsewhere() -> None:
    report = run(schedules=1, op="n_norm|p_norm|rope|mask|softmax|attention|residual|swiglu")
    assert blamed(report) == {**KNOWN, ("decode", "attention"): "race"}
    (race, *_) = report.races
    assert race.sentence.startswith("under schedule ahead (each warp runs as far as its barriers")
    assert " of 4,096 elements of attention are others" in race.sentence
    assert "the first, at [0,32]" in race.sentence
    assert report.culprits[-1].hypotheses == ("depends-on-schedule",)
    attention = next(row for row in report.results if row.op == "attention")
    assert attention.impossible == 0  # its values are those of the benign schedule


def test_with_all_repairs_nothing_is_found() -> None:
    report = run(races=True, schedules=1, repairs=REPAIRED, op="softmax|attention")
    assert blamed(report) == {}
    assert report.races == ()
    assert report.exit_code == 0


def test_a_race_beside_wrong_values_is_told_in_the_note(tmp_path: Path) -> None:
    merge = (
        "expf(m_b - m_new)));\n        }\n        __syncthreads();\n    }\n    input[blockIdx.x * "
    )
    kernels = plant_in_kernels(
        tmp_path,
        Edit(f"{merge}num_tokens", f"{merge.replace('__syncthreads();', '')}num_tokens"),
    )
    report = run(races=True, kernels=kernels, phase="prefill", op="^softmax$", battery=False)
    assert blamed(report) == {("prefill", "softmax"): "diverged"}
    row = next(row for row in report.results if row.op == "softmax")
    assert "softmaxKernel races on shared memory" in (row.note or "")
    assert {race.op for race in report.races} == {"softmax"}
    assert all("softmaxKernel" in race.sentence for race in report.races)


def test_a_race_in_a_users_norm_is_blamed_on_the_norms(tmp_path: Path) -> None:
    total = "rms_vector[0] / 2048.0 + 1e-5);\n        }\n        __syncthreads();"
    kernels = plant_in_kernels(tmp_path, Edit(total, total.replace("__syncthreads();", "")))
    report = run(races=True, kernels=kernels, phase="prefill", op="n_norm|p_norm", battery=False)
    failing = {row.op for row in report.results if not row}
    assert failing == {"attn_norm", "mlp_norm"}
    assert {race.op for race in report.races} == failing
    assert "rms_vector" in report.races[0].sentence


@pytest.mark.parametrize("options", [{"races": True}, {"schedules": 2}])
def test_races_need_the_host_and_isolated_mode(options: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=r"--device host \(got cuda.*compute-sanitizer --tool race"
    ):
        CompareRequest(device="cuda", **options)
    with pytest.raises(UsageError, match="--mode isolated"):
        CompareRequest(mode="propagated", **options)
    command = CompareRequest(**options).command
    assert command.endswith("--races" if "races" in options else "--schedules 2")


def test_schedules_begin_with_the_one_that_shows_most() -> None:
    assert schedules(0) == ()
    assert schedules(1) == ("ahead",)
    assert schedules(5) == ("ahead", "reversed", "ahead-reversed", "random:1", "random:2")
    with pytest.raises(UsageError, match="--schedules must be 1 or more"):
        CompareRequest(schedules=-1)


def test_a_difference_is_told_with_its_place_and_both_values() -> None:
    benign = np.full((2, 3), 0x3F80, np.uint16)  # 1.0
    assert difference("reversed", "softmax", benign, benign.copy()) is None
    other = benign.copy()
    other[1, 2] = 0x4000  # 2.0
    found = difference("reversed", "softmax", benign, other)
    assert found is not None
    assert "1 of 6 elements of softmax" in found.message
    assert "at [1,2], is 2 and was 1" in found.message


def test_the_report_tells_a_pair_of_lines_once() -> None:
    def found(sentence: str, layer: int, remedy: str = "a barrier") -> Found:
        return Found(Race("decode", 0, layer, "attention", sentence), "missing-barrier", remedy)

    races = told_once([found("a", 0), found("b", 0), found("c", 1), found("d", 0, "another")])
    assert [race.sentence for race in races] == ["a", "c", "d"]


def test_the_host_device_tells_races_as_incidents(tmp_path: Path) -> None:
    from kernels.lift import Launch, lift_text

    text = (
        "__global__ void k(int *x) { x[0] = threadIdx.x + blockIdx.x; }\n"
        "void go(int *x) { k<<<1, 1>>>(x); }\n"
    )
    device = HostDevice(lift_text(text, tmp_path / "user.cu"), races=True)
    told: list[Incident] = []
    device.on_incident = told.append
    x = device.malloc(64, "x")
    device.launch(Launch("k", (1, 1, 1), (1, 1, 1), (x,)))
    assert told == []
    device.launch(Launch("k", (1, 1, 1), (2, 1, 1), (x,)))
    device.launch(Launch("k", (2, 1, 1), (1, 1, 1), (x,)))
    assert [(each.kind, each.line) for each in told] == [("race", 1), ("block-race", 1)]
    device.schedule = "ahead"
    device.launch(Launch("k", (1, 1, 1), (2, 1, 1), (x,)))
    assert len(told) == 2  # looked for under the benign schedule only
    assert device.launches == 4
