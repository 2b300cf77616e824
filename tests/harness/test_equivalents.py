"""Harmless variants are recognised, and only those; the negative controls of the fault cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import planted
import pytest
import torch
from planted import f32, narrow, normal, real_of, store, stressed, verdict_of

from harness.equivalents import equivalents_of
from reference.ops import llama3_inv_freq

Made = tuple[str, Any, np.ndarray]


def norm_before_weight(seed: int, scale: float) -> Made:
    inputs = {"x": normal(seed, 5, 2048, std=scale), "weight": normal(seed + 1, 2048, mean=0.5)}
    one = {"x": inputs["x"], "weight": torch.ones_like(inputs["weight"])}
    return "attn_norm", inputs, store(narrow(planted.norm(one)) * f32(inputs["weight"]))


def silu_before_product(seed: int, scale: float) -> Made:
    inputs = {"gate": normal(seed, 5, 2048, std=scale), "up": normal(seed + 1, 5, 2048)}
    one = {**inputs, "up": torch.ones_like(inputs["up"])}
    return "swiglu", inputs, store(narrow(planted.swiglu(one)) * f32(inputs["up"]))


def products_rounded(seed: int, scale: float) -> Made:
    inputs = {
        "x": normal(seed, 9, 512, std=scale),
        "positions": torch.tensor([0, 1, 2, 16, 99, 257, 480, 1111, 2047]),
        "inv_freq": llama3_inv_freq(),
    }
    return "k_rope", inputs, store(planted.rope(inputs, product=narrow))


def probabilities_rounded(seed: int, scale: float) -> Made:
    inputs = {
        "q": normal(seed, 2, 2048, std=scale),
        "keys": [normal(seed + n, n, 512) for n in (17, 300)],
        "values": [normal(seed + n, n, 512, mean=0.3) for n in (18, 301)],
    }
    inputs["values"] = [v[1:] for v in inputs["values"]]
    return "attention", inputs, store(planted.attention(inputs, weigh=narrow))


VARIANTS = (norm_before_weight, silu_before_product, products_rounded, probabilities_rounded)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_rounded_intermediate_is_equivalent(
    variant: Callable[[int, float], Made], scale: float, seed: int
) -> None:
    op, inputs, got = variant(seed, scale)
    found = verdict_of(op, inputs, got)
    assert found.verdict == "equivalent", found
    assert found
    assert found.note is not None
    assert "bf16" in found.note
    strict = verdict_of(op, inputs, got, strict=True)
    assert strict.verdict == "equivalent"
    assert not strict


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_wrong_element_in_a_variant_diverges(variant: Callable[[int, float], Made]) -> None:
    op, inputs, got = variant(3, 1.0)
    index = tuple(extent // 2 for extent in got.shape)
    got[index] += 4  # steps
    assert verdict_of(op, inputs, got).verdict == "diverged"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_with_a_fault_besides_diverges(variant: Callable[[int, float], Made]) -> None:
    op, inputs, got = variant(4, 1.0)
    scaled = store((got.astype(np.uint32) << 16).view(np.float32) * np.float32(1.01))
    assert not verdict_of(op, inputs, scaled)


@pytest.mark.parametrize("name", ["prefill-33", "prefill-258", "decode-0-257", "decode-2047-32"])
def test_hugging_faces_own_rope_is_not_equivalent(name: str) -> None:
    inputs = stressed(name, "k_rope")
    for options in ({"table": narrow}, {"table": narrow, "product": narrow}):
        found = verdict_of("k_rope", inputs, store(planted.rope(inputs, **options)))
        assert found.verdict == "diverged"


def test_hugging_faces_own_rope_is_not_equivalent_on_ordinary_rows_either() -> None:
    _, inputs, _ = products_rounded(5, 1.0)
    got = store(planted.rope(inputs, table=narrow, product=narrow))
    assert verdict_of("k_rope", inputs, got).verdict == "diverged"


@pytest.mark.parametrize("n", ["1", "15", "16", "17", "33"])
@pytest.mark.parametrize("value", [-1e4, -65504.0, -1e9, float(np.finfo(np.float32).min) / 2])
def test_a_finite_masked_value_of_probability_zero_is_equivalent(n: str, value: float) -> None:
    inputs = stressed(f"prefill-{n}", "mask")
    found = verdict_of("mask", inputs, store(planted.mask(inputs, value=value)))
    assert found.verdict == ("exact" if n == "1" else "equivalent")


@pytest.mark.parametrize("value", [-10.0, -150.0, 0.0, 1e9])
def test_a_masked_value_that_leaves_probability_diverges(value: float) -> None:
    inputs = stressed("prefill-17", "mask")
    assert (
        verdict_of("mask", inputs, store(planted.mask(inputs, value=value))).verdict == "diverged"
    )


def test_a_low_masked_value_is_judged_by_the_row_it_stands_in() -> None:
    inputs = {"scores": torch.zeros(32, 4, 4, dtype=torch.float64)}
    for value, verdict in ((-94.0, "equivalent"), (-92.0, "diverged")):
        got = store(planted.mask(inputs, value=value))
        assert verdict_of("mask", inputs, got).verdict == verdict


def test_an_unmasked_score_changed_beside_finite_masked_values_diverges() -> None:
    inputs = stressed("prefill-17", "mask")
    got = store(planted.mask(inputs, value=-1e9))
    got[3, 5, 2] ^= 1
    assert verdict_of("mask", inputs, got).verdict == "diverged"


@pytest.mark.parametrize("op", ["embed", "scores", "attn_v", "o_proj", "argmax", "softmax"])
def test_ops_without_a_variant_have_none(op: str) -> None:
    inputs = stressed("prefill-33", op)
    real = real_of(op, inputs)
    assert equivalents_of(op, inputs, real)(real.to(torch.float64)) is None
