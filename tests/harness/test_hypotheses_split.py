"""bf16 partial sums are named, in whichever parts, and only where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.hypotheses import Evidence, diagnose
from reference import ops
from reference.rounding import bf16_bits, round_to_bf16


def grid(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return round_to_bf16(torch.from_numpy(rng.standard_normal(shape) * scale))


def split_sum(x: torch.Tensor, w: torch.Tensor, ends: list[int]) -> torch.Tensor:
    starts = [0, *ends[:-1]]
    parts = [round_to_bf16(x[:, a:b] @ w[:, a:b].T) for a, b in zip(starts, ends, strict=True)]
    return round_to_bf16(sum(parts, start=torch.zeros_like(parts[0])))


@pytest.mark.parametrize("ends", [[1024, 2048], [512, 1024, 1536, 2048], [64, 2048]])
def test_a_projection_in_parts(ends: list[int]) -> None:
    rng = np.random.default_rng(0)
    x, weight = grid(rng, 5, 2048), grid(rng, 512, 2048, scale=0.05)
    got = split_sum(x, weight, ends)
    evidence = Evidence(
        "prefill", "k_proj", 0, {"x": x, "weight": weight}, ops.linear(x, weight), bf16_bits(got)
    )
    assert [each.hypothesis for each in diagnose(evidence)] == ["bf16 partial sums"]


@pytest.mark.parametrize("n", [10, 14])
def test_attention_in_two_parts_as_cublas_does_for_some_prompts(n: int) -> None:
    rng = np.random.default_rng(n)
    masked = ops.mask(torch.from_numpy(rng.standard_normal((32, n, n)) * 2))
    probs, v = round_to_bf16(ops.softmax(masked)), grid(rng, n, 512, scale=0.3)
    first, second = torch.zeros_like(probs), probs.clone()
    first[:, :, :8] = probs[:, :, :8]
    second[:, :, :8] = 0
    got = round_to_bf16(round_to_bf16(ops.attn_v(first, v)) + round_to_bf16(ops.attn_v(second, v)))
    real = ops.attn_v(probs, v)
    evidence = Evidence("prefill", "attn_v", 0, {"probs": probs, "v": v}, real, bf16_bits(got))
    found = diagnose(evidence)
    assert [each.hypothesis for each in found] == ["bf16 partial sums"]
    assert "the first of 8 terms" in found[0].sentence
