"""Rotations that are wrong, each to be named (the table: test_hypotheses_table.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from reference.ops import llama3_inv_freq
from reference.rounding import bf16_bits
from tests.harness.planted import (
    F32,
    cut,
    f32,
    inv_freq,
    narrow,
    normal,
    store,
)
from tests.harness.test_hypotheses import Array, Fault, explained

# --- rope -----------------------------------------------------------------------------------------


def rotated(
    x: Array,
    angle: Array,
    adjacent: bool = False,
    head: int = 64,
    signs: tuple[int, int] = (-1, 1),
    table: Callable[[Array], Array] = lambda t: t,
    swap: bool = False,
    early: bool = False,
) -> Array:
    """x (n, width) by float32 angles (n, heads or 1, head / 2)."""
    shape = (len(x), -1, head // 2, 2) if adjacent else (len(x), -1, 2, head // 2)
    axis = 3 if adjacent else 2
    first, second = (np.take(x.reshape(shape), i, axis) for i in (0, 1))
    cos, sin = table(np.cos(angle.astype(F32))), table(np.sin(angle.astype(F32)))
    if swap:
        cos, sin = sin, cos
    one = first * cos + signs[0] * second * sin
    two = second * cos + signs[1] * (narrow(one) if early else first) * sin
    return np.stack((one, two), axis=axis).reshape(x.shape)


@cache
def rope_inputs(width: int, *positions: int) -> dict[str, Any]:
    return {
        "x": normal(width + len(positions), len(positions), width),
        "positions": torch.tensor(positions),
        "inv_freq": llama3_inv_freq(),
    }


def _frequencies() -> dict[str, Array]:
    i = np.arange(32, dtype=np.float64)
    plain = 500000.0 ** -(2 * i / 64)
    wave = 2 * np.pi / plain
    keep = np.clip((8192 / wave - 1) / 3, 0, 1)
    medium = (keep > 0) & (keep < 1)
    scaled = inv_freq().astype(np.float64)
    of_8 = (1 - keep) * plain / 8 + keep * plain
    low = 10000.0 ** -(2 * i / 64)
    keep_low = np.clip((8192 / (2 * np.pi / low) - 1) / 3, 0, 1)
    return {
        "plain frequencies": plain,
        "theta 10000": (1 - keep_low) * low / 32 + keep_low * low,
        "plain frequencies of theta 10000": low,
        "scaling factor 8": of_8,
        "scaling factor 8, theta 10000": (1 - keep_low) * low / 8 + keep_low * low,
        "blend reversed": np.where(medium, keep * plain / 32 + (1 - keep) * plain, scaled),
        "blend missing": np.where(wave > 8192, plain / 32, plain),
        "scaling of short waves": np.where(
            medium, plain * plain / 32 / scaled, np.where(wave > 8192, plain, plain / 32)
        ),
        "every frequency scaled": plain / 32,
        "equal frequencies": np.ones(32),
        "inverted frequencies": 1 / plain,
        "inverted frequencies of theta 10000": 1 / low,
        "exponent halved": np.sqrt(plain),
        "exponent doubled": plain**2,
        "exponent over the row's width": 500000.0 ** -(2 * i / 512),
        "table index halved": scaled[np.arange(32) // 2],
        "table index doubled": scaled[np.arange(32) * 2 % 32],
        "table index reversed": scaled[::-1],
    }


def _rope_faults() -> Iterator[Fault]:
    inputs = rope_inputs(512, 5, 23, 300, 1501)
    x, at = f32(inputs["x"]), inputs["positions"].numpy().astype(F32)
    scaled = inv_freq()

    def angle(positions: Array = at, frequencies: Array = scaled) -> Array:
        return positions.reshape(len(positions), -1, 1) * frequencies.astype(F32)

    def fault(name: str, what: str = "", op: str = "k_rope", **options: Any) -> Fault:
        turn = options.pop("angle", angle())
        return Fault(
            op,
            name,
            inputs,
            lambda: store(rotated(x, turn, **options)),
            bf16_bits(inputs["x"]),
            what,
            phase="decode",
        )

    for name, frequencies in _frequencies().items():
        yield fault(name, angle=angle(at, frequencies))
    yield fault("adjacent pairing", adjacent=True, op="q_rope")
    yield fault("not rotated", angle=angle(at * 0))
    yield fault("position +1", angle=angle(at + 1))
    yield fault("position -1", angle=angle(at - 1))
    heads = np.broadcast_to(np.arange(8, dtype=F32), (len(x), 8))
    yield fault("head number as position", angle=angle(heads))
    yield fault("position of the first row", angle=angle(at[:1].repeat(len(at))))
    yield fault("row number as position", angle=angle(np.arange(len(at), dtype=F32)))
    yield fault("positions of the other rows", angle=angle(at[::-1].copy()))
    yield fault("position doubled", angle=angle(at * 2))
    yield fault("angle negated", signs=(1, -1))
    yield fault("both terms added", signs=(1, 1))
    yield fault("both terms subtracted", signs=(-1, -1))
    yield fault("cosine and sine exchanged", swap=True)
    yield fault("second half reads the first one's result", early=True)
    yield Fault(
        "k_rope",
        "rotated twice",
        inputs,
        lambda: store(rotated(narrow(rotated(x, angle())), angle())),
        phase="decode",
    )

    def half(a: Array) -> Array:
        return a.astype(np.float16).astype(F32)

    for kind, low in (("bf16", narrow), ("fp16", half)):
        if kind == "bf16":  # below 2048 every whole number is one of fp16
            yield fault(f"position in {kind}", angle=angle(low(at)))
        yield fault(f"frequencies in {kind}", angle=angle(at, low(scaled)))
        yield fault(f"angle in {kind}", angle=low(angle()))
        yield fault(f"cosine and sine in {kind}", table=low)
    far = rope_inputs(512, 2047, 2049)
    far_angle = half(np.array([2047, 2049], F32))[:, None, None] * scaled
    yield Fault("k_rope", "position in fp16", far, lambda: store(rotated(f32(far["x"]), far_angle)))
    for head in (32, 128):
        i = np.arange(0, head, 2) / head
        plain = 500000.0**-i
        keep = np.clip((8192 / (2 * np.pi / plain) - 1) / 3, 0, 1)
        own = (1 - keep) * plain / 32 + keep * plain
        yield fault("other head width", f"{head}", head=head, angle=angle(at, own))
    yield fault("other head width", "128, own table", head=128, angle=angle(at, np.tile(scaled, 2)))
    # Pairs, among them what decode really does, and a combination of three.
    plain = _frequencies()["plain frequencies"]
    yield fault(
        "adjacent pairing + plain frequencies", adjacent=True, angle=angle(at, plain), op="q_rope"
    )
    yield fault("adjacent pairing + position +1", adjacent=True, angle=angle(at + 1))
    yield fault(
        "adjacent pairing + plain frequencies + position +1",
        adjacent=True,
        angle=angle(at + 1, plain),
    )
    yield (
        fault("adjacent pairing + truncated store", adjacent=True)
        if False
        else Fault(
            "k_rope",
            "adjacent pairing + truncated store",
            inputs,
            lambda: cut(rotated(x, angle(), adjacent=True)),
        )
    )
    # What no list holds is measured.
    yield fault("measured positions", angle=angle(at + np.array([3, 0, 40, -7], F32)))
    yield fault("measured angles", angle=angle(at, scaled * np.linspace(0.8, 1.3, 32)))


FAULTS = (*_rope_faults(),)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_named(fault: Fault) -> None:
    row = explained(fault)
    assert fault.name in row.found, row.sentences
