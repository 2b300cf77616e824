"""--explain: each op's lesson holds both programs' text and this run's numbers."""

from __future__ import annotations

import io
from typing import Any

import pytest

from harness.cli import main
from harness.compare import compare
from harness.errors import UsageError
from harness.explain import engine_text, explain, reference_text
from harness.progress import Progress
from harness.repairs import apply_repairs
from harness.request import CompareRequest
from harness.result import Report
from harness.taps import TAPS
from kernels.lift import lift

OPS = [(phase, op) for phase, taps in TAPS.items() for op in taps]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BY_GEMM = (*PROJECTIONS, "scores", "attn_v", "logits")


def run(**options: Any) -> Report:
    return compare(CompareRequest(**options), Progress(io.StringIO()))


@pytest.fixture(scope="module")
def report() -> Report:
    return run(op="^(softmax|q_rope)$", battery=False)


@pytest.mark.parametrize(("phase", "op"), OPS)
def test_every_op_has_the_ports_lines_its_kernel_and_a_reference(phase: str, op: str) -> None:
    text = engine_text(phase, op, lift())
    assert f'"{op}"' in text
    assert ("e.gemm(" in text) == (op in BY_GEMM)
    assert ("__global__" in text) == (op not in (*BY_GEMM, "kv_write", "argmax"))
    assert ("def argmax" in text) == (op == "argmax")
    assert reference_text(op).startswith("def ")


def test_the_kernel_comes_with_the_comment_above_it() -> None:
    text = engine_text("prefill", "softmax", lift())
    assert "// Online softmax as a tree." in text
    assert text.rstrip().endswith("}")
    # and each phase has its own
    assert "ropeKernel_llama3" in engine_text("prefill", "q_rope", lift())
    assert "ropeKernelDecode" in engine_text("decode", "q_rope", lift())


def test_a_repaired_op_shows_what_ran() -> None:
    repairs = ("decode-rope-pairing", "decode-rope-scaling")
    text = engine_text("decode", "k_rope", apply_repairs(lift(), repairs), repairs)
    assert "return head * 64 + pair + 32 * which;" in text
    assert "0.010989529f" in text
    assert text.count("__global__ void ropeKernelDecode") == 1
    assert "the repair" not in engine_text("prefill", "softmax", lift(), repairs)


def test_two_columns_where_they_fit_and_one_after_the_other_where_not(report: Report) -> None:
    wide = explain("softmax", report, lift(), 240).splitlines()
    assert any("port (prefill" in line and "reference (" in line for line in wide)
    narrow = explain("softmax", report, lift(), 100).splitlines()
    assert not any("port (prefill" in line and "reference (" in line for line in narrow)
    both = explain("q_rope", report, lift(), 100)
    assert both.count("def rope(") == 1  # told once, though two phases are shown
    assert (
        both.index("ropeKernel_llama3") < both.index("ropeKernelDecode") < both.index("def rope(")
    )


def test_the_numbers_are_this_runs(report: Report) -> None:
    text = explain("softmax", report, lift(), 100)
    assert "main.cpp:331, kernels.cu:257-309" in text
    assert "prefill, layer 0, model: poisoned, 12,992 of 15,520 impossible" in text
    assert "got nan" in text
    assert "not compared; add --op" in explain("logits", report, lift(), 100)


def test_the_lesson_follows_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--op", "^mask$", "--phase", "prefill", "--no-battery", "--explain", "mask"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.index("nothing failed") < out.index("--- mask ---") < out.index("this run:")
    assert "if (column > row) {" in out


def test_an_op_without_a_lesson_is_a_mistake_that_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'softmax'"):
        CompareRequest(explain="softmx")
    with pytest.raises(UsageError, match="--explain must name an op"):
        CompareRequest(explain="schedule")


def test_it_needs_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--explain", "mask", "--format", "json"]) == 2
    assert "--explain needs --format text" in capsys.readouterr().err
