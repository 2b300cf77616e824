"""Verdicts on hand-made results: which numbers are possible, and which verdict wins."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.bounds import Bound, Group
from harness.result import FAILURES, PASSES, VERDICTS
from harness.verdict import POISON, Judgement, judge
from reference.rounding import bf16_bits, round_to_bf16

STEP = 2.0**-7  # of bf16 in [1, 2)


def real(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def bits(*values: float) -> np.ndarray:
    return bf16_bits(real(*values))


def bound(
    of: Tensor,
    b: float = 0.0,
    d: float | None = None,
    recheck: Callable[[Tensor], Tensor] | None = None,
) -> Bound:
    def at(flat: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones(flat.numel(), dtype=torch.float64)
        return one * b, one * (b if d is None else d)

    shape = tuple(of.shape)
    groups = (Group("row", shape, (1,)), Group("column", shape, (0,)))
    return Bound(shape, at, groups, recheck)


def verdict(got: np.ndarray, want: Tensor, b: float = 0.0, **flags: bool) -> str:
    return judge(got, want, bound(want, b), **flags).verdict


# --- one element ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("r", "b", "possible"),
    [
        (1.0, 0.0, [1.0]),
        (1.003, 0.0, [1.0]),
        (1 + STEP / 2, 0.0, [1.0]),  # a tie goes to even
        (1 + 1.5 * STEP, 0.0, [1 + 2 * STEP]),
        (1 + STEP / 2, 1e-12, [1.0, 1 + STEP]),  # within the bound of a tie: either
        (1 + STEP / 2 + 2.0**-40, 0.0, [1 + STEP]),  # float32 in between would say 1.0
        (1 + STEP, 1.2 * STEP, [1.0, 1 + STEP, 1 + 2 * STEP]),
        (2.0**-134, 0.0, [0.0]),
        (1.1 * 2.0**-134, 0.0, [2.0**-133]),
        (-(2.0**-133), 2.0**-134 + 2.0**-180, [-2 * 2.0**-133, -(2.0**-133), 0.0]),
        (3.4e38, 0.0, [math.inf]),  # beyond the greatest bf16 and half a step
        (3.39e38, 1e36, [3.3895313892515355e38, math.inf]),
        (-math.inf, 0.0, [-math.inf]),
        (math.inf, 1.0, [math.inf]),
        (math.nan, 1.0, [math.nan]),
    ],
)
def test_possible_elements_are_the_roundings_within_the_bound(
    r: float, b: float, possible: list[float]
) -> None:
    want = real(r)
    around = {round_to_bf16(want).item(), 0.0, 1.0, 1 + STEP, 1 - STEP / 2, 1 + 2 * STEP, 2.0**-133}
    around |= {-v for v in around} | {math.inf, -math.inf, math.nan, *possible}
    around |= {2 * 2.0**-133, -2 * 2.0**-133, 3.3895313892515355e38}
    for got in around:
        expected = any(got == p or (math.isnan(got) and math.isnan(p)) for p in possible)
        found = judge(bits(got), want, bound(want, b))
        assert bool(found) == expected, (got, found)
        assert found.impossible == (not expected)


def test_zeros_of_either_sign_are_equal() -> None:
    assert verdict(np.array([[0x8000, 0x0000]], np.uint16), real(0.0, -0.0)) == "exact"


def test_any_nan_is_right_where_the_real_result_is_nan() -> None:
    got = np.array([[0x7FFF, 0xFFFF, 0x7FC0]], np.uint16)
    assert verdict(got, real(math.nan, math.nan, math.nan)) == "exact"


def test_correctly_rounded_is_exact_and_a_possible_neighbour_is_rounding() -> None:
    want = real(1 + STEP / 2, 2.0)
    assert verdict(bits(1.0, 2.0), want, 1e-9) == "exact"
    found = judge(bits(1 + STEP, 2.0), want, bound(want, 1e-9))
    assert found.verdict == "rounding"
    assert found.worst is not None
    assert found.worst.index == (0, 0)
    assert found.worst.allowed == (1.0, 1 + STEP)
    assert found


# --- which verdict wins ---------------------------------------------------------------------------


def test_impossible_elements_diverge_and_the_worst_is_named_with_what_is_allowed() -> None:
    want = real(1.0, 2.0, 3.0, 4.0)
    found = judge(bits(1.0, 2.5, 3.0 + 2 * STEP, 4.0), want, bound(want, 0.01))
    assert (found.verdict, found.impossible, found.elements) == ("diverged", 1, 4)
    assert found.worst is not None
    assert (found.worst.index, found.worst.got, found.worst.want) == ((0, 1), 2.5, 2.0)
    assert found.worst.allowed == (1.9921875, 2.015625)
    assert found.passing_tolerance == found.max_abs == 0.5
    assert not found


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_or_infinity_for_a_finite_number_is_poisoned(bad: float) -> None:
    want = real(1.0, 2.0, 3.0)
    found = judge(bits(1.0, 9.0, bad), want, bound(want))
    assert found.verdict == "poisoned"
    assert found.first_nan == (0, 2)
    assert found.passing_tolerance == math.inf
    assert found.max_abs == 7.0
    assert found.note == "1 of 3 elements are NaN or infinity where the ideal is finite"


def test_a_number_for_nan_or_infinity_diverges() -> None:
    for r in (math.nan, math.inf, -math.inf):
        assert verdict(bits(1.0), real(r), 1.0) == "diverged"
    assert verdict(bits(math.inf), real(-math.inf)) == "diverged"
    assert verdict(bits(math.nan), real(-math.inf)) == "diverged"


def test_a_half_written_output_is_poisoned_and_says_so() -> None:
    got = bits(1.0, 2.0, 3.0, 4.0)
    got[0, 2:] = POISON
    found = judge(got, real(1.0, 2.0, 3.0, 4.0), bound(real(0, 0, 0, 0)))
    assert found.verdict == "poisoned"
    assert found.first_nan == (0, 2)
    assert found.note is not None
    assert found.note.endswith("; 2 of them were never written")


def test_an_output_of_poison_alone_is_unchanged() -> None:
    want = real(1.0, 2.0)
    assert verdict(np.full((1, 2), POISON, np.uint16), want) == "unchanged"


def test_an_output_as_before_is_unchanged_only_if_some_element_is_impossible() -> None:
    want = real(1.0, 2.0)
    assert verdict(bits(1.0, 3.0), want, unchanged=True) == "unchanged"
    assert verdict(bits(1.0, math.nan), want, unchanged=True) == "unchanged"
    assert verdict(bits(1.0, 2.0), want, unchanged=True) == "exact"


def test_a_stray_write_fails_a_right_output_and_is_told_beside_a_wrong_one() -> None:
    want = real(1.0, 2.0)
    assert verdict(bits(1.0, 2.0), want, stray=True) == "stray"
    found = judge(bits(1.0, 3.0), want, bound(want), stray=True)
    assert found.verdict == "diverged"
    assert found.note == "something that is not the op's output was written"


def test_an_equivalent_passes_unless_strict_and_is_asked_only_of_failures() -> None:
    want = real(1.0, 2.0)

    def named(got: Tensor) -> str:
        assert got.tolist() == [[1.0, 3.0]]
        return "a variant"

    found = judge(bits(1.0, 3.0), want, bound(want), equivalents=named)
    assert (found.verdict, found.note, bool(found)) == ("equivalent", "a variant", True)
    assert not judge(bits(1.0, 3.0), want, bound(want), equivalents=named, strict=True)
    assert judge(bits(1.0, 2.0), want, bound(want), equivalents=named).verdict == "exact"
    wrong = bits(1.0, math.nan)
    assert judge(wrong, want, bound(want), equivalents=named).verdict == "poisoned"
    none = judge(bits(1.0, 3.0), want, bound(want), equivalents=lambda _: None)
    assert none.verdict == "diverged"
    assert (
        judge(bits(1.0, 3.0), want, bound(want), equivalents=named, stray=True).verdict == "stray"
    )


def test_a_judgement_is_true_exactly_for_the_verdicts_that_pass() -> None:
    for name in VERDICTS:
        found = Judgement(name, 0, 0, 1, None, None, 0.0, 0.0, 0.0, 1.0, 0)
        assert bool(found) == (name in PASSES) == (name not in FAILURES)


# --- too many improbable elements -----------------------------------------------------------------


def lopsided(shape: tuple[int, int], wrong: Tensor) -> tuple[np.ndarray, Tensor]:
    """Ones, of which the elements at `wrong` (a mask) are one step too high."""
    ones = torch.ones(shape, dtype=torch.float64)
    return bf16_bits(torch.where(wrong, 1 + STEP, ones)), ones


@pytest.mark.parametrize(
    ("shape", "count", "systematic"),
    [((10, 100), 8, False), ((10, 100), 9, True), ((100, 200), 20, False), ((100, 200), 21, True)],
)
def test_more_than_eight_and_a_thousandth_are_systematic(
    shape: tuple[int, int], count: int, systematic: bool
) -> None:
    wrong = torch.zeros(shape, dtype=torch.bool)
    wrong.view(-1)[torch.arange(count) * (wrong.numel() // count)] = True
    got, want = lopsided(shape, wrong)
    found = judge(got, want, bound(want, b=STEP, d=STEP / 4))
    assert found.verdict == ("systematic" if systematic else "rounding")
    assert (found.impossible, found.improbable) == (0, count)


@pytest.mark.parametrize(
    ("shape", "part", "note"),
    [
        ((16, 1000), np.s_[:8, 7], "column 7: 8 of 16 elements are improbable"),
        ((1000, 17), np.s_[3, :9], "row 3: 9 of 17 elements are improbable"),
        ((17, 1000), np.s_[:8, 7], None),  # less than half
        ((7, 1000), np.s_[:, 7], None),  # less than eight
    ],
)
def test_half_of_a_row_or_column_is_systematic(
    shape: tuple[int, int], part: tuple[slice | int, ...], note: str | None
) -> None:
    wrong = torch.zeros(shape, dtype=torch.bool)
    wrong[part] = True
    got, want = lopsided(shape, wrong)
    found = judge(got, want, bound(want, b=STEP, d=STEP / 4))
    assert (found.verdict, found.note) == ("systematic" if note else "rounding", note)


def test_improbable_elements_are_rechecked_before_they_count() -> None:
    wrong = torch.zeros(64, 256, dtype=torch.bool)
    wrong[:, ::2] = True
    got, want = lopsided((64, 256), wrong)
    asked: list[Tensor] = []

    def cleared(flat: Tensor) -> Tensor:
        asked.append(flat)
        return torch.full((flat.numel(),), STEP, dtype=torch.float64)

    found = judge(got, want, bound(want, STEP, STEP / 4, cleared))
    assert (found.verdict, found.improbable) == ("rounding", wrong.sum())
    assert torch.cat(asked).tolist() == torch.nonzero(wrong.view(-1)).squeeze(1).tolist()

    def upheld(flat: Tensor) -> Tensor:
        return torch.zeros(flat.numel(), dtype=torch.float64)

    found = judge(got, want, bound(want, STEP, STEP / 4, cleared), recheck=upheld)
    assert found.verdict == "systematic"
    assert found.note == "50 % of the elements are improbable"
    assert not found


def test_a_recheck_stops_when_enough_stand() -> None:
    wrong = torch.ones(100, 1000, dtype=torch.bool)
    got, want = lopsided((100, 1000), wrong)
    asked = 0

    def upheld(flat: Tensor) -> Tensor:
        nonlocal asked
        asked += flat.numel()
        return torch.zeros(flat.numel(), dtype=torch.float64)

    assert judge(got, want, bound(want, STEP, STEP / 4, upheld)).verdict == "systematic"
    assert asked < 10_000


# --- figures --------------------------------------------------------------------------------------


def test_figures_are_over_the_finite_pairs() -> None:
    want = real(3.0, 4.0, 1.0, -math.inf)
    found = judge(bits(3.0, 4.5, math.nan, -math.inf), want, bound(want))
    assert found.max_abs == 0.5
    assert found.rel_l2 == pytest.approx(0.1)
    assert found.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    assert found.max_ulp == 16
    assert found.passing_tolerance == math.inf


def test_a_right_result_has_figures_of_zero() -> None:
    found = judge(bits(1.0, 2.0), real(1.0, 2.0), bound(real(1.0, 2.0)))
    assert (found.passing_tolerance, found.max_abs, found.rel_l2) == (0.0, 0.0, 0.0)
    assert (found.cosine, found.max_ulp, found.worst, found.note) == (1.0, 0, None, None)


def test_a_result_where_all_should_be_zero_has_infinite_relative_error() -> None:
    found = judge(bits(0.0, 1.0), real(0.0, 0.0), bound(real(0.0, 0.0)))
    assert (found.rel_l2, found.cosine) == (math.inf, 0.0)


# --- argmax, and misuse ---------------------------------------------------------------------------


def test_indices_are_right_or_wrong() -> None:
    want = torch.tensor([5, 128009])
    right = judge(np.array([5, 128009]), want, bound(want))
    assert (right.verdict, right.max_ulp, right.passing_tolerance) == ("exact", None, None)
    wrong = judge(np.array([5, 0]), want, bound(want))
    assert (wrong.verdict, wrong.impossible) == ("diverged", 1)
    assert wrong.worst is not None
    assert (wrong.worst.index, wrong.worst.got, wrong.worst.want) == ((1,), 0.0, 128009.0)
    assert judge(np.array([5, 128009]), want, bound(want), stray=True).verdict == "stray"


def test_a_result_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got must be of shape \(1, 2\) \(got \(1, 1\)\)"):
        judge(bits(1.0), real(1.0, 2.0), bound(real(1.0, 2.0)))
