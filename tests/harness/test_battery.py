"""The battery holds what it promises, is the same every time, and lies on the bf16 grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted import stressed, the_pass, weights

from harness.battery import PASSES, Pass, battery, battery_inputs
from harness.bounds import ops
from reference import ops as reference
from reference.rounding import round_to_bf16

CASES = [(p.name.removeprefix("battery-"), op) for p in PASSES for op in p.ops]


def tensors(inputs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for name, value in inputs.items():
        if name not in ("weight", "inv_freq"):
            found += value if isinstance(value, list) else [value]
    return found


@pytest.mark.parametrize(("name", "op"), CASES)
def test_inputs_are_finite_on_the_grid_and_of_the_passes_rows(name: str, op: str) -> None:
    each, inputs = the_pass(name), stressed(name, op)
    rows = len(each.row_positions)
    for tensor in tensors(inputs):
        masked = torch.isneginf(tensor) if op == "softmax" else torch.zeros_like(tensor, dtype=bool)
        assert (tensor.isfinite() | masked).all()
        if tensor.dtype == torch.float64:
            assert torch.equal(tensor, round_to_bf16(tensor))
    if op == "attention":
        lengths = [p + 1 for p in each.row_positions]
        for what in ("keys", "values"):
            assert [tuple(t.shape) for t in inputs[what]] == [(n, 512) for n in lengths]
    elif op == "argmax":
        count = 1 if each.phase == "prefill" else rows
        assert inputs["logits"].shape == (count, 128256)
    elif op in ("mask", "softmax"):
        assert inputs["scores"].shape == (32, rows, rows)
    elif op == "attn_v":
        assert inputs["probs"].shape == (32, rows, rows)
    else:
        assert all(len(tensor) == rows for tensor in tensors(inputs))


def test_inputs_are_the_same_every_time_whatever_was_asked_before() -> None:
    for name, op in CASES[::3]:
        first = tensors(stressed(name, op))
        again = tensors(battery_inputs(the_pass(name), op, weights(op)))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_passes_and_ops_have_different_numbers() -> None:
    a, b = (stressed("prefill-33", op)["x"] for op in ("attn_norm", "mlp_norm"))
    c = stressed("prefill-17", "attn_norm")["x"]
    assert not torch.equal(a, b)
    assert not torch.equal(a[:17], c)


def test_every_op_has_a_pass_in_each_phase_that_runs_it() -> None:
    prefill = {op for p in battery("prefill") for op in p.ops}
    decode = {op for p in battery("decode") for op in p.ops}
    assert prefill == set(ops()) - {"attention"}
    assert decode == set(ops()) - {"scores", "mask", "softmax", "attn_v"}


def test_the_awkward_lengths_and_positions_are_there() -> None:
    assert {p.tokens for p in battery("prefill")} >= {1, 15, 16, 17, 33, 258}
    positions = {position for p in battery("decode") for position in p.row_positions}
    assert positions >= {0, 14, 15, 16, 32, 257, 2047}  # lengths are one more
    assert any(p.positions[0] is None and p.active == (1,) for p in battery("decode"))


@pytest.mark.parametrize("op", ["attn_norm", "q_proj", "down_proj", "q_rope", "swiglu", "logits"])
def test_rows_of_every_kind_are_there(op: str) -> None:
    x = stressed("prefill-33", op)["gate" if op == "swiglu" else "x"][:, 256:]
    rms = x.square().mean(1).sqrt()
    top = x.abs().amax(1)
    middle = x.abs().median(1).values
    assert ((rms > 0.8e-3) & (rms < 1.2e-3)).sum() >= 4
    assert ((rms > 280) & (rms < 320)).sum() >= 4
    assert ((x.mean(1) > 1.4) & (x.mean(1) < 1.6)).sum() >= 4
    assert ((top == 100) & (middle < 1)).sum() >= 4  # one channel 100 times the rest
    assert ((top > 20 * middle) & (top != 100)).sum() >= 3  # heavy tails
    assert (x == -0.75).all(1).sum() >= 4


def test_both_rows_of_small_and_large_rms_reach_decode() -> None:
    x = stressed("decode-0-257", "attn_norm")["x"]
    rms = x.square().mean(1).sqrt()
    assert rms[0] < 2e-3
    assert rms[1] > 250


def test_scores_reach_100_both_ways_and_are_equal_in_some_rows() -> None:
    for name, row in (("prefill-33", 20), ("prefill-15", 14)):
        s = reference.scores(*stressed(name, "scores").values())[:, row, : row + 1]
        assert (s.amax(1) > 99).any()
        assert (s.amin(1) < -99).any()
        assert (s == s[:, :1]).all(1).any()
    for name in ("decode-0-257", "decode-2047-32"):
        q, keys, _ = stressed(name, "attention").values()
        s = reference.scores(q[1:], keys[1])[:, 0]
        assert s.max() > 99
        assert s.min() < -99
        assert (s == s[:, :1]).all(1).any()


@pytest.mark.parametrize("n", [15, 16, 17, 33])
def test_softmax_sees_equal_extreme_and_underflowing_scores(n: int) -> None:
    x = stressed(f"prefill-{n}", "softmax")["scores"][:, -1]  # unmasked rows of 32 heads
    spread = x.amax(1) - x.amin(1)
    assert (spread == 0).any()
    assert (spread == 200).any()
    assert ((x.amax(1, keepdim=True) - x).flatten() > 104).any()  # exp gives 0
    assert (x.amax(1) < -80).any()  # without the maximum, all of them underflow
    assert (x.amax(1) > 89).any()  # without the maximum, exp overflows
    masked = stressed(f"prefill-{n}", "softmax")["scores"][:, 0, 1:]
    assert torch.isneginf(masked).all()


def test_argmax_sees_negative_tied_first_and_last_greatest_logits() -> None:
    rows = [
        row
        for p in PASSES
        if "argmax" in p.ops
        for row in stressed(p.name.removeprefix("battery-"), "argmax")["logits"]
    ]
    assert any((row < 0).all() for row in rows)
    assert any((row == row.max()).sum() > 1 and row.max() > 0 for row in rows)
    best = {int(row.argmax()) for row in rows}
    assert {0, 128255} <= best


def test_residuals_hold_exact_ties_that_go_up_and_down() -> None:
    x, y = stressed("prefill-33", "attn_residual").values()
    total = x + y
    rounded = round_to_bf16(total)
    step = torch.exp2(rounded.abs().clamp(min=2.0**-126).log2().floor() - 7)
    tie = (total - rounded).abs() * 2 == step
    assert (tie & (rounded > total)).sum() > 100
    assert (tie & (rounded < total)).sum() > 100
    assert (total == 0).any()


def test_a_battery_is_cut_down_to_the_ops_asked_for() -> None:
    cut = battery("prefill", {"k_rope", "down_proj"})
    assert [p.ops for p in cut if p.tokens == 33] == [("k_rope", "down_proj")]
    assert [p.ops for p in cut if p.tokens == 258] == [("k_rope",)]
    assert battery("decode", {"mask"}) == []


def test_an_op_that_the_pass_has_not_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"op must be one of .* in battery-prefill-258 \(got 'mask'"
    ):
        battery_inputs(the_pass("prefill-258"), "mask", {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"phase": "prefill"},
        {"phase": "prefill", "tokens": 0},
        {"phase": "decode", "tokens": 3},
        {"phase": "decode", "positions": (None, None)},
    ],
)
def test_a_pass_without_rows_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pass needs"):
        Pass("x", ops=("mask",), **wrong)
