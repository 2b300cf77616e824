"""The claims: each is settled by a run, and goes the other way on an engine where it is not so."""

from __future__ import annotations

import io
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plant import Edit, plant_in_kernels, plant_in_port

import harness.dry_run
import port.main
from harness.claims import NOT_MEASURABLE, Claim, ClaimsReport, ClaimsRequest, claims
from harness.cli import main
from harness.dry_run import DryRun
from harness.errors import UsageError
from harness.model_file import model_file
from harness.progress import Progress
from harness.report.claims import as_json, as_text
from harness.report.plot import draw_angles
from harness.rotation import measure
from kernels.lift import lift
from port.device import MemcpyKind
from reference.checkpoint import open_checkpoint


def run(**options: Any) -> ClaimsReport:
    return claims(ClaimsRequest(device="host", **options), Progress(io.StringIO()))


@pytest.fixture(scope="module")
def report() -> ClaimsReport:
    return run()


def claim(report: ClaimsReport, name: str) -> Claim:
    return next(each for each in report.claims if each.name == name)


# --- on upstream's engine -------------------------------------------------------------------------


def test_upstreams_engine_is_settled_as_measured(report: ClaimsReport) -> None:
    assert {each.name: each.verdict for each in report.claims} == {
        "rope-angles": "refuted",
        "softmax-strides": "refuted",
        "softmax-decode-unused": "holds",
        "block-table-copies": "holds",
        "length-plus-one": "holds",
        "block-at-offset-0": "holds",
        "no-mask-in-decode": "holds",
        "v-not-rotated": "holds",
        "argmax-on-the-cpu": "holds",
        "test-lists-unused": NOT_MEASURABLE,
    }
    assert all(each.figures for each in report.claims)
    assert report.exit_code == 0


def test_the_angles_agree_up_to_index_14_and_differ_from_15_on(report: ClaimsReport) -> None:
    rows = report.angles
    assert [row.index for row in rows if row.agrees] == list(range(15))
    for row in rows:
        assert row.prefill_pair == (row.index, row.index + 32)
        assert row.decode_pair == (2 * row.index, 2 * row.index + 1)
        plain = 500000 ** (-row.index / 32)
        assert row.decode_frequency == pytest.approx(plain, rel=2e-5)
        assert row.prefill_frequency == pytest.approx(row.llama3, rel=2e-5)
        angle = math.remainder(1000 * plain, 2 * math.pi)
        assert row.decode_angle == pytest.approx(angle, abs=1e-4)
    assert rows[31].decode_frequency / rows[31].prefill_frequency == pytest.approx(32, rel=1e-4)


@pytest.mark.parametrize("position", [1, 16, 2047])
def test_they_do_at_every_position(position: int) -> None:
    rows = run(position=position).angles
    assert [row.index for row in rows if row.agrees] == list(range(15))


def test_only_the_matching_layout_is_right(report: ClaimsReport) -> None:
    figures = claim(report, "softmax-strides").figures
    assert list(figures.values()) == [0, 961, 961, 0]  # all rows but the first, where both agree


def test_the_table_is_copied_16_times_16_kib_a_step(report: ClaimsReport) -> None:
    figures = claim(report, "block-table-copies").figures
    assert figures["bytes a copy"] == 16384
    assert figures["copies a decode step"] == 16
    assert figures["bytes a decode step"] == 262144
    assert figures["time"] == "not measured: no GPU"


# --- on repaired and on broken engines ------------------------------------------------------------


def test_a_repair_of_the_scaling_makes_the_angles_agree() -> None:
    repaired = run(repairs=("decode-rope-scaling", "decode-rope-pairing"))
    assert claim(repaired, "rope-angles").verdict == "holds"
    assert all(row.agrees and row.decode_pair == row.prefill_pair for row in repaired.angles)


STRIDE = "input[blockIdx.x * MAX_SEQ_LEN + threadIdx.x]"


def test_equal_strides_are_seen(tmp_path: Path) -> None:
    text = lift().text.replace(STRIDE, "input[blockIdx.x * len + threadIdx.x]")
    settled = claim(run(kernels=plant_in_kernels(tmp_path, text=text)), "softmax-strides")
    assert list(settled.figures.values()) == [0, 961, 0, 961]
    assert settled.verdict == "holds"
    assert settled.found == "right are only prefill on dense rows and decode on dense rows"


def test_attention_that_reads_beyond_its_length_is_seen(tmp_path: Path) -> None:
    edit = Edit("seq_lens[active_slot];", "seq_lens[active_slot] + 1;")
    broken = run(kernels=plant_in_kernels(tmp_path, edit))
    assert claim(broken, "length-plus-one").verdict == "refuted"
    assert claim(broken, "no-mask-in-decode").verdict == "refuted"
    assert "the figures tell" in claim(broken, "no-mask-in-decode").found


_ROPE = "call.rope_decode(e.k_proj_batched_buffer + row * KV_DIM * BF16, position, KV_DIM)"
_ATTENTION = "        # 881-900: output projection.\n"
_LENGTHS = "e.current_prompt_len[slot] + 1 for slot in active_slots]"
_OFFSET = "if token_in_block_idx == 0:"
_UPLOAD = (
    "        # 876: the WHOLE block table to the device, in every layer.\n"
    "        e.upload_block_table()\n"
)
PLANTED = {
    "v-not-rotated": Edit(_ROPE, _ROPE.replace("k_proj_batched", "v_proj_batched")),
    "no-mask-in-decode": Edit(
        _ATTENTION, f"        call.causal_mask(e.prefill_attn_scores, m)\n{_ATTENTION}"
    ),
    "softmax-decode-unused": Edit(
        _ATTENTION, f"        call.softmax_decode(e.prefill_attn_scores, m)\n{_ATTENTION}"
    ),
    "length-plus-one": Edit(_LENGTHS, _LENGTHS.replace("+ 1", "+ 2")),
    "block-at-offset-0": Edit(_OFFSET, "if token_in_block_idx == 1:"),
    "block-table-copies": Edit(_UPLOAD, ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_engine_where_it_is_not_so_refutes_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_port(monkeypatch, "decode_step", PLANTED[name])
    monkeypatch.setattr(harness.dry_run, "decode_step", port.main.decode_step)
    refuted = {each.name for each in run().claims if each.verdict == "refuted"}
    assert refuted == {"rope-angles", "softmax-strides", name}


# --- measuring ------------------------------------------------------------------------------------


def test_a_kernel_that_turns_no_pairs_is_told() -> None:
    with pytest.raises(ValueError, match="turned"):
        measure(lambda row: row)
    with pytest.raises(ValueError, match="pairs"):
        measure(lambda row: row + np.roll(row.reshape(32, 64), 1, axis=1).reshape(-1))


def test_angles_are_measured_far_finer_than_bf16(report: ClaimsReport) -> None:
    for row in report.angles:
        # a bf16 cosine alone would leave 2^-9
        assert abs(row.prefill_frequency - row.llama3) <= 2.0**-15 * row.llama3


def test_a_dry_run_knows_each_call_and_ends_no_sequence() -> None:
    dry = DryRun(lift(), model_file(open_checkpoint("synthetic", layers=2)), ((1, 2, 3), (4,)))
    dry.prefill_all()
    stage = dry.step()
    assert [each.phase for each in dry.stages] == ["prefill", "prefill", "decode"]
    assert (stage.slots, stage.positions, stage.seq_lens) == ((0, 1), (3, 1), (4, 2))
    assert stage.counts()["gemm_ex"] == 2 * 7 + 1
    assert stage.counts()["rmsNormKernel"] == 2 * 2 + 1
    assert dry.stages[0].popped == 2
    log = dry.device.log
    assert log.copied_bytes(MemcpyKind.DEVICE_TO_HOST) == (3 + 1 + 2) * 128256 * 2
    assert dry.engine.generated_tokens == [[0, 0], [0, 0]]


# --- reports --------------------------------------------------------------------------------------


def test_the_text_shows_every_claim_and_the_table_of_angles(report: ClaimsReport) -> None:
    text = as_text(report)
    for each in report.claims:
        assert f"\n{each.name}: {each.verdict}\n" in text
    assert sum(line.endswith(("agree", "differ")) for line in text.splitlines()) == 32
    assert "time: not measured: no GPU" in text
    assert "10 claims: refuted 2, holds 7, not measurable here 1" in text
    assert as_text(report, verbosity=-1).count("\n") == 10
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_json_reads_back(report: ClaimsReport) -> None:
    read = json.loads(as_json(report))
    assert [each["name"] for each in read["claims"]] == [each.name for each in report.claims]
    assert len(read["angles"]) == 32
    assert read["angles"][15]["agrees"] is False
    assert read["exit_code"] == 0


def test_the_verb_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "claims.json"
    assert main(["claims", "--device", "host", "--format", "json", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"Wrote {path}\n"
    assert json.loads(path.read_text())["position"] == 1000


@pytest.mark.parametrize("position", [0, -1, 2048])
def test_a_position_must_turn_something(position: int) -> None:
    with pytest.raises(UsageError, match="--position must be 1 to 2047"):
        ClaimsRequest(position=position)


# --- the plot -------------------------------------------------------------------------------------


def test_a_plot_without_matplotlib_is_a_mistake_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["claims", "--plot", "angles.png"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "needs matplotlib" in error
    assert "[plot]" in error


def test_a_plot_must_be_a_png() -> None:
    with pytest.raises(UsageError, match=r"--plot must name a \.png file"):
        ClaimsRequest(plot=Path("angles.svg"))


class Axes:
    """What the drawing asks of matplotlib's axes."""

    def __init__(self) -> None:
        self.drawn: dict[str, tuple[list[int], list[float]]] = {}

    def semilogy(self, x: list[int], y: list[float], *_: Any, label: str, **__: Any) -> None:
        self.drawn[label] = (x, y)

    def legend(self) -> None: ...

    set_title = set_ylabel = set_xlabel = lambda self, text: None


class Figure:
    """Stands in for matplotlib's, which is not installed everywhere."""

    made: Figure

    def __init__(self, **_: Any) -> None:
        Figure.made = self
        self.axes = (Axes(), Axes())
        self.saved: Path | None = None

    def subplots(self, rows: int, columns: int, sharex: bool) -> tuple[Axes, Axes]:
        return self.axes

    def savefig(self, path: Path, dpi: int) -> None:
        self.saved = path


def test_the_plot_draws_both_phases_and_their_distance(
    report: ClaimsReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, members in (
        ("matplotlib", {}),
        ("matplotlib.figure", {"Figure": Figure}),
        ("matplotlib.backends", {}),
        ("matplotlib.backends.backend_agg", {"FigureCanvasAgg": lambda figure: None}),
    ):
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    draw_angles(report, Path("angles.png"))
    above, below = Figure.made.axes
    assert set(above.drawn) == {"Llama 3", "prefill", "decode"}
    assert above.drawn["decode"][1] == [row.decode_frequency for row in report.angles]
    assert below.drawn["difference"] == (list(range(32)), [r.difference for r in report.angles])
    assert Figure.made.saved == Path("angles.png")
