"""compare, end to end on the CPU: what it blames, what it leaves alone, and what it reports."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from harness.compare import compare
from harness.progress import Progress
from harness.report.json import as_json
from harness.request import CompareRequest
from harness.result import Report

SOFTMAX = ("prefill", "softmax")
DECODE_ROPE = {("decode", "q_rope"), ("decode", "k_rope")}


def run(**options: Any) -> Report:
    return compare(CompareRequest(**options), Progress(io.StringIO()))


def blamed(report: Report) -> dict[tuple[str, str], str]:
    return {(culprit.phase, culprit.op): culprit.verdict for culprit in report.culprits}


def test_layer_0_blames_softmax_and_decode_rope_and_nothing_else() -> None:
    report = run()
    assert blamed(report) == {
        SOFTMAX: "poisoned",
        ("decode", "q_rope"): "diverged",
        ("decode", "k_rope"): "diverged",
    }
    assert report.exit_code == 1
    assert report.first_culprit is report.culprits[0]
    assert report.strays == ()
    softmax = next(row for row in report.results if row.op == "softmax")
    assert softmax.first_nan == (0, 0, 0)
    assert softmax.shape == (32, 17, 17)
    # Rows 0..13 of 17 are NaN in every head, and of 14 rows 0..11 (8 + 4): the aligned pairs.
    assert softmax.impossible == 32 * (14 * 17 + 12 * 14)
    battery = {row.input for row in report.results} - {"model"}
    assert any(name.startswith("battery-prefill") for name in battery)
    assert any(name.startswith("battery-decode") for name in battery)


@pytest.mark.parametrize("seed", range(1, 10))
def test_other_seeds_blame_the_same(seed: int) -> None:
    report = run(phase="prefill", seed=seed)
    assert blamed(report) == {SOFTMAX: "poisoned"}


def test_every_layer_and_what_is_around_them_in_both_phases() -> None:
    report = run(layers=tuple(range(16)), all_layers=True, battery=False)
    failing = {(row.phase, row.op, row.layer) for row in report.results if row.failed(strict=False)}
    expected = {("prefill", "softmax", layer) for layer in range(16)}
    expected |= {("decode", op, layer) for op in ("q_rope", "k_rope") for layer in range(16)}
    assert failing == expected
    around = {row.op for row in report.results if row.layer is None}
    assert around == {"embed", "final_norm", "logits", "argmax", "schedule", "block_table"}


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33])
def test_prompts_of_awkward_lengths(tokens: int) -> None:
    prompt = tuple(range(1000, 1000 + tokens))
    report = run(prompt_ids=(prompt, prompt[:1]), battery=False)
    softmax = {SOFTMAX} if tokens > 3 else set()
    assert set(blamed(report)) == softmax | DECODE_ROPE


def test_a_prompt_of_512_tokens() -> None:
    prompt = tuple((37 * i) % 128000 for i in range(512))
    report = run(prompt_ids=(prompt,), battery=False)
    assert set(blamed(report)) == {SOFTMAX} | DECODE_ROPE


def test_a_slot_that_ended_and_a_third_prompt_in_its_place() -> None:
    prompts = ((5, 6, 7), (8, 9), (10, 11, 12))
    ends = ((271, 128009, 271), (271, 272, 273))
    report = run(prompt_ids=prompts, decode_ids=ends, steps=2, battery=False)
    assert set(blamed(report)) == DECODE_ROPE
    report = run(prompt_ids=prompts[:2], decode_ids=ends, steps=3, battery=False)
    assert set(blamed(report)) == DECODE_ROPE
    alone = [row for row in report.results if row.op == "attention" and row.step]
    assert all(row.shape == (1, 2048) for row in alone)


def test_an_end_token_from_prefill_shows_in_the_schedule() -> None:
    report = run(decode_ids=((128009,), (271,)), op="schedule", battery=False)
    assert blamed(report)[("prefill", "schedule")] == "diverged"


def test_op_runs_only_what_it_names() -> None:
    report = run(op="^softmax$", battery=False)
    assert {row.op for row in report.results} == {"softmax", "schedule", "block_table"}


def test_fail_fast_stops_after_the_first_failing_stage() -> None:
    report = run(layers=(0, 1, 2), op="^softmax$", battery=False, phase="prefill", fail_fast=True)
    assert {row.layer for row in report.results if row.op == "softmax"} == {0}


def test_json_is_schema_1() -> None:
    report = run(op="softmax|q_rope", battery=False)
    data = json.loads(as_json(report))
    assert list(data) == [
        "schema", "command", "device", "model", "repairs", "kernels", "mode", "results",
        "culprits", "first_culprit", "races", "strays", "tokens", "counts", "seconds", "exit_code",
    ]  # fmt: skip
    assert list(data["results"][0]) == [
        "phase", "step", "slot", "layer", "op", "input", "verdict", "shape", "impossible",
        "improbable", "elements", "worst", "first_nan", "passing_tolerance", "max_abs", "rel_l2",
        "cosine", "max_ulp", "noise_floor", "propagated", "note", "diagnosis", "upstream",
    ]  # fmt: skip
    assert data["schema"] == 1
    assert data["model"] == {"kind": "synthetic", "seed": 0, "layers": 16}
    softmax = next(row for row in data["results"] if row["op"] == "softmax")
    assert softmax["worst"]["got"] == "nan"
    assert softmax["passing_tolerance"] == "inf"


def test_propagated_mode_reports_beside_the_noise_floor_and_blames_no_op() -> None:
    report = run(layers=(0,), mode="propagated", phase="prefill")
    assert report.culprits == ()
    rows = {row.op: row for row in report.results}
    assert rows["attn_norm"].propagated == pytest.approx(1, abs=0.05)
    assert rows["scores"].propagated == pytest.approx(1, abs=0.5)
    assert rows["softmax"].propagated == float("inf")
    assert rows["mlp_residual"].propagated == float("inf")


def test_a_folder_saved_by_transformers_gets_the_same_verdicts(saved_model: Any) -> None:
    reports = [
        run(model=str(path), layers=(0, 1), phase="prefill", battery=False)
        for path in (saved_model.whole, saved_model.sharded)
    ]
    for report in reports:
        assert blamed(report) == {SOFTMAX: "poisoned"}
        assert report.model.layers == 2
    first, second = (
        [(row.op, row.layer, row.verdict, row.impossible) for row in report.results]
        for report in reports
    )
    assert first == second


def test_softmax_of_a_users_file_is_judged_by_the_same_text(tmp_path: Path) -> None:
    from plant import Edit, plant_in_kernels

    guarded = Edit(
        "float m_new = fmaxf(m_a, m_b);\n            m[threadIdx.x] = m_new;\n"
        "            d[threadIdx.x] = __fmaf_rn(d[threadIdx.x], expf(m_a - m_new),\n"
        "                                       __fmul_rn(d[threadIdx.x + i], "
        "expf(m_b - m_new)));\n        "
        "}\n        __syncthreads();\n    }\n    input[blockIdx.x * num_tokens",
        "float m_new = fmaxf(m_a, m_b);\n            m[threadIdx.x] = m_new;\n"
        "            if (m_new > -INFINITY) d[threadIdx.x] = __fmaf_rn(d[threadIdx.x], "
        "expf(m_a - m_new), __fmul_rn(d[threadIdx.x + i], expf(m_b - m_new)));\n        "
        "}\n        __syncthreads();\n    }\n    input[blockIdx.x * num_tokens",
    )
    kernels = plant_in_kernels(tmp_path, guarded)
    report = run(op="^softmax$", phase="prefill", kernels=kernels)
    assert blamed(report) == {}
    assert report.exit_code == 0
    assert report.kernels.path == str(kernels)
