"""One measured explanation, and what a stored number says about the real one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fit:
    """says: a noun phrase, as a hypothesis has it. whole: the whole statement instead, if given."""

    name: str
    says: str
    whole: str | None = None


def rounded_from(value: Tensor) -> tuple[Tensor, Tensor]:
    """The least and greatest real numbers that round to bf16 values (finite float64)."""
    bits = value.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    order = torch.where(bits < 0, -(bits & 0x7FFF), bits)

    def neighbour(step: int) -> Tensor:
        moved_ = (order + step).clamp(-0x7F7F, 0x7F7F)
        back = torch.where(moved_ < 0, (-moved_) | 0x8000, moved_) << 16
        return back.view(torch.float32).to(torch.float64)

    return (value + neighbour(-1)) / 2, (value + neighbour(1)) / 2
