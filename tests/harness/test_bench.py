"""What `bench` measures, and that what it prints and writes are what it measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from harness.bench import BenchReport, BenchRequest, Floor, TableUploads, Timing, as_text
from harness.cli import main
from harness.errors import UsageError

PREFILL_OPS = [
    "embed", "attn_norm", "q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "kv_write", "scores",
    "mask", "softmax", "attn_v", "o_proj", "attn_residual", "mlp_norm", "gate_proj", "up_proj",
    "swiglu", "down_proj", "mlp_residual", "final_norm", "logits", "argmax",
]  # fmt: skip
DECODE_OPS = [
    "embed", "attn_norm", "q_proj", "k_proj", "v_proj", "q_rope + k_rope", "kv_write", "attention",
    "o_proj", "attn_residual", "mlp_norm", "gate_proj", "up_proj", "swiglu", "down_proj",
    "mlp_residual", "final_norm", "logits", "argmax",
]  # fmt: skip
GPU_ONLY = ("floor", "call_us", "block_table")


def on_a_gpu() -> BenchReport:
    """A report with all figures there can be; nothing is measured."""
    forward = (
        Timing.of("prefill", "port", 1, [16.0, 15.0]),
        Timing.of("decode", "port", 1, [3.0, 3.2, 3.1]),
        Timing.of("decode", "port, graphs", 1, [2.5]),
        Timing.of("prefill", "transformers", 1, [12.4]),
        Timing.of("decode", "transformers", 1, [12.4]),
    )
    ratio: dict[str, float | None] = {
        "prefill": 1.25,
        "decode": 0.25,
        "decode_graph": 0.2,
        "decode_over_floor": 5.0,
        "decode_graph_over_floor": 4.0,
    }
    floor = Floor(2_471_645_184, 4200.0, 0.588)
    calls = {"launch": 4.94, "gemm_ex": 9.4}
    return BenchReport(
        1, "x", "cuda", 8, 16, 17, 2, 5, (), forward, ratio, floor, calls,
        TableUploads(2.9, 0.0625), None,
    )  # fmt: skip


def test_bench_measures_every_op_and_both_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One layer, one repeat, on the CPU: the whole verb, its JSON and its ratios."""
    out = tmp_path / "bench.json"
    asked = ["bench", "--device", "host", "--layers", "1", "--repeat", "1", "--format", "json"]
    assert main([*asked, "-o", str(out)]) == 0
    made = json.loads(out.read_text())
    assert made.keys() == {
        "schema", "command", "device", "threads", "layers", "prompt_tokens", "slots", "repeats",
        "ops", "forward", "ratio", "floor", "call_us", "block_table", "fiber_switch_ns",
    }  # fmt: skip
    assert (made["device"], made["layers"], made["prompt_tokens"]) == ("host", 1, 17)
    by_phase = {phase: [t["what"] for t in made["ops"] if t["phase"] == phase] for phase in PHASES}
    assert by_phase == {"prefill": PREFILL_OPS, "decode": DECODE_OPS}
    assert {timing["calls"] for timing in made["ops"]} == {1}
    assert all(0 < t["least"] <= t["median"] <= t["most"] for t in made["ops"] + made["forward"])
    assert [(t["phase"], t["what"]) for t in made["forward"]] == [
        (phase, who) for who in ("port", "transformers") for phase in PHASES
    ]
    medians = [timing["median"] for timing in made["forward"]]
    assert made["ratio"] == {
        "prefill": medians[0] / medians[2],
        "decode": medians[1] / medians[3],
        "decode_graph": None,
        "decode_over_floor": None,
        "decode_graph_over_floor": None,
    }
    assert [made[name] for name in GPU_ONLY] == [None] * 3
    assert 0 < made["fiber_switch_ns"] < 10_000
    assert capsys.readouterr().out == ""


PHASES = ("prefill", "decode")


def test_a_timing_is_the_median_and_its_spread() -> None:
    timing = Timing.of("decode", "port", 1, [5.0, 1.0, 2.0, 9.0])
    assert (timing.median, timing.least, timing.most) == (statistics.median([2.0, 5.0]), 1.0, 9.0)


def test_the_text_tells_a_gpus_floor_calls_and_graphs() -> None:
    text = as_text(on_a_gpu())
    for line in (
        "decode   port, graphs         1      2.500      2.500      2.500",
        "prefill: the port takes 1.25 times transformers' time",
        "decode with graphs: the port takes 0.20 times transformers' time",
        "decode: the port takes 5.00 times the floor",
        "decode with graphs: the port takes 4.00 times the floor",
        "floor: 2.47 GB of weights read once at 4200 GB/s, which copies read and write: 0.588 ms",
        "host, microseconds a call: launch 4.9, gemm_ex 9.4",
        "block table uploads: 6 % of a decode step (2.900 ms without those that change nothing)",
    ):
        assert line in text.splitlines()
    assert "executor" not in text


@pytest.mark.parametrize("repeats", [0, 1001])
def test_repeats_that_can_not_be_are_misuse(repeats: int) -> None:
    with pytest.raises(UsageError, match=rf"--repeat must be 1 to 1000 \(got {repeats}\)"):
        BenchRequest(repeats=repeats)


def test_graphs_without_a_gpu_are_an_error_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--device", "host", "--graph"]) == 2
    assert "--graph needs a GPU (got none); drop it" in capsys.readouterr().err
