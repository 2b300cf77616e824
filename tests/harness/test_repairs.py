"""Repairs by name: how they are asked for, where they fit, and what the repaired engine is."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from plant import Edit, plant_in_kernels

import reference.checkpoint
from harness.compare import compare
from harness.errors import UsageError
from harness.generate import GenerateRequest, generate
from harness.progress import Progress
from harness.repairs import REPAIRS, apply_repairs, parse_repairs, repair_path, repairs_of
from harness.report.reproduce import reproduce
from harness.request import CompareRequest
from harness.result import Report
from harness.taps import TAPS
from kernels.errors import KernelsError
from kernels.lift import lift
from reference.checkpoint import Synthetic

ALL = tuple(REPAIRS)
EOT = 128009
CONTROL = "^(schedule|block_table)$"
KERNELS: dict[str, Any] = {"op": "^(softmax|.*rope|attention)$", "battery": False}


def run(**options: Any) -> Report:
    return compare(CompareRequest(**options), Progress(io.StringIO()))


def blamed(report: Report) -> set[tuple[str, str]]:
    return {(culprit.phase, culprit.op) for culprit in report.culprits}


# --- names ----------------------------------------------------------------------------------------


def test_names_come_in_lists_and_each_counts_once() -> None:
    lists = ["decode-rope-scaling, softmax-nan", "softmax-nan"]
    assert parse_repairs(lists) == ("softmax-nan", "decode-rope-scaling")
    assert parse_repairs([]) == ()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("softmax", "softmax-nan"), ("rope-scaling", "decode-rope-scaling"), ("eos", "prefill-eos")],
)
def test_an_unknown_repair_is_a_mistake_that_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {nearest}"):
        parse_repairs([name])
    with pytest.raises(UsageError, match=f"did you mean {nearest}"):
        CompareRequest(repairs=(name,))


def test_an_empty_name_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="got ''"):
        parse_repairs(["softmax-nan,"])


def test_each_repair_declares_ops_that_exist_and_files_that_are_there() -> None:
    for repair in REPAIRS.values():
        for phase, op in repair.ops:
            assert op in TAPS[phase] or op in ("schedule", "block_table")
            assert repair.name in repairs_of(phase, op)
        assert all(repair_path(file).is_file() for file in repair.files)
        assert (repair.host_call is None) == (not repair.files)
    assert repairs_of("decode", "q_rope") == ("decode-rope-pairing", "decode-rope-scaling")
    assert repairs_of("prefill", "q_rope") == ()


# --- kernels --------------------------------------------------------------------------------------


def test_the_order_of_the_names_is_no_matter() -> None:
    texts = {
        apply_repairs(lift(), names).device_text
        for names in itertools.permutations(("decode-rope-scaling", "softmax-nan", ALL[1]))
    }
    assert len(texts) == 1
    assert apply_repairs(lift(), ()).device_text == lift().device_text
    assert apply_repairs(lift(), ["prefill-eos"]).device_text == lift().device_text


def test_a_file_that_launches_otherwise_is_refused_with_its_line(tmp_path: Path) -> None:
    launch = "softmaxKernel<<<NUM_Q_HEADS * num_tokens, num_tokens>>>"
    for other in (
        "softmaxKernel<<<NUM_Q_HEADS, num_tokens>>>",
        launch.replace("_tokens>>>", "_tokens + 1>>>"),
    ):
        file = lift(plant_in_kernels(tmp_path, Edit(launch, other)))
        with pytest.raises(KernelsError, match=r"kernels.cu:\d+: softmax must launch <<<\(544, 1"):
            apply_repairs(file, ["softmax-nan"])
        apply_repairs(file, ["decode-rope-pairing"])  # another kernel is none of its business


def test_a_user_file_with_names_of_its_own_is_repaired(tmp_path: Path) -> None:
    text = lift().text.replace("ropeKernelDecode", "spin").replace("softmaxKernel(", "rows(")
    text = text.replace("softmaxKernel<<<", "rows<<<").replace("HEAD_DIM", "HEAD_SIZE")
    kernels = plant_in_kernels(tmp_path, text=text)
    report = run(kernels=kernels, repairs=ALL, **KERNELS)
    assert blamed(report) == set()
    assert report.kernels.path == str(kernels)
    assert report.repairs == ALL


# --- the repaired engine --------------------------------------------------------------------------


def test_with_all_repairs_nothing_is_blamed_in_either_phase_or_by_the_battery() -> None:
    report = run(repairs=ALL)
    assert blamed(report) == set()
    assert report.exit_code == 0
    assert report.counts["equivalent"] == 0
    assert any(row.input != "model" for row in report.results)


@pytest.fixture(scope="module")
def before() -> Report:
    return run(**KERNELS)


@pytest.mark.parametrize("name", [name for name in REPAIRS if name != "prefill-eos"])
def test_one_repair_alone_changes_nothing_but_its_own_ops(name: str, before: Report) -> None:
    after = run(repairs=(name,), **KERNELS)
    ops = set(REPAIRS[name].ops)
    assert blamed(before) - ops <= blamed(after)
    assert blamed(after) <= blamed(before)
    if name == "softmax-nan":
        assert ("prefill", "softmax") not in blamed(after)
    # neither of decode-rope's repairs is enough, not even at positions 14 and 17
    assert blamed(after) >= {("decode", "q_rope"), ("decode", "k_rope")}


def test_the_command_that_reproduces_keeps_the_repairs() -> None:
    report = run(repairs=("softmax-nan",), op="^q_rope$", phase="decode", battery=False)
    command = reproduce(report.command, report.culprits[0])
    assert command.endswith("--op q_rope --repair softmax-nan --no-battery")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_no_false_alarm_on_the_repaired_engine_for_any_seed(seed: int) -> None:
    report = run(repairs=ALL, seed=seed)
    assert blamed(report) == set()


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 97, 512])
def test_no_false_alarm_on_the_repaired_engine_for_any_length(length: int) -> None:
    prompts = tuple(tuple(range(1000 + slot, 1000 + slot + length)) for slot in range(2))
    report = run(repairs=ALL, prompt_ids=prompts, steps=2)
    assert blamed(report) == set()


# --- prefill-eos ----------------------------------------------------------------------------------

# What decode is forced to take, by slot; the first token of each stands for prefill's.
ENDS_AT_ONCE = {
    "one slot of two": (((7, 8), (9,)), ((EOT, 5), (6, 7))),
    "both slots, nothing left": (((7, 8), (9,)), ((EOT, 5), (EOT, 7))),
    "both slots, prompts left": (((7, 8), (9,), (1, 2, 3), (4,)), ((EOT, 5, 6, 7), (EOT, 7, 8, 9))),
    "end of text, then a refill": (((7, 8), (9,), (1, 2, 3)), ((128001, 5, 6), (6, 7, 8))),
    "twice in one slot": (((7,), (9,), (1,), (2,)), ((EOT, EOT, 6, 7), (6, 7, 8))),
}


@pytest.mark.parametrize("what", ENDS_AT_ONCE)
def test_an_end_token_of_prefill_ends_the_sequence_only_with_the_repair(what: str) -> None:
    prompts, forced = ENDS_AT_ONCE[what]
    options: dict[str, Any] = {
        "prompt_ids": prompts,
        "decode_ids": forced,
        "steps": 3,
        "op": CONTROL,
    }
    assert ("prefill", "schedule") in blamed(run(**options))
    assert blamed(run(repairs=("prefill-eos",), **options)) == set()


def test_generate_runs_with_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Synthetic(0, layers=2)
    monkeypatch.setattr(reference.checkpoint, "open_checkpoint", lambda *_, **__: small)
    printed = {}
    for repairs in ((), ("softmax-nan",)):
        out = io.StringIO()
        request = GenerateRequest(
            prompt_ids=((128000, 271, 3923, 374, 220),), max_new_tokens=1, repairs=repairs
        )
        assert generate(request, out) == 0
        printed[repairs] = out.getvalue()
    assert "Output token: nan, token index: 0" in printed[()]
    assert "nan" not in printed["softmax-nan",]
