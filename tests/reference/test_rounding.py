"""round_to_bf16 against exact rational arithmetic, and over every pair of neighbours."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.rounding import bf16_bits, from_bits, round_to_bf16

# a loaded machine is no failure
thoroughly = settings(max_examples=500, deadline=None)


def one(x: float) -> float:
    return round_to_bf16(torch.tensor([x], dtype=torch.float64)).item()


def oracle(x: float) -> float:
    """The nearest bfloat16 by exact fractions: Python rounds a Fraction to the even integer."""
    if not math.isfinite(x) or x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, -126)
    step = Fraction(2) ** (exponent - 7)
    nearest = round(Fraction(x) / step) * step
    if abs(nearest) >= Fraction(2) ** 128:
        return math.copysign(math.inf, x)
    return math.copysign(float(nearest), x)


def positive_grid() -> torch.Tensor:
    """Every bfloat16 from +0 to the greatest finite, ascending."""
    return from_bits(np.arange(0x7F80, dtype=np.uint16))


@thoroughly
@given(st.floats(allow_nan=False, allow_infinity=True))
def test_any_float64_rounds_as_exact_fractions_do(x: float):
    got = one(x)
    assert got == oracle(x)
    assert math.copysign(1, got) == math.copysign(1, x)


@thoroughly
@given(st.floats(min_value=2.0**-140, max_value=2.0**-120), st.sampled_from([1, -1]))
def test_numbers_about_the_subnormals_round_as_exact_fractions_do(x: float, sign: int):
    assert one(sign * x) == oracle(sign * x)


@thoroughly
@given(
    st.integers(0, 0x7F7E),
    st.integers(-(2**46), 2**46),
    st.sampled_from([1, -1]),
)
def test_numbers_near_a_tie_round_as_exact_fractions_do(bits: int, ulps: int, sign: int):
    low, high = from_bits(np.array([bits, bits + 1], dtype=np.uint16)).tolist()
    middle = (low + high) / 2
    x = sign * (middle + ulps * math.ulp(middle))
    assert one(x) == oracle(x)


@pytest.mark.parametrize("sign", [1, -1])
def test_every_tie_goes_to_the_even_neighbour_and_either_side_to_its_own(sign: int):
    grid = positive_grid()
    low, high = grid[:-1] * sign, grid[1:] * sign
    middle = (low + high) / 2
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    assert torch.equal(round_to_bf16(middle), even)
    assert torch.equal(round_to_bf16(torch.nextafter(middle, low)), low)
    assert torch.equal(round_to_bf16(torch.nextafter(middle, high)), high)


def test_overflow_begins_half_a_step_above_the_greatest_number():
    greatest = 2.0**128 - 2.0**120
    edge = 2.0**128 - 2.0**119
    assert one(greatest) == greatest
    assert one(math.nextafter(edge, 0)) == greatest
    assert one(edge) == math.inf
    assert one(-edge) == -math.inf
    assert one(1.7e308) == math.inf


def test_half_the_least_subnormal_goes_to_a_zero_that_keeps_its_sign():
    for sign in (1.0, -1.0):
        assert one(sign * 2.0**-134) == 0
        assert math.copysign(1, one(sign * 2.0**-134)) == sign
        assert math.copysign(1, one(sign * 0.0)) == sign
        assert one(sign * math.nextafter(2.0**-134, 1)) == sign * 2.0**-133
        assert one(sign * 5e-324) == 0


def test_nan_and_infinity_are_kept():
    assert math.isnan(one(math.nan))
    assert one(math.inf) == math.inf
    assert one(-math.inf) == -math.inf


def test_it_rounds_once_where_torch_rounds_twice():
    x = 1 + 2.0**-8 + 2.0**-40
    assert torch.tensor(x, dtype=torch.float64).to(torch.bfloat16).item() == 1.0
    assert one(x) == 1 + 2.0**-7


def test_every_bit_pattern_survives_the_way_there_and_back():
    bits = np.arange(65536, dtype=np.uint16)
    values = from_bits(bits)
    nan = values.isnan().numpy()
    assert nan.sum() == 2 * 127
    assert torch.equal(round_to_bf16(values)[~nan], values[~nan])
    back = bf16_bits(values)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert (back[nan] == 0x7FFF).all()


def test_from_bits_agrees_with_torch():
    bits = np.arange(65536, dtype=np.uint16)
    other = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(torch.float64)
    assert torch.equal(from_bits(bits).nan_to_num(nan=0.5), other.nan_to_num(nan=0.5))


def test_shape_and_order_hold_for_tensors_that_are_not_contiguous():
    x = torch.linspace(-3, 3, 60, dtype=torch.float64).reshape(3, 4, 5).permute(2, 0, 1)
    got = round_to_bf16(x)
    assert got.shape == x.shape
    assert got.tolist() == [[[oracle(v) for v in row] for row in page] for page in x.tolist()]
    assert bf16_bits(got).shape == (5, 3, 4)


def test_the_argument_is_not_written_to():
    x = torch.tensor([1.001, -2.003], dtype=torch.float64)
    before = x.clone()
    round_to_bf16(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("value", [1 + 2.0**-9, 1 + 2.0**-40, 2.0**-134, 1e300])
def test_bits_of_a_value_off_the_grid_are_refused(value: float):
    with pytest.raises(ValueError, match="must lie on the bfloat16 grid"):
        bf16_bits(torch.tensor([1.0, value], dtype=torch.float64))


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="must be float64"):
        round_to_bf16(torch.ones(2))
    with pytest.raises(TypeError, match="must be uint16"):
        from_bits(np.zeros(2, dtype=np.int16))
