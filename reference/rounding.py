"""Rounding from float64 straight to bfloat16, the one rounding of a perfect bf16 engine at a tap.

torch's own `.to(torch.bfloat16)` goes through float32 and so rounds twice: 1 + 2^-8 + 2^-40 becomes
1.0, where the nearest bfloat16 is 1 + 2^-7. Activations here stay float64 tensors whose values lie
on the bfloat16 grid, so an op can go on in float64 without a conversion.
"""

import numpy as np
import torch
from torch import Tensor

_EXPONENT = 0x7FF0_0000_0000_0000  # the exponent field of a float64
_LEAST = (1023 - 126) << 52  # 2^-126, bfloat16's least normal number: below it the grid is even
_GREATEST = (1023 + 127) << 52  # 2^127, the power of its greatest numbers
_MAGIC = 1.5 * 2.0**45  # 2^e * magic has a float64 step of 2^(e-7), bfloat16's step at 2^e
_OVERFLOW = 2.0**128


def round_to_bf16(x: Tensor) -> Tensor:
    """Round float64 to the nearest bfloat16, ties to even: float64 of the same shape.

    Values of 2^128 - 2^119 and more become infinity, subnormals (down to 2^-133) are rounded to
    their own coarser grid, NaN and the sign of zero are kept.

    Method: adding 1.5 * 2^(e+45) to a number of exponent e pushes all but its 8 leading bits out of
    the 53 of a float64; the processor rounds what falls off to nearest even; subtracting is exact.
    """
    if x.dtype != torch.float64:
        raise TypeError(f"x must be float64 (got {x.dtype}); convert it first, which is exact")
    x = x.contiguous()
    power = (x.view(torch.int64) & _EXPONENT).clamp_(_LEAST, _GREATEST)
    magic = power.view(torch.float64).mul_(_MAGIC)
    rounded = (x + magic).sub_(magic)
    rounded.masked_fill_(rounded.abs() >= _OVERFLOW, torch.inf)
    return rounded.copysign_(x)


def bf16_bits(x: Tensor) -> np.ndarray:
    """Bit patterns (uint16, same shape) of float64 values that lie on the bfloat16 grid.

    Every NaN becomes 0x7FFF, as a CUDA store writes it. Raises ValueError off the grid.
    """
    narrow = x.to(torch.bfloat16)
    nan = x.isnan()
    off = (narrow.to(torch.float64) != x) & ~nan
    if off.any():
        first = x[off][0].item()
        raise ValueError(f"x must lie on the bfloat16 grid (got {first!r}); round_to_bf16 it first")
    bits = narrow.contiguous().view(torch.int16).numpy().view(np.uint16).copy()
    bits[nan.numpy()] = 0x7FFF
    return bits


def from_bits(bits: np.ndarray) -> Tensor:
    """The float64 values (same shape) of bfloat16 bit patterns given as uint16."""
    if bits.dtype != np.uint16:
        raise TypeError(
            f"bits must be uint16 (got {bits.dtype}); view the bfloat16 array as uint16"
        )
    wide = np.left_shift(bits, 16, dtype=np.uint32)
    return torch.from_numpy(wide.view(np.float32)).to(torch.float64)
