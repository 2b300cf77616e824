"""Harmless variants of an op: one documented intermediate rounded to bf16, or other masked values.

Such a kernel is not wrong, it is a different faithful choice (Hugging Face's norm rounds before the
weight), so its verdict is `equivalent`, a failure only with --strict. A variant explains a result
if each element is one it can give: the intermediate is computed in float64, rounded once, and the
rest of the op done on it. Where the intermediate lies within its own float32 bound of a tie, a
correct kernel may round it either way, so both neighbours are allowed. Nothing else is: Hugging
Face's own RoPE, whose cosines and sines are bf16, is a less exact op and no variant here.

To add one: a function (inputs, real, got) -> bool, and its line in `_VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from harness.bounds import HEAD, SCALE, TINY, U
from harness.verdict import ulp_distance
from reference.rounding import round_to_bf16

Inputs = Mapping[str, Any]
_ZERO: Final = 2.0**-134  # a probability up to this rounds to 0 in bf16


def equivalents_of(op: str, inputs: Inputs, real: Tensor) -> Callable[[Tensor], str | None]:
    """For `judge`: the name of the first variant of `op` that explains all of a result, or None.

    The returned function takes the result as float64 on the bf16 grid, of real's shape.
    """
    return partial(_first, op, inputs, real)


def _first(op: str, inputs: Inputs, real: Tensor, got: Tensor) -> str | None:
    for name, explains in _VARIANTS.get(op, {}).items():
        if explains(inputs, real, got):
            return name
    return None


def _neighbours(x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The least and greatest bf16 an intermediate may round to; equal unless it is near a tie."""
    return round_to_bf16(x - bound), round_to_bf16(x + bound)


def _norm_before_weight(inputs: Inputs, real: Tensor, got: Tensor) -> bool:
    """bf16(x / rms) * weight, as Hugging Face's LlamaRMSNorm. x (n, d), weight (d,).

    The bound of x / rms is the norm's without the multiply; the product of bf16 is exact in
    float32.
    """
    x, weight = inputs["x"], inputs["weight"].to(torch.float64)
    scaled = x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5)  # (n, d)
    pair = _neighbours(scaled, (x.shape[-1] / 2 + 5) * U * scaled.abs() + TINY)
    return _reached(got, pair, [round_to_bf16(t * weight) for t in pair])


def _silu_before_product(inputs: Inputs, real: Tensor, got: Tensor) -> bool:
    """bf16(silu(gate)) * up, as Hugging Face's LlamaMLP. gate, up (n, 8192)."""
    gate, up = inputs["gate"], inputs["up"]
    silu = gate / (1 + torch.exp(-gate))
    pair = _neighbours(silu, 7 * U * silu.abs() + gate.abs() * 2.0**-126 + TINY)
    return _reached(got, pair, [round_to_bf16(t * up) for t in pair])


def _products_rounded(inputs: Inputs, real: Tensor, got: Tensor) -> bool:
    """RoPE's two products rounded to bf16 each, then their sum; cos and sin stay float32. x (n, w).

    A product's bound: |x| (angle error + u), the angle's error as in `bounds`. A sum of two bf16
    numbers rounds to bf16 once.
    """
    x, positions, inv_freq = inputs["x"], inputs["positions"], inputs["inv_freq"]
    angle = positions.to(torch.float64)[:, None, None] * inv_freq  # (n, 1, 32)
    error = angle.abs() * (8 * U) + 5 * U
    cos, sin = angle.cos(), angle.sin()
    first, second = x.unflatten(1, (-1, 2, HEAD // 2)).unbind(2)  # (n, heads, 32) each
    mine = got.unflatten(1, (-1, 2, HEAD // 2)).unbind(2)
    for a, b, sign, half in ((first, second, -1, mine[0]), (second, first, 1, mine[1])):
        kept = _neighbours(a * cos, a.abs() * error + TINY)
        mixed = _neighbours(b * sin, b.abs() * error + TINY)
        sums = [round_to_bf16(p + sign * q) for p in kept for q in mixed]
        if not _reached(half, (*kept, *mixed), sums):
            return False
    return True


def _probabilities_rounded(inputs: Inputs, real: Tensor, got: Tensor) -> bool:
    """Decode attention with its probabilities rounded to bf16, as every eager implementation does.

    A probability's own bound is relative: twice the statistical error of the scores (a worst case
    would put most of them near a tie), (len + 8) u for exponential, sum and division. The weighted
    sum is a GEMM of K = len; where a probability may round either way, the step between counts.
    """
    q, keys, values = inputs["q"], inputs["keys"], inputs["values"]
    for row in range(q.shape[0]):
        k = keys[row].unflatten(1, (-1, HEAD)).transpose(0, 1)  # (8, len, 64)
        v = values[row].unflatten(1, (-1, HEAD)).transpose(0, 1)
        length = k.shape[1]
        each = q[row].reshape(k.shape[0], -1, HEAD)  # (8, 4, 64)
        s = each @ k.transpose(1, 2) * SCALE  # (8, 4, len)
        norm = (each.square() @ k.square().transpose(1, 2)).sqrt() * SCALE
        away = s.amax(dim=-1, keepdim=True) - s
        delta = HEAD / 2 * U * (s.abs() + norm)
        relative = 2 * delta.amax(dim=-1, keepdim=True) + (length + 8) * U + 2 * U * away
        p = s.softmax(dim=-1)
        low, high = _neighbours(p, p * relative + TINY)
        middle = (low + high) / 2
        sums = 2 * U * length / (1 - 2 * U * length)
        allowed = ((high - low) / 2 + sums * high) @ v.abs()  # (8, 4, 64)
        centre = middle @ v
        mine = got[row].reshape(centre.shape)
        least, most = round_to_bf16(centre - allowed), round_to_bf16(centre + allowed)
        if not ((least <= mine) & (mine <= most)).all():
            return False
    return True


def _finite_mask(inputs: Inputs, real: Tensor, got: Tensor) -> bool:
    """Finite numbers for -infinity, so low that each gives probability 0. scores (32, n, n).

    Below -93 from the row's maximum exp rounds to 0 in bf16, whatever the sum.
    """
    masked = real.isinf() & (real < 0) & inputs["scores"].isfinite()
    if not torch.where(masked, True, got == round_to_bf16(real)).all():
        return False
    if not (got.isfinite() | (got == -torch.inf))[masked].all():
        return False
    top = real.amax(dim=-1, keepdim=True)
    return bool((torch.exp(got - top) <= _ZERO)[masked].all())


def _reached(got: Tensor, between: tuple[Tensor, ...], ends: list[Tensor]) -> bool:
    """Whether each element is one of its `ends`; +0 is -0.

    between: pairs (least, greatest) of the intermediates. Where one spans more than two neighbours
    (its bound is absolute and it is near zero), so may the result, between the outermost ends.
    """
    hit = torch.zeros(got.shape, dtype=torch.bool)
    for end in ends:
        hit |= got == end
    wide = torch.zeros(got.shape, dtype=torch.bool)
    for low, high in zip(between[::2], between[1::2], strict=True):
        wide |= ulp_distance(low, high) > 1
    every = torch.stack(ends)
    inside = (every.amin(0) <= got) & (got <= every.amax(0))
    return bool((hit | (wide & inside)).all())


Explains = Callable[[Inputs, Tensor, Tensor], bool]
_NORM: Final[dict[str, Explains]] = {"rounded to bf16 before the weight": _norm_before_weight}
_ROPE: Final[dict[str, Explains]] = {"both products rounded to bf16": _products_rounded}

_VARIANTS: Final[dict[str, dict[str, Explains]]] = {
    "attn_norm": _NORM,
    "mlp_norm": _NORM,
    "final_norm": _NORM,
    "q_rope": _ROPE,
    "k_rope": _ROPE,
    "mask": {"masked with a finite value of probability 0": _finite_mask},
    "attention": {"probabilities rounded to bf16": _probabilities_rounded},
    "swiglu": {"SiLU rounded to bf16 before the product": _silu_before_product},
}
