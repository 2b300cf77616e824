"""SwiGLU and the residual add: ops whose elements depend on nothing but themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from harness.bounds import TINY, Bound, U
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe, Some, flat_bound
from harness.hypotheses.registry import base, hypothesis
from reference.rounding import round_to_bf16

SWIGLU: Final = ("swiglu",)
RESIDUALS: Final = ("attn_residual", "mlp_residual")
Function = Callable[[Tensor, Tensor], Some]


@dataclass(frozen=True)
class Pointwise(Recipe):
    """first and second of one shape; compute gives the real result and b of paired elements."""

    first: Tensor
    second: Tensor
    compute: Function

    def some(self, flat: Tensor) -> Some:
        return self.compute(self.first.reshape(-1)[flat], self.second.reshape(-1)[flat])

    def whole(self) -> tuple[Tensor, Bound]:
        real, b = self.compute(self.first, self.second)
        return real, flat_bound(b)


# --- SwiGLU ---------------------------------------------------------------------------------------

Activation = Callable[[Tensor], Tensor]


def _silu(a: Tensor) -> Tensor:
    return a / (1 + torch.exp(-a))


def _activated(activation: Activation, lost: float = 2.0**-126) -> Function:
    """activation(a) * b with the bound of bounds._swiglu; lost: its absolute error, over |a||b|."""

    def compute(a: Tensor, b: Tensor) -> Some:
        real = activation(a) * b
        return real, 8 * U * real.abs() + a.abs() * b.abs() * lost + TINY * (1 + b.abs())

    return compute


@base(*SWIGLU)
def _swiglu(evidence: Evidence) -> Pointwise:
    return Pointwise(evidence.inputs["gate"], evidence.inputs["up"], _activated(_silu))


def _gelu_tanh(a: Tensor) -> Tensor:
    return a / 2 * (1 + torch.tanh(0.7978845608028654 * (a + 0.044715 * a**3)))


def _gelu(a: Tensor) -> Tensor:
    return a / 2 * torch.special.erfc(-a / 2**0.5)


# In float32 the GELU's 1 + tanh (or erf) cancels where a is negative: lost is absolute.
ACTIVATIONS: Final[dict[str, tuple[str, Function]]] = {
    "GELU, tanh form": ("GELU in its tanh form where SiLU belongs", _activated(_gelu_tanh, 8 * U)),
    "GELU, erf form": ("GELU in its erf form where SiLU belongs", _activated(_gelu, 4 * U)),
    "quick GELU": (
        "a sigmoid(1.702 a) where SiLU belongs",
        _activated(lambda a: a / (1 + torch.exp(-1.702 * a))),
    ),
    "ReLU": ("ReLU where SiLU belongs", _activated(lambda a: a.clamp(min=0.0))),
    "squared ReLU": (
        "the square of ReLU where SiLU belongs",
        _activated(lambda a: a.clamp(min=0.0).square()),
    ),
    "no activation": ("gate * up without an activation", _activated(lambda a: a)),
    "sigmoid alone": (
        "sigmoid(gate) * up where gate * sigmoid(gate) * up belongs",
        _activated(lambda a: 1 / (1 + torch.exp(-a))),
    ),
    "tanh": ("tanh where SiLU belongs", _activated(torch.tanh, 2 * U)),
    "exponent's sign": (
        "exp(gate) where exp(-gate) belongs",
        _activated(lambda a: a / (1 + torch.exp(a))),
    ),
}


def _computing(compute: Function) -> Callable[[Pointwise, Evidence], Pointwise]:
    return lambda recipe, evidence: replace(recipe, compute=compute)


for _name, (_says, _compute) in ACTIVATIONS.items():
    hypothesis(_name, axis="compute", ops=SWIGLU, says=_says)(_computing(_compute))


@hypothesis("up missing", axis="compute", ops=SWIGLU)
def _upless(recipe: Pointwise, evidence: Evidence) -> Pointwise:
    """the activated gate alone, without up,"""
    return replace(recipe, compute=lambda a, b: _activated(_silu)(a, torch.ones_like(b)))


@hypothesis("gate and up added", axis="compute", ops=SWIGLU)
def _summed(recipe: Pointwise, evidence: Evidence) -> Pointwise:
    """silu(gate) + up where the product belongs"""

    def compute(a: Tensor, b: Tensor) -> Some:
        silu = _silu(a)
        return silu + b, 8 * U * silu.abs() + U * (silu + b).abs() + a.abs() * 2.0**-126 + TINY

    return replace(recipe, compute=compute)


@hypothesis("activation of the product", axis="compute", ops=SWIGLU)
def _of_product(recipe: Pointwise, evidence: Evidence) -> Pointwise:
    """silu(gate * up) where silu(gate) * up belongs"""

    def compute(a: Tensor, b: Tensor) -> Some:
        product, ones = a * b, torch.ones_like(a)
        return _activated(_silu, 2 * U)(product, ones)

    return replace(recipe, compute=compute)


@hypothesis("operands exchanged", axis="operands", ops=SWIGLU)
def _exchanged(recipe: Pointwise, evidence: Evidence) -> Pointwise:
    """gate and up exchanged, silu(up) * gate,"""
    return replace(recipe, first=recipe.second, second=recipe.first)


@hypothesis("gate twice", axis="operands", ops=SWIGLU)
def _gate_twice(recipe: Pointwise, evidence: Evidence) -> Pointwise:
    """gate in place of up"""
    return replace(recipe, second=recipe.first)


@hypothesis("up twice", axis="operands", ops=SWIGLU)
def _up_twice(recipe: Pointwise, evidence: Evidence) -> Pointwise:
    """up in place of gate"""
    return replace(recipe, first=recipe.second)


# --- residual -------------------------------------------------------------------------------------


def _add(x: Tensor, y: Tensor) -> Some:
    real = x + y
    return real, torch.zeros_like(
        real
    )  # the float32 sum rounds nowhere that matters: bounds._exact


def _rounded_once_more(first: Function, add: str) -> Function:
    """A sum stored as bf16, and x or y added to that."""

    def compute(x: Tensor, y: Tensor) -> Some:
        real = round_to_bf16(first(x, y)[0]) + (x if add == "x" else y)
        return real, torch.zeros_like(real)

    return compute


@base(*RESIDUALS)
def _residual(evidence: Evidence) -> Pointwise:
    return Pointwise(evidence.inputs["x"], evidence.inputs["y"], _add)


SUMS: Final[dict[str, tuple[str, Function]]] = {
    "block's output missing": ("the block's output not added", lambda x, y: _add(x, 0 * x)),
    "residual missing": (
        "the residual stream lost, the block's output alone,",
        lambda x, y: _add(y, 0 * y),
    ),
    "residual added to itself": ("x + x where x + y belongs", lambda x, y: _add(x, x)),
    "output added to itself": ("y + y where x + y belongs", lambda x, y: _add(y, y)),
    "output added twice": (
        "the block's output added twice, x + 2 y,",
        _rounded_once_more(_add, "y"),
    ),
    "residual added twice": (
        "the residual stream added twice, 2 x + y,",
        _rounded_once_more(_add, "x"),
    ),
    "output subtracted": ("x - y where x + y belongs", lambda x, y: _add(x, -y)),
    "operands multiplied": ("x * y where x + y belongs", lambda x, y: _add(x * y, 0 * x)),
}

for _name, (_says, _compute) in SUMS.items():
    hypothesis(_name, axis="compute", ops=RESIDUALS, says=_says)(_computing(_compute))
