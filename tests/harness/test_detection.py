"""Planted faults are found, at the rates measured before, and harmless variants are not."""

from __future__ import annotations

import planted
import pytest
from planted import Fault, faults, row_of

FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f.id}-{f.what}-{f.input}" for f in FAULTS])
def test_a_planted_fault_fails_and_a_harmless_variant_does_not(fault: Fault) -> None:
    row = row_of(fault)
    assert row.right, row
    if fault.figure.endswith("%"):
        low, high = RATES[fault.what]
        assert low <= row.outside_d <= high
    if fault.figure == "that column":
        wrong = row.judgement
        assert wrong.worst is not None
        assert wrong.worst.index[1] == 17
        assert wrong.improbable >= 32  # of 33 rows


# Percent outside d at K = 2048 (where d is narrower, so more) and 8192, on Gaussian data.
RATES = {
    "truncated store": (30, 48),
    "bf16 split-K": (26, 40),
    "6-bit weights": (70, 78),
    "factor 1.001": (6, 15),
}


def test_every_rate_is_checked() -> None:
    assert {f.what for f in FAULTS if f.figure.endswith("%")} == set(RATES)


def test_the_cases_that_must_be_found_are_planted() -> None:
    ids = {f.id for f in FAULTS}
    assert {"GEMM", "H01", "H02", "H04", "H06", "P20", "P21", "P23", "P38", "P64"} <= ids


@pytest.mark.parametrize("rows", [2, 17])
def test_faults_of_a_gemm_show_at_few_rows_too(rows: int) -> None:
    inputs = planted.gauss_gemm(2048, out=512, rows=rows)
    x, w = planted.f32(inputs["x"]), planted.f32(inputs["weight"])
    for bits in (planted.cut(planted.gemm(x, w)), planted.store(planted.gemm(x, w) * 1.001)):
        assert planted.verdict_of("q_proj", inputs, bits).verdict in ("systematic", "diverged")


def test_the_detection_table_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [FAULTS[0], next(f for f in FAULTS if f.expect == "equivalent")]
    monkeypatch.setattr(planted, "faults", lambda: some)
    assert planted.main() == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4
    assert "truncated store" in out[1]
    assert out[2].endswith("equivalent")
    assert out[3] == "2 planted, 0 judged wrongly"
