"""RoPE: which elements make a pair, and by which angle they are rotated.

The family is a cross product (pairing, frequencies, position, rotation, precision, head width), of
which the search tries single changes first. An element's own pair and angle are computed for it
alone, so that a combination costs what a sample of 64 elements costs.
To add a frequency: a function of the head width in `FREQUENCIES`; other changes as in registry.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from harness.bounds import HEAD, TINY, Bound, U
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe, Some, flat_bound
from harness.hypotheses.registry import base, hypothesis
from reference.ops import llama3_inv_freq
from reference.rounding import round_to_bf16

ROPE: Final = ("q_rope", "k_rope")
THETA: Final = 500000.0
Frequencies = Callable[[int], Tensor]  # head width -> angle per position of each pair, (width / 2,)
Narrow = Callable[[Tensor], Tensor]
Numbers = np.ndarray


@cache
def _scaled_frequencies(head: int) -> Tensor:
    return llama3_inv_freq(head)


@dataclass(frozen=True)
class Rope(Recipe):
    """One rotation. x (n, width); inv_freq as recorded, or None: `frequencies` of the head's width.

    position: of an element's row and head; angle_of: what becomes of the position, the frequency,
    the angle. cos and sin lie within `narrow`'s reach of their own bounds. slack: how far x itself
    may be off (n, width). signs: of the two mixed terms. swap: cos and sin exchanged.
    """

    x: Tensor
    positions: Tensor  # (n,) float64
    inv_freq: Tensor | None
    frequencies: Frequencies = _scaled_frequencies
    head: int = HEAD
    adjacent: bool = False
    by_head: bool = False
    index: Callable[[Numbers, int], Numbers] | None = None  # frequency used by pair i of so many
    narrow_position: Narrow | None = None
    narrow_frequency: Narrow | None = None
    narrow_angle: Narrow | None = None
    narrow_table: Narrow | None = None
    signs: tuple[int, int] = (-1, 1)
    swap: bool = False
    overwritten: bool = False
    slack: Tensor | None = None

    def some(self, flat: Tensor) -> Some:
        # NumPy, whose calls cost a fraction of torch's: the search makes a thousand small ones.
        at, x, half = flat.numpy(), self.x.numpy(), self.head // 2
        row, column = np.divmod(at, x.shape[1])
        place = column % self.head
        if self.adjacent:
            pair, second, apart = place // 2, place % 2 == 1, 1
        else:
            pair, second, apart = place % half, place >= half, half
        first_at = column - np.where(second, apart, 0)
        with np.errstate(invalid="ignore"):  # what is infinite in fp16 gives NaN
            cos, sin, cos_off, sin_off, error = self._turn(row, column // self.head, pair)
        x1, x2 = x[row, first_at], x[row, first_at + apart]
        own, mixed = np.where(second, x2, x1), np.where(second, x1, x2)
        sign = np.where(second, self.signs[1], self.signs[0])
        # As bounds._rope, which knows pairs of halves only.
        b = (np.abs(x1) + np.abs(x2)) * (error + 3 * U) + 2 * TINY
        b = b + np.abs(own) * cos_off + np.abs(mixed) * sin_off
        if self.slack is not None:
            slack = self.slack.numpy()
            s1, s2 = slack[row, first_at], slack[row, first_at + apart]
            b = b + np.where(second, s2, s1) * np.abs(cos) + np.where(second, s1, s2) * np.abs(sin)
        if self.overwritten:  # x1' is stored, as bf16, before x2' reads it
            turned = x1 * cos + self.signs[0] * x2 * sin
            middle, off = _between(round_to_bf16, turned, b)
            mixed = np.where(second, middle, mixed)
            b = b + np.where(second, off * np.abs(sin), 0.0)
        return torch.from_numpy(own * cos + sign * mixed * sin), torch.from_numpy(b)

    def _turn(self, row: Numbers, head: Numbers, pair: Numbers) -> tuple[Numbers, ...]:
        """cos, sin, what each may be off beside the bound, and the angle's error, of elements."""
        table = self.inv_freq if self.inv_freq is not None else self.frequencies(self.head)
        used = pair if self.index is None else self.index(pair, self.head // 2)
        frequency = table.numpy()[used]
        position = head.astype(np.float64) if self.by_head else self.positions.numpy()[row]
        if self.narrow_position is not None:
            position = self.narrow_position(torch.from_numpy(position)).numpy()
        # A value that is rounded may lie near a tie: then either neighbour is possible.
        off = 0.0 * frequency
        if self.narrow_frequency is not None:
            error = np.abs(frequency) * (8 * U)
            frequency, off = _between(self.narrow_frequency, frequency, error)
        angle, off = position * frequency, off * np.abs(position)
        if self.narrow_angle is not None:
            error = np.abs(angle) * (8 * U) + off
            angle, off = _between(self.narrow_angle, angle, error)
        cos, sin = np.cos(angle), np.sin(angle)
        if self.swap:
            cos, sin = sin, cos
        error = np.abs(angle) * (8 * U) + 4 * U + off
        if self.narrow_table is None:
            return cos, sin, 0.0 * cos, 0.0 * sin, error
        cos, cos_off = _between(self.narrow_table, cos, error)
        sin, sin_off = _between(self.narrow_table, sin, error)
        return cos, sin, cos_off, sin_off, 0.0 * error

    def whole(self) -> tuple[Tensor, Bound]:
        real, b = self.some(torch.arange(self.x.numel()))
        return real.reshape(self.x.shape), flat_bound(b.reshape(self.x.shape))


def _between(narrow: Narrow, value: Numbers, error: Numbers) -> tuple[Numbers, Numbers]:
    """The middle of what a rounded value may be, and half the distance of its ends."""
    low, high = narrow(torch.from_numpy(np.stack((value - error, value + error)))).numpy()
    with np.errstate(invalid="ignore"):
        return (low + high) / 2, (high - low) / 2


def to_fp16(x: Tensor) -> Tensor:
    """The nearest float16, as float64; infinity from 65520 on."""
    return x.to(torch.float32).to(torch.float16).to(torch.float64)


@base(*ROPE)
def _rope(evidence: Evidence) -> Rope:
    inputs = evidence.inputs
    return Rope(inputs["x"], inputs["positions"].to(torch.float64), inputs["inv_freq"])


# --- pairing --------------------------------------------------------------------------------------


@hypothesis("adjacent pairing", axis="pairing", ops=ROPE)
def _adjacent(recipe: Rope, evidence: Evidence) -> Rope:
    """adjacent pairing (2i, 2i+1) where the weights want (i, i+32)"""
    return replace(recipe, adjacent=True)


# --- frequencies ----------------------------------------------------------------------------------


def _plain(theta: float) -> Frequencies:
    def frequencies(head: int) -> Tensor:
        return theta ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)

    return frequencies


def _llama3(**changed: float) -> Frequencies:
    def frequencies(head: int) -> Tensor:
        return llama3_inv_freq(head, **changed)  # type: ignore[arg-type]

    return frequencies


def _blend(reverse: bool) -> Frequencies:
    """Llama 3's scaling with its blend the wrong way round, or a hard step in the blend's place."""

    def frequencies(head: int) -> Tensor:
        plain = _plain(THETA)(head)
        wave = 2 * math.pi / plain
        keep = ((8192 / wave - 1) / 3).clamp(0, 1)
        if reverse:
            middle = keep * plain / 32 + (1 - keep) * plain
            return torch.where((keep > 0) & (keep < 1), middle, _llama3()(head))
        return torch.where(wave > 8192, plain / 32, plain)

    return frequencies


def _exchanged(head: int) -> Tensor:
    """Short waves divided, long ones kept: the scaling's condition the wrong way round."""
    plain = _plain(THETA)(head)
    return plain * plain / 32 / llama3_inv_freq(head)


FREQUENCIES: Final[dict[str, tuple[str, Frequencies]]] = {
    "plain frequencies": ("unscaled frequencies 500000^(-2i/64)", _plain(THETA)),
    "theta 10000": ("theta 10000 where it must be 500000", _llama3(theta=10000.0)),
    "plain frequencies of theta 10000": (
        "unscaled frequencies 10000^(-2i/64)",
        _plain(10000.0),
    ),
    "scaling factor 8": ("the scaling factor 8 of other Llama 3 models", _llama3(factor=8.0)),
    "scaling factor 8, theta 10000": (
        "the scaling factor 8 and theta 10000",
        _llama3(factor=8.0, theta=10000.0),
    ),
    "blend reversed": ("the blend of medium frequencies reversed", _blend(True)),
    "blend missing": ("a hard step where medium frequencies are blended", _blend(False)),
    "scaling of short waves": ("short waves scaled and long ones kept", _exchanged),
    "every frequency scaled": (
        "all frequencies divided by 32, short waves too",
        lambda head: _plain(THETA)(head) / 32,
    ),
    "equal frequencies": (
        "the same frequency, 1 radian a position, for all pairs",
        lambda head: torch.ones(head // 2, dtype=torch.float64),
    ),
    "inverted frequencies": (
        "inverted frequencies, 500000^(+2i/64)",
        lambda head: 1 / _plain(THETA)(head),
    ),
    "inverted frequencies of theta 10000": (
        "inverted frequencies, 10000^(+2i/64)",
        lambda head: 1 / _plain(10000.0)(head),
    ),
    "exponent halved": (
        "the exponent i/64 where it must be 2i/64",
        lambda head: _plain(THETA)(head).sqrt(),
    ),
    "exponent doubled": (
        "the exponent 4i/64 where it must be 2i/64",
        lambda head: _plain(THETA)(head).square(),
    ),
}


def _with_frequencies(frequencies: Frequencies) -> Callable[[Rope, Evidence], Rope]:
    frequencies = cache(frequencies)
    return lambda recipe, evidence: replace(recipe, inv_freq=None, frequencies=frequencies)


for _name, (_says, _made) in FREQUENCIES.items():
    hypothesis(_name, axis="frequencies", ops=ROPE, says=_says)(_with_frequencies(_made))


@hypothesis("exponent over the row's width", axis="frequencies", ops=ROPE)
def _over_width(recipe: Rope, evidence: Evidence) -> Rope:
    """exponents 2i over the row's width where they must be over the head's"""
    width = recipe.x.shape[1]

    def frequencies(head: int) -> Tensor:
        return THETA ** -(torch.arange(0, head, 2, dtype=torch.float64) / width)

    return replace(recipe, inv_freq=None, frequencies=frequencies)


@hypothesis("table index halved", axis="frequencies", ops=ROPE)
def _index_halved(recipe: Rope, evidence: Evidence) -> Rope:
    """pair i taking the frequency of pair i/2, as if the table held each angle once"""
    return replace(recipe, index=lambda pair, half: pair // 2)


@hypothesis("table index doubled", axis="frequencies", ops=ROPE)
def _index_doubled(recipe: Rope, evidence: Evidence) -> Rope:
    """pair i taking the frequency of pair 2i, modulo the number of pairs"""
    return replace(recipe, index=lambda pair, half: pair * 2 % half)


@hypothesis("table index reversed", axis="frequencies", ops=ROPE)
def _index_reversed(recipe: Rope, evidence: Evidence) -> Rope:
    """pair i taking the frequency of pair 31-i"""
    return replace(recipe, index=lambda pair, half: half - 1 - pair)


# --- position -------------------------------------------------------------------------------------


@hypothesis("not rotated", axis="position", ops=ROPE, alone=True)
def _still(recipe: Rope, evidence: Evidence) -> Rope:
    """no rotation at all, as at position 0,"""
    return replace(recipe, positions=torch.zeros_like(recipe.positions))


def _by(offset: int) -> Callable[[Rope, Evidence], Rope]:
    return lambda recipe, evidence: replace(recipe, positions=recipe.positions + offset)


for _offset in (1, -1):
    hypothesis(
        f"position {_offset:+d}",
        axis="position",
        ops=ROPE,
        says=f"a position {'one too far' if _offset > 0 else 'one too early'} (p{_offset:+d})",
    )(_by(_offset))


@hypothesis("head number as position", axis="position", ops=ROPE)
def _head_number(recipe: Rope, evidence: Evidence) -> Rope:
    """the head's number where the position belongs"""
    return replace(recipe, by_head=True)


@hypothesis("position of the first row", axis="position", ops=ROPE)
def _first_row(recipe: Rope, evidence: Evidence) -> Rope | None:
    """the first row's position for all rows (in decode slot 0's)"""
    if len(recipe.positions) < 2:
        return None
    return replace(recipe, positions=recipe.positions[:1].expand(len(recipe.positions)))


@hypothesis("row number as position", axis="position", ops=ROPE)
def _row_number(recipe: Rope, evidence: Evidence) -> Rope:
    """the row's number in the batch where the position belongs"""
    return replace(recipe, positions=torch.arange(len(recipe.positions), dtype=torch.float64))


@hypothesis("positions of the other rows", axis="position", ops=ROPE)
def _positions_turned(recipe: Rope, evidence: Evidence) -> Rope | None:
    """rows taking each other's positions, in reverse order"""
    if len(recipe.positions) < 2:
        return None
    return replace(recipe, positions=recipe.positions.flip(0))


@hypothesis("position doubled", axis="position", ops=ROPE)
def _position_doubled(recipe: Rope, evidence: Evidence) -> Rope:
    """twice the position"""
    return replace(recipe, positions=recipe.positions * 2)


# --- rotation -------------------------------------------------------------------------------------


@hypothesis("angle negated", axis="rotation", ops=ROPE)
def _negated(recipe: Rope, evidence: Evidence) -> Rope:
    """the angle's sign the wrong way round"""
    return replace(recipe, signs=(1, -1))


@hypothesis("both terms added", axis="rotation", ops=ROPE)
def _added(recipe: Rope, evidence: Evidence) -> Rope:
    """x1 cos + x2 sin where it must be x1 cos - x2 sin"""
    return replace(recipe, signs=(1, 1))


@hypothesis("both terms subtracted", axis="rotation", ops=ROPE)
def _subtracted(recipe: Rope, evidence: Evidence) -> Rope:
    """x2 cos - x1 sin where it must be x2 cos + x1 sin"""
    return replace(recipe, signs=(-1, -1))


@hypothesis("cosine and sine exchanged", axis="rotation", ops=ROPE)
def _exchanged_tables(recipe: Rope, evidence: Evidence) -> Rope:
    """cosine and sine exchanged"""
    return replace(recipe, swap=True)


@hypothesis("second half reads the first one's result", axis="rotation", ops=ROPE)
def _overwritten(recipe: Rope, evidence: Evidence) -> Rope:
    """the second element of a pair computed from the first one's result, stored too early,"""
    return replace(recipe, overwritten=True)


@hypothesis("rotated twice", axis="times", ops=ROPE, alone=True)
def _twice(recipe: Rope, evidence: Evidence) -> Rope:
    """the rotation applied twice"""
    real, bound = recipe.whole()
    middle, slack = _between(round_to_bf16, real.numpy(), bound.strict.numpy())
    return replace(recipe, x=torch.from_numpy(middle), slack=torch.from_numpy(slack))


# --- precision ------------------------------------------------------------------------------------

for _what, _field in (
    ("position", "narrow_position"),
    ("frequencies", "narrow_frequency"),
    ("angle", "narrow_angle"),
    ("cosine and sine", "narrow_table"),
):
    for _kind, _narrow in (("bf16", round_to_bf16), ("fp16", to_fp16)):

        def _rounded(
            recipe: Rope, evidence: Evidence, what: str = _field, narrow: Narrow = _narrow
        ) -> Rope:
            return replace(recipe, **{what: narrow})  # type: ignore[arg-type]

        hypothesis(
            f"{_what} in {_kind}", axis="precision", ops=ROPE, says=f"{_what} rounded to {_kind}"
        )(_rounded)


# --- width ----------------------------------------------------------------------------------------


@hypothesis("other head width", axis="width", ops=ROPE)
def _width(recipe: Rope, evidence: Evidence) -> Iterator[tuple[str, Rope]]:
    """heads of {} elements"""
    width = recipe.x.shape[1]
    for head in dict.fromkeys((32, 128, 512, width)):
        if width % head == 0 and head != HEAD:
            yield str(head), replace(recipe, head=head, inv_freq=None)
            if recipe.inv_freq is not None:  # pairs after the 32nd begin again with the first
                label = f"{head} with the angles of heads of 64"
                yield label, replace(recipe, head=head, index=lambda pair, half: pair % 32)
