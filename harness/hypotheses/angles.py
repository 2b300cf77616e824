"""Fits of RoPE: the positions, or the angles, by which a result was in fact rotated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from harness.bounds import HEAD, TINY, U
from harness.hypotheses.fit import Fit, rounded_from
from harness.hypotheses.recipe import Test, possible, within
from harness.hypotheses.registry import base_recipe

_ROPE: Final = ("q_rope", "k_rope")
_POSITIONS: Final = 2048
_AGREE: Final = 2.0**-11  # radians: what 16 or more elements of bf16 tell apart
_TRIED: Final = 24  # elements of a row at which all positions are tried


def positions(test: Test) -> Iterator[Fit]:
    """A whole position for each row."""
    if test.evidence.op not in _ROPE:
        return
    recipe: Any = base_recipe(test.evidence)
    own = recipe.positions
    width = recipe.x.shape[1]
    found = own.clone()
    generator = torch.Generator().manual_seed(1)
    for row in range(len(own)):
        columns = torch.randperm(width, generator=generator)[:_TRIED]
        if test.all_possible(recipe, row * width + columns):
            continue
        tried = replace(
            recipe,
            x=recipe.x[row].expand(_POSITIONS, width),
            positions=torch.arange(_POSITIONS, dtype=torch.float64),
        )
        flat = torch.arange(_POSITIONS)[:, None] * width + columns  # (2048, tried)
        real, b = (part.reshape(flat.shape) for part in tried.some(flat.reshape(-1)))
        value = test.value[row * width + columns].expand(flat.shape)
        fits = torch.nonzero(possible(value, real, b).all(dim=1)).squeeze(1)
        if not len(fits):
            return
        found[row] = float(fits[0])
    if not torch.equal(found, own) and test.explains(replace(recipe, positions=found)):
        wrong = torch.nonzero(found != own).squeeze(1).tolist()
        shown = ", ".join(f"row {r} by position {found[r]:g}, not {own[r]:g}" for r in wrong[:3])
        more = f" and {len(wrong) - 3} more rows" if len(wrong) > 3 else ""
        yield Fit("measured positions", f"a rotation of {shown}{more},")


def angles(test: Test) -> Iterator[Fit]:
    """An angle for each row and pair, the same for all heads, with either pairing."""
    if test.evidence.op not in _ROPE or not bool(test.value.isfinite().all()):
        return
    inputs = test.evidence.inputs
    x, where, inv_freq = inputs["x"], inputs["positions"].to(torch.float64), inputs["inv_freq"]
    if x.shape[1] < 4 * HEAD:
        return
    for pairing, adjacent in (("halves", False), ("adjacent elements", True)):
        before, after = _pairs(x, adjacent), _pairs(test.value.reshape(x.shape), adjacent)
        angle = _feasible(before, after)  # (n, 32)
        if angle is None:
            continue
        b = before.abs().sum(-1) * (7 * U + 1e-12) + 2 * TINY  # (n, heads, 32)
        turned = _turn(before, angle)
        made = within(_unpaired(turned, adjacent), _unpaired(torch.stack((b, b), -1), adjacent))
        if test.explains(made):
            phrase = f"a rotation of {pairing} by angles that are not position * frequency"
            yield Fit("measured angles", f"{phrase} ({_compared(angle, where, inv_freq)})")


def _pairs(x: Tensor, adjacent: bool) -> Tensor:
    """(n, heads * 64) -> (n, heads, 32, 2)."""
    if adjacent:
        return x.unflatten(1, (-1, HEAD // 2, 2))
    return x.unflatten(1, (-1, 2, HEAD // 2)).transpose(2, 3)


def _unpaired(pairs: Tensor, adjacent: bool) -> Tensor:
    return (pairs if adjacent else pairs.transpose(2, 3)).flatten(1)


def _turn(pairs: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # (n, 1, 32)
    first, second = pairs.unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _feasible(before: Tensor, after: Tensor) -> Tensor | None:
    """Angles (n, 32) that make every element possible, as far as that can be told to first order.

    From the least-squares angle on, the interval that each element leaves is cut with the others'.
    """
    cross = before[..., 0] * after[..., 1] - before[..., 1] * after[..., 0]
    dot = (before * after).sum(-1)
    angle = torch.atan2(cross.sum(1), dot.sum(1))  # (n, 32)
    low, high = rounded_from(after)
    for _ in range(3):
        turned = _turn(before, angle)
        slope = torch.stack((-turned[..., 1], turned[..., 0]), dim=-1)
        one, two = (low - turned) / slope, (high - turned) / slope
        least = torch.minimum(one, two).nan_to_num(-torch.inf)
        most = torch.maximum(one, two).nan_to_num(torch.inf)
        least = least.amax(dim=(1, 3))  # (n, 32)
        most = most.amin(dim=(1, 3))
        if bool((most - least < -1e-3).any()):
            return None
        step = (least + most) / 2
        angle = angle + step.clamp(-0.1, 0.1).nan_to_num(0.0)
    return angle


def _compared(angle: Tensor, where: Tensor, inv_freq: Tensor) -> str:
    """Which frequency indices agree with Llama 3's, and the others' ratio where it is constant."""
    row = int(where.abs().argmax())
    turns = 2 * torch.pi
    right = where[row] * inv_freq  # (32,)
    away = (angle[row] - right).remainder(turns)
    away = torch.minimum(away, turns - away)
    agree = away <= _AGREE
    if bool(agree.all()):
        return f"at position {where[row]:g} they are right; at others not"
    text = f"at position {where[row]:g} indices {_listed(agree)} agree with Llama 3's"
    small = ~agree & (right.abs() < 0.1)
    ratio = (angle[row] / right)[small]
    if len(ratio) > 2 and float((ratio / ratio.median() - 1).abs().max()) < 0.05:
        text += f", and indices {_listed(small)} are {float(ratio.median()):.3g} times those"
    first = int(torch.nonzero(~agree)[0])
    measured, wanted = float(angle[row][first]), float((right[first] + torch.pi) % turns - torch.pi)
    return f"{text}; index {first} is {measured:.4g} rad, not {wanted:.4g}"


def _listed(chosen: Tensor) -> str:
    """Such as "0-14, 18"."""
    spans: list[list[int]] = []
    for i in torch.nonzero(chosen).squeeze(1).tolist():
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in spans) or "none"
