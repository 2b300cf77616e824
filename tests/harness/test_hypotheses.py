"""Diagnosis: what is named, what is not, and how it is said.

The families' own faults are planted in test_hypotheses_rope.py, _gemm.py, _attention.py and
_small.py; this file has what they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.battery import PASSES, battery_inputs
from harness.bounds import bound_of
from harness.hypotheses import Context, Evidence, diagnose, names
from harness.hypotheses.recipe import Test
from harness.hypotheses.registry import base_recipe, hypothesis, ops
from harness.verdict import POISON
from reference.rounding import bf16_bits, from_bits, round_to_bf16
from tests.harness.planted import F32, ORDERS, f32, kernel, normal, real_of, stressed, weights

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Fault:
    """A wrong result of `op`: what `make` gives; `name` is what a diagnosis must call it."""

    op: str
    name: str
    inputs: Mapping[str, Any]
    make: Callable[[], Array]
    before: Array | None = None
    what: str = ""
    context: Context = field(default_factory=Context)
    phase: str = "prefill"
    layer: int | None = 1

    def evidence(self) -> Evidence:
        with np.errstate(all="ignore"):
            got = self.make()
        real = real_of(self.op, self.inputs)
        return Evidence(
            self.phase, self.op, self.layer, self.inputs, real, got, self.before, None, self.context
        )

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.what}".rstrip("-").replace(" ", "_")


@dataclass(frozen=True)
class Row:
    """A fault, the names that explain it, their sentences, and how long that took."""

    fault: Fault
    found: tuple[str, ...]
    sentences: tuple[str, ...]
    seconds: float


def explained(fault: Fault) -> Row:
    evidence = fault.evidence()
    start = time.perf_counter()
    made = diagnose(evidence)
    seconds = time.perf_counter() - start
    return Row(fault, tuple(d.hypothesis for d in made), tuple(d.sentence for d in made), seconds)


def poison(*shape: int) -> Array:
    return np.full(shape, POISON, dtype=np.uint16)


def found(op: str, inputs: Mapping[str, Any], got: Array, **more: Any) -> dict[str, str]:
    evidence = Evidence(
        more.pop("phase", "decode"), op, 1, inputs, real_of(op, inputs), got, **more
    )
    return {d.hypothesis: d.sentence for d in diagnose(evidence)}


# --- the right op ---------------------------------------------------------------------------------

OPS = tuple(op for op in ops() if op != "embed")
PASS_OF = {
    op: next(each for each in reversed(PASSES) if op in each.ops and len(each.row_positions) > 1)
    for op in OPS
}


@pytest.mark.parametrize("op", OPS)
def test_base_recipe_is_the_reference_with_its_bound(op: str) -> None:
    inputs = battery_inputs(PASS_OF[op], op, weights(op))
    real = real_of(op, inputs)
    recipe = base_recipe(Evidence("decode", op, 0, inputs, real, np.zeros(real.shape, np.uint16)))
    made, bound = recipe.whole()
    flat = torch.arange(0, real.numel(), max(1, real.numel() // 500))
    some, b = recipe.some(flat)
    want = real.reshape(-1)[flat]
    assert torch.allclose(made.reshape(-1)[flat].double(), want.double(), rtol=1e-12, atol=0)
    assert torch.allclose(some.double(), want.double(), rtol=1e-11, atol=1e-30)
    if real.is_floating_point():
        strict, likely = bound_of(op, inputs, real).at(flat)
        assert torch.allclose(b, strict, rtol=1e-3, atol=1e-40)
        assert torch.allclose(bound.at(flat)[0], strict, rtol=1e-3, atol=1e-40)
        assert torch.allclose(bound.at(flat)[1], likely, rtol=1e-3, atol=1e-40)


@pytest.mark.parametrize("order", ["sequential", "pairwise"])
@pytest.mark.parametrize("op", OPS)
def test_right_result_has_no_diagnosis(op: str, order: str) -> None:
    assert order in ORDERS
    inputs = battery_inputs(PASS_OF[op], op, weights(op))
    assert found(op, inputs, kernel(op, inputs, order)) == {}


@pytest.mark.parametrize("op", ["k_rope", "scores", "softmax", "attn_v", "swiglu", "kv_write"])
def test_noise_has_no_explanation(op: str) -> None:
    inputs = battery_inputs(PASS_OF[op], op, weights(op))
    shape = tuple(real_of(op, inputs).shape)
    noise = bf16_bits(normal(5, *shape))
    assert found(op, inputs, noise, before=poison(*shape)) == {}


@pytest.mark.parametrize("op", ["k_rope", "scores", "attn_v", "kv_write"])
def test_one_wrong_element_has_no_explanation(op: str) -> None:
    inputs = stressed("prefill-33", op)
    bits = bf16_bits(round_to_bf16(real_of(op, inputs)))
    place = tuple(extent // 2 for extent in bits.shape)
    bits[place] ^= 0x00C0
    assert found(op, inputs, bits, before=poison(*bits.shape)) == {}


# --- coincidences ---------------------------------------------------------------------------------


def test_a_change_without_effect_is_not_named() -> None:
    """At position 0 and 1 of one row, the first row's position and the row's number are right."""
    inputs = {**stressed("decode-0-257", "q_rope"), "positions": torch.tensor([0, 1])}
    x = f32(inputs["x"])
    inv_freq = f32(inputs["inv_freq"])
    angle = np.array([0, 2], F32)[:, None, None] * inv_freq
    first, second = np.moveaxis(x.reshape(2, -1, 2, 32), 2, 0)
    turned = np.stack(
        (
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ),
        axis=2,
    ).reshape(x.shape)
    assert set(
        found("q_rope", inputs, bf16_bits(round_to_bf16(torch.from_numpy(turned).double())))
    ) == {"position doubled"}


def test_all_explanations_of_the_smallest_size_are_listed() -> None:
    logits = {"logits": -1 - normal(7, 2, 1000).abs()}
    assert set(found("argmax", logits, np.array([0, 0]))) >= {"starts at 0.0", "always 0"}


def test_a_pair_is_not_named_where_one_change_explains() -> None:
    inputs = {"x": normal(8, 3, 256), "y": normal(9, 3, 256)}
    assert list(found("attn_residual", inputs, bf16_bits(inputs["y"]))) == ["residual missing"]


def test_stored_nan_and_poison_differ() -> None:
    """A result that is NaN was written; one that is still poison was not."""
    inputs = stressed("decode-14-15", "attention")
    shape = tuple(real_of("attention", inputs).shape)
    nan = np.full(shape, 0x7FFF, dtype=np.uint16)
    assert "pages never written" in found("attention", inputs, nan, before=poison(*shape))
    assert list(found("attention", inputs, poison(*shape), before=poison(*shape))) == [
        "never written"
    ]


# --- goldens of the upstream program --------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> Mapping[str, Array]:
    return np.load(Path(__file__).parents[1] / "golden" / "kernels.npz")


@pytest.mark.parametrize("which", ["q", "k"])
def test_upstream_decode_rope_is_adjacent_and_unscaled(
    golden: Mapping[str, Array], which: str
) -> None:
    inputs = {
        "x": from_bits(golden[f"ropeDecode/{which}_in"]),
        "positions": torch.from_numpy(golden["ropeDecode/positions"].astype(np.int64)),
        "inv_freq": weights("q_rope")["inv_freq"],
    }
    made = found(
        f"{which}_rope", inputs, golden[f"ropeDecode/{which}_out"], upstream="kernels.cu:371-405"
    )
    assert list(made) == ["adjacent pairing + plain frequencies"]
    (sentence,) = made.values()
    assert sentence.startswith(f"decode {which}_rope: adjacent pairing (2i, 2i+1)")
    assert "unscaled frequencies 500000^(-2i/64)" in sentence
    assert sentence.endswith("elements possible; upstream kernels.cu:371-405")


@pytest.mark.parametrize("n", [5, 17])
def test_upstream_softmax_nan_are_predicted(golden: Mapping[str, Array], n: int) -> None:
    inputs = {"scores": from_bits(golden[f"causalMask/{n}_out"])}
    made = found("softmax", inputs, golden[f"softmax/masked_{n}_out"], phase="prefill")
    assert list(made) == ["unguarded online merge"]
    assert "a tree" in made["unguarded online merge"]
    assert "gives exactly these" in made["unguarded online merge"]


# --- words ----------------------------------------------------------------------------------------


def test_sentence_says_which_part_was_not_written() -> None:
    inputs = {"x": normal(11, 6, 2048), "weight": normal(12, 2048, mean=1)}
    bits = kernel("attn_norm", inputs)
    bits[:, 1024:] = POISON
    made = found("attn_norm", inputs, bits, before=poison(6, 2048))
    assert "columns 1024-2047 never written (6,144 elements hold poison)" in made["partly written"]


def test_sentence_has_the_measured_ratio() -> None:
    inputs = {"gate": normal(13, 2, 512), "up": normal(14, 2, 512)}
    got = kernel("swiglu", {**inputs, "up": inputs["up"] / 8})
    assert "a constant factor of 1/8" in found("swiglu", inputs, got)["constant ratio"]


def test_measured_angles_say_which_indices_agree() -> None:
    inputs = {**stressed("decode-0-257", "q_rope"), "positions": torch.tensor([300, 1500])}
    inputs["x"] = normal(15, 2, 2048)
    odd = inputs["inv_freq"].clone()
    odd[20:24] *= 3
    got = bf16_bits(round_to_bf16(real_of("q_rope", {**inputs, "inv_freq": odd})))
    sentence = found("q_rope", inputs, got)["measured angles"]
    assert "indices 0-19, 24-31 agree with Llama 3's" in sentence
    assert "indices 20-23 are 3 times those" in sentence


def test_names_are_unique_and_known() -> None:
    assert len(set(names())) == len(names())
    assert set(names("softmax")) < set(names())


def test_a_name_can_not_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        hypothesis("base 2", axis="base", ops=("softmax",), says="x")(lambda r, e: r)
    with pytest.raises(ValueError, match="say what it means"):
        hypothesis("a new one", axis="base", ops=("softmax",))(lambda r, e: r)


def test_wrong_shape_and_unknown_op_are_refused() -> None:
    real = normal(16, 2, 4)
    with pytest.raises(ValueError, match="got must be of real's shape"):
        Evidence("decode", "swiglu", 0, {}, real, np.zeros((2, 3), np.uint16))
    evidence = Evidence("decode", "schedule", 0, {}, real, np.zeros((2, 4), np.uint16))
    with pytest.raises(ValueError, match="op must be one of"):
        base_recipe(evidence)


def test_sample_has_failing_elements() -> None:
    inputs = {"x": normal(17, 3, 256), "y": normal(18, 3, 256)}
    real = real_of("attn_residual", inputs)
    bits = bf16_bits(round_to_bf16(real))
    bits[1, 77] ^= 0x0100
    test = Test(Evidence("decode", "attn_residual", 0, inputs, real, bits))
    assert test.failing.tolist() == [256 + 77]
    assert all(256 + 77 in stage.tolist() for stage in test.stages)


@pytest.mark.parametrize("op", ["q_rope", "attn_norm", "mask"])
def test_noise_is_explained_by_nothing(op: str) -> None:
    """Every hypothesis and every pair is tried."""
    inputs = stressed("prefill-17", op)
    shape = tuple(real_of(op, inputs).shape)
    assert found(op, inputs, bf16_bits(normal(19, *shape))) == {}


def test_noise_of_a_large_gemm_is_explained_by_nothing() -> None:
    inputs = {"x": normal(20, 17, 2048), "weight": normal(21, 8192, 2048, std=0.02).bfloat16()}
    assert found("gate_proj", inputs, bf16_bits(normal(22, 17, 8192))) == {}
