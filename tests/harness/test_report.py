"""Reports: what is folded, what is never folded, what a reader finds in the text and the JSON."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest

from harness.report.json import as_json
from harness.report.reproduce import reproduce
from harness.report.rows import folded_rows, ranges
from harness.report.text import QUIET, VERBOSE, as_text
from harness.result import (
    FAILURES,
    MODEL_INPUT,
    VERDICTS,
    Culprit,
    Diagnosis,
    Flip,
    Kernels,
    Model,
    Report,
    Result,
    Stray,
    Tokens,
    Worst,
)
from harness.taps import CONTROL, CONTROL_UPSTREAM, LAYERLESS, TAPS

NAN, INF = math.nan, math.inf
MERGE = Diagnosis("softmax: unguarded merge", "Merging two masked nodes gives exp(-inf + inf).")
PAIRS = Diagnosis("rope: adjacent pairs", "Elements 2i and 2i+1 are rotated instead of i and i+32.")


def tap(phase: str, step: int | None, layer: int | None, op: str, **changes: object) -> Result:
    """A plausible row: right, but for the ops that the engine at hand is known to get wrong."""
    row = Result(
        phase,
        step,
        None,
        layer,
        op,
        MODEL_INPUT,
        "rounding" if op.endswith("proj") else "exact",
        shape=(17, 2048),
        impossible=0,
        improbable=1,
        elements=34816,
        worst=Worst((3, 77), 0.0123, 0.01233, (0.0122, 0.0124)),
        passing_tolerance=1.2e-4,
        max_abs=1.2e-4,
        rel_l2=1.7e-3,
        cosine=0.99999812,
        max_ulp=1,
        noise_floor=1.66e-3,
        upstream=TAPS[phase][op].upstream,
    )
    if (phase, op) == ("prefill", "softmax"):
        row = replace(
            row,
            verdict="poisoned",
            impossible=7616,
            elements=9248,
            first_nan=(0, 0, 0),
            worst=Worst((0, 0, 0), NAN, 1.0, (0.996, 1.0)),
            passing_tolerance=INF,
            rel_l2=NAN,
            cosine=NAN,
            max_ulp=None,
            diagnosis=(MERGE,),
        )
    if phase == "decode" and op.endswith("rope"):
        row = replace(
            row,
            verdict="diverged",
            impossible=3950,
            elements=4096,
            worst=Worst((0, 1, 33), -1.203, 2.41, (2.4, 2.42)),
            passing_tolerance=3.61,
            max_ulp=32000,
            diagnosis=(PAIRS,),
        )
    return replace(row, **changes)  # type: ignore[arg-type]


def run_of(layers: range, steps: int) -> list[Result]:
    """Rows of a whole run in execution order, with three battery inputs at the first layer."""
    rows = []
    for phase, step in [("prefill", None), *(("decode", s) for s in range(steps))]:
        for layer in layers:
            for op in TAPS[phase]:
                if op in LAYERLESS:
                    continue
                rows.append(tap(phase, step, layer, op))
                if layer == layers[0] and step in (None, 0):
                    rows += [tap(phase, step, layer, op, input=f"battery-{n}") for n in (1, 16, 33)]
        rows += [
            Result(phase, step, None, None, op, MODEL_INPUT, "exact", upstream=lines)
            for op in CONTROL
            if (lines := CONTROL_UPSTREAM[phase, op])
        ]
    return rows


def report_of(rows: list[Result], options: str = "--layer 0", **changes: object) -> Report:
    return Report.build(
        command=f"python -m harness compare {options}".strip(),
        device="host",
        model=Model("synthetic", 0, None, 16),
        kernels=Kernels("kernels/kernels.cu", "5e1f" * 16),
        mode="isolated",
        results=rows,
        seconds=12.34,
        **changes,  # type: ignore[arg-type]
    )


def table_of(text: str) -> list[list[str]]:
    """Words of each row of the table, the header's first."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "phase" in line.split()[:1])
    end = next(i for i in range(start, len(lines)) if lines[i][:1] in ("", "+", "T"))
    return [line.split() for line in lines[start:end] if not set(line) <= set("─- ")]


def test_failures_are_all_verdicts_but_three():
    assert set(VERDICTS) - FAILURES == {"exact", "rounding", "equivalent"}
    assert len(VERDICTS) == 10


def test_a_result_refuses_a_verdict_of_another_spelling():
    with pytest.raises(ValueError, match=r"verdict must be one of .*\(got 'Exact'\)"):
        tap("prefill", None, 0, "mask", verdict="Exact")


@pytest.mark.parametrize("verdict", VERDICTS)
def test_exit_code_and_truth_follow_the_verdict(verdict: str):
    row = tap("prefill", None, 0, "mask", verdict=verdict)
    report = report_of([row])
    assert bool(row) is bool(report) is (verdict not in FAILURES)
    assert report.exit_code == (verdict in FAILURES)
    assert report.counts == {v: int(v == verdict) for v in VERDICTS}


def test_equivalent_fails_only_when_strict():
    rows = [tap("prefill", None, 0, "mlp_norm", verdict="equivalent")]
    assert report_of(rows).exit_code == 0
    strict = report_of(rows, "--strict")
    assert strict.exit_code == 1
    assert [c.op for c in strict.culprits] == ["mlp_norm"]


def test_nothing_run_is_never_success():
    report = report_of([])
    assert report.exit_code == 2
    assert set(report.counts) == set(VERDICTS)
    assert "Nothing was run." in as_text(report)


def test_culprits_are_one_an_op_in_execution_order():
    report = report_of(run_of(range(3), 2))
    assert [(c.phase, c.step, c.layer, c.op) for c in report.culprits] == [
        ("prefill", None, 0, "softmax"),
        ("decode", 0, 0, "q_rope"),
        ("decode", 0, 0, "k_rope"),
    ]
    assert report.first_culprit == report.culprits[0]
    assert report.culprits[0].hypotheses == (MERGE.hypothesis,)


def test_a_culprits_hypotheses_explain_all_its_rows_if_any_do():
    both = tap("decode", 0, 0, "q_rope", diagnosis=(MERGE, PAIRS))
    one = tap("decode", 0, 1, "q_rope", diagnosis=(PAIRS,))
    bare = tap("decode", 0, 2, "q_rope", diagnosis=())
    other = tap("decode", 0, 3, "q_rope", diagnosis=(MERGE,))
    assert report_of([both, one, bare]).culprits[0].hypotheses == (PAIRS.hypothesis,)
    assert set(report_of([both, one, other]).culprits[0].hypotheses) == {
        MERGE.hypothesis,
        PAIRS.hypothesis,
    }


# JSON


def test_json_has_the_fields_of_schema_1_in_their_order():
    report = report_of(run_of(range(1), 1))
    data = json.loads(as_json(report))
    assert " ".join(data) == (
        "schema command device model repairs kernels mode results culprits first_culprit races "
        "strays tokens counts seconds exit_code"
    )
    assert " ".join(data["results"][0]) == (
        "phase step slot layer op input verdict shape impossible improbable elements worst "
        "first_nan passing_tolerance max_abs rel_l2 cosine max_ulp noise_floor propagated note "
        "diagnosis upstream"
    )
    assert data["model"] == {"kind": "synthetic", "seed": 0, "layers": 16}
    assert list(data["kernels"]) == ["path", "sha256"]
    assert list(data["results"][0]["worst"]) == ["index", "got", "want", "allowed"]
    assert list(data["culprits"][0]) == ["phase", "step", "layer", "op", "verdict", "hypotheses"]
    assert data["first_culprit"] == data["culprits"][0]
    assert list(data["counts"]) == list(VERDICTS)
    control = next(r for r in data["results"] if r["op"] == "schedule")
    assert control["shape"] is control["impossible"] is control["worst"] is None


def test_a_model_from_a_path_has_no_seed_in_json():
    report = replace(report_of([]), model=Model("checkpoint", None, "llama", 4))
    model = json.loads(as_json(report))["model"]
    assert model == {"kind": "checkpoint", "path": "llama", "layers": 4}
    with pytest.raises(ValueError, match="a seed or a path"):
        Model("checkpoint", None, None, 4)


@pytest.mark.parametrize(("value", "written"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
def test_json_writes_what_is_not_finite_as_a_word(value: float, written: str):
    row = tap("prefill", None, 0, "mask", rel_l2=value, worst=Worst((0,), value, 0.0, (value, 1.0)))
    data = json.loads(as_json(report_of([row])), parse_constant=pytest.fail)["results"][0]
    assert data["rel_l2"] == data["worst"]["got"] == data["worst"]["allowed"][0] == written


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**-24])
def test_json_floats_read_back_the_same(value: float):
    data = json.loads(as_json(report_of([tap("prefill", None, 0, "mask", max_abs=value)])))
    read = data["results"][0]["max_abs"]
    assert read == value
    assert math.copysign(1, read) == math.copysign(1, value)


def test_json_has_one_result_a_line_and_only_ascii():
    rows = run_of(range(2), 1)
    rows[0] = replace(rows[0], note="2\u00d7\u03c0\nover two lines")
    text = as_json(report_of(rows))
    assert text.isascii()
    assert len([line for line in text.splitlines() if '"verdict": ' in line and '"input"' in line])
    assert text.count("\n") < len(rows) + 40
    assert json.loads(text)["results"][0]["note"] == rows[0].note


def test_json_refuses_a_value_that_is_no_plain_one():
    row = tap("prefill", None, 0, "mask", max_abs=1 + 2j)
    with pytest.raises(TypeError, match="plain values"):
        as_json(report_of([row]))


# The rows of the table


def test_ranges_are_written_as_a_reader_would():
    assert ranges([0, 1, 2, 3]) == "0-3"
    assert ranges([5, None, 1, 0, 5]) == "0-1,5"
    assert ranges([None]) == ""


def test_folding_loses_no_result_and_keeps_execution_order():
    rows = run_of(range(4), 3)
    folded = folded_rows(report_of(rows))
    assert sorted(id(r) for row in folded for r in row.results) == sorted(map(id, rows))
    firsts = [rows.index(row.first) for row in folded]
    assert firsts == sorted(firsts)


def test_sixteen_layers_fold_to_one_row_an_op():
    text = as_text(report_of(run_of(range(16), 4), "--layer all --steps 4"))
    _, *rows = table_of(text)
    # 19 ops of prefill and 16 of decode, two of control in each, three culprits' battery rows.
    assert len(rows) == 19 + 16 + 4 + 3
    assert sum("0-15" in row for row in rows) == 19 + 16


def test_a_row_claims_no_place_of_another_row():
    rows = [
        tap(
            "decode",
            step,
            layer,
            "swiglu",
            verdict="diverged" if (step, layer) == (1, 2) else "exact",
        )
        for step in range(3)
        for layer in range(4)
    ]
    folded = folded_rows(report_of(rows))
    places = [
        (step, layer)
        for row in folded
        for step in {r.step for r in row.results}
        for layer in {r.layer for r in row.results}
    ]
    assert len(places) == len(set(places)) == 12


def test_failures_of_different_verdicts_or_reasons_are_not_folded():
    rows = [
        tap("prefill", None, 0, "softmax"),
        tap("prefill", None, 1, "softmax"),
        tap("prefill", None, 2, "softmax", verdict="diverged"),
        tap("prefill", None, 3, "softmax", diagnosis=(PAIRS,)),
        tap("prefill", None, 4, "softmax", verdict="rounding"),
    ]
    folded = folded_rows(report_of(rows))
    assert [ranges(r.layer for r in row.results) for row in folded] == ["0-1", "2", "3", "4"]


def test_slots_that_differ_stay_apart():
    rows = [
        tap("decode", 0, 0, "attention", slot=0),
        tap("decode", 0, 0, "attention", slot=1, verdict="diverged"),
    ]
    text = as_text(report_of(rows))
    header, first, second = table_of(text)
    assert "slot" in header
    assert "exact" in first
    assert "diverged" in second


def test_rows_show_how_a_propagated_error_grows():
    ratios = [1.0, 1.1, 0.9, 1.0, 40.0, 41.0, 700.0, INF, NAN, -NAN]
    rows = [
        tap("decode", 0, layer, "mlp_residual", propagated=ratio)
        for layer, ratio in enumerate(ratios)
    ]
    text = as_text(report_of(rows))
    header, *table = table_of(text)
    assert "floor" in header
    assert [row[2] for row in table] == ["0-3", "4-5", "6", "7", "8-9"]


def test_slots_that_all_pass_fold():
    rows = [
        tap("decode", 0, 0, "attention", slot=0),
        tap("decode", 0, 0, "attention", slot=1, verdict="rounding"),
        tap("decode", 0, 1, "attention"),
        tap("decode", 0, 2, "attention", slot=0, verdict="diverged"),
        tap("decode", 0, 2, "attention", slot=1),
    ]
    folded = folded_rows(report_of(rows))
    assert [(row.slot, ranges(r.layer for r in row.results), row.verdict) for row in folded] == [
        (None, "0-1", "rounding"),
        (0, "2", "diverged"),
        (1, "2", "exact"),
    ]


def test_battery_rows_that_pass_join_their_op_and_those_that_fail_do_not():
    rows = [
        tap("prefill", None, 0, "swiglu"),
        tap("prefill", None, 0, "swiglu", input="large"),
        tap("prefill", None, 0, "swiglu", input="tiny", verdict="diverged", impossible=9),
    ]
    text = as_text(report_of(rows))
    _, passing, failing = table_of(text)
    assert passing[:6] == ["prefill", "0", "swiglu", "model", "+1", "exact"]
    assert failing[:5] == ["#1", "prefill", "0", "swiglu", "tiny"]
    assert "Fails in: only battery inputs tiny." in text


def test_a_mix_of_exact_and_rounding_counts_as_rounding():
    rows = [
        tap("prefill", None, 0, "embed", verdict="exact"),
        tap("prefill", None, 1, "embed", verdict="rounding"),
    ]
    (row,) = folded_rows(report_of(rows))
    assert row.verdict == "rounding"


# The text


def test_text_tells_the_culprit_its_figures_and_the_reason():
    text = as_text(report_of(run_of(range(1), 1)))
    assert "#1 prefill softmax, layer 0: poisoned" in text
    assert "main.cpp:331, kernels.cu:257-309" in text
    assert "7,616 of 9,248 elements are impossible." in text
    assert "The first NaN or infinity stands at [0,0,0]." in text
    assert "Worst at [0,1,33]: got -1.203, want 2.41, allowed 2.4 to 2.42." in text
    assert "A tolerance of 3.61 would pass it." in text
    assert "No tolerance would pass it." in text
    assert f"Why: {MERGE.sentence}" in text
    assert "Fails in: battery inputs battery-1, battery-16, battery-33." in text


def test_the_same_reason_is_told_once():
    text = as_text(report_of(run_of(range(1), 1)))
    assert text.count(PAIRS.sentence) == 1
    assert f"Why: {PAIRS.hypothesis}, as in #2." in text


def test_a_culprit_without_an_explanation_says_so():
    text = as_text(report_of([tap("decode", 0, 0, "q_rope", diagnosis=())]))
    assert "no known hypothesis explains every element" in text
    refused = Result("prefill", None, None, 0, "mask", MODEL_INPUT, "not_run", note="refused")
    text = as_text(report_of([refused]))
    assert "hypothesis" not in text
    assert "Note: refused" in text


def test_stray_writes_and_tokens_are_told():
    row = tap("decode", 1, 2, "attn_residual", verdict="stray")
    tokens = Tokens(
        port=((1, 2, 9), (4,)),
        ideal=((1, 2, 3), (4,)),
        agree=3,
        flips=(Flip(0, 2, 9, 3, 0.0, 0.5, "tie_within_rounding"),),
    )
    stray = Stray("decode", 1, 2, "attn_residual", "Block 7 of layer 3 changed at row 5.")
    text = as_text(report_of([row], strays=[stray], tokens=tokens))
    assert "decode attn_residual, step 1, layer 2: stray" in text
    assert stray.sentence in text
    assert "Tokens: 3 of 4 are the ideal's." in text
    assert "slot 0, token 2: 9 for 3, a tie within rounding (margin 0, error 0.5)" in text


def test_notes_of_rows_that_pass_are_told_once():
    rows = [
        tap("prefill", None, layer, "mlp_norm", verdict="equivalent", note="rounded twice")
        for layer in (0, 1, 3)
    ]
    text = as_text(report_of(rows))
    assert text.count("rounded twice") == 1
    assert "Note: prefill mlp_norm, layer 0-1,3: equivalent, rounded twice" in text


def test_many_notes_are_cut_short_unless_verbose():
    rows = [tap("prefill", None, n, "mask", note=f"note {n}") for n in range(9)]
    assert as_text(report_of(rows)).count("Note: ") == 6
    assert "3 more notes; -v shows them." in as_text(report_of(rows))
    assert as_text(report_of(rows), VERBOSE).count("Note: ") == 9


def test_counts_line_names_only_what_happened():
    last = as_text(report_of(run_of(range(1), 1))).splitlines()[-1]
    assert (
        last
        == "144 checks: 76 exact, 56 rounding, 8 diverged, 4 poisoned; 3 of 39 ops failed; 12.3 s"
    )
    good = as_text(report_of([tap("prefill", None, 0, "mask")])).splitlines()[-1]
    assert good == "1 check: 1 exact; nothing failed; 12.3 s"


def test_quiet_shows_culprits_and_counts_alone():
    lines = as_text(report_of(run_of(range(16), 1)), QUIET).splitlines()
    assert [line[:3] for line in lines[:-1]] == ["#1 ", "#2 ", "#3 "]
    assert " checks: " in lines[-1]
    assert len(as_text(report_of([tap("prefill", None, 0, "mask")]), QUIET).splitlines()) == 1


def test_verbose_shows_every_result_and_every_figure():
    rows = run_of(range(2), 1)
    text = as_text(report_of(rows), VERBOSE)
    header, *table = table_of(text)
    assert len(table) == len(rows)
    for word in ("improbable", "allowed", "abs", "L2", "cosine", "floor", "upstream"):
        assert word in header
    assert "0.99999812" in text
    assert "Too narrow" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_a_row_is_one_line_at_every_width(width: int):
    report = report_of(run_of(range(3), 1))
    text = as_text(report, width=width)
    assert len(table_of(text)) == 1 + len(folded_rows(report))
    assert "…" not in text
    lines = text.splitlines()
    if width >= 80:
        end = lines.index("")
        assert all(len(line) <= width for line in lines[end : lines.index("", end + 1)])
    assert "  python -m harness compare --layer 0 --phase prefill --op softmax" in lines


def test_columns_that_do_not_fit_are_named():
    report = report_of(run_of(range(1), 1))
    narrow = as_text(report, width=80)
    assert "Too narrow for: elements, " in narrow
    assert "upstream" not in " ".join(table_of(narrow)[0])
    assert "impossible" in table_of(narrow)[0]
    assert "upstream" in table_of(as_text(report, width=200))[0]


def test_text_has_no_colours_and_fits_an_ascii_output():
    row = tap(
        "decode",
        0,
        0,
        "q_rope",
        diagnosis=(Diagnosis("x", "Angles are 2\u00d7 \u222b too large."),),
    )
    text = as_text(report_of([row]), encoding="ascii")
    assert text.isascii()
    assert "\x1b" not in text
    assert "Why: Angles are 2x ? too large." in text
    assert "2\u00d7 \u222b too" in as_text(report_of([row]))


def test_text_shows_brackets_as_they_are():
    row = tap("prefill", None, 0, "mask", verdict="diverged", impossible=1, note="see [bold]a[/]")
    text = as_text(report_of([row]))
    assert "[3,77]" in text
    assert "see [bold]a[/]" in text


# The command that reproduces a culprit


@pytest.mark.parametrize(
    ("options", "culprit", "expected"),
    [
        ("", ("prefill", None, 0, "softmax"), "--layer 0 --phase prefill --op softmax"),
        (
            "--layer all --steps 4 -v",
            ("decode", 2, 7, "q_rope"),
            "--layer 7 --phase decode --steps 3 --op q_rope",
        ),
        (
            "--layer=all --format=json -o 'a b.json' -q --strict --kernels 'my k.cu'",
            ("decode", 0, 3, "attention"),
            "--layer 3 --phase decode --op attention --strict --kernels 'my k.cu'",
        ),
        (
            "--seed 5 -oout.txt --layer 0-15 --fail-fast",
            ("prefill", None, None, "logits"),
            "--layer 0-15 --phase prefill --op logits --seed 5",
        ),
        ("--op 'q_.*'", ("prefill", None, 2, "q_proj"), "--layer 2 --phase prefill --op q_proj"),
        ("--phase both", ("decode", 0, None, "schedule"), "--phase decode --op schedule"),
    ],
)
def test_reproduce_narrows_the_command(options: str, culprit: tuple, expected: str):
    phase, step, layer, op = culprit
    command = reproduce(
        f"python -m harness compare {options}".strip(),
        Culprit(phase, step, layer, op, "diverged", ()),
    )
    assert command == f"python -m harness compare {expected}"


def test_reproduce_selects_the_op_and_no_other():
    import re

    for phase, taps in TAPS.items():
        for op in taps:
            command = reproduce(
                "python -m harness compare", Culprit(phase, None, 0, op, "diverged", ())
            )
            pattern = command.split()[-1].strip("'")
            assert [o for o in taps if re.search(pattern, o)] == [op]


def test_report_has_no_field_that_json_lacks():
    assert [f.name for f in fields(Report)] == list(json.loads(as_json(report_of([]))))
