"""Weights that an op may have read in place of its own: other tensors, other types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from harness.hypotheses.evidence import Evidence

Take = Callable[..., Tensor]  # all rows of a tensor, or those of given numbers (int64)

_LAYERS: Final = 64  # more than any model here has
_INPUT, _POST, _FINAL = "input_layernorm", "post_attention_layernorm", "model.norm.weight"

# An op's own weight within its layer, and those of the same shape.
_OWN: Final[dict[str, tuple[str, ...]]] = {
    "attn_norm": (_INPUT, _POST),
    "mlp_norm": (_POST, _INPUT),
    "final_norm": (_INPUT, _POST),
    "q_proj": ("self_attn.q_proj", "self_attn.o_proj"),
    "o_proj": ("self_attn.o_proj", "self_attn.q_proj"),
    "k_proj": ("self_attn.k_proj", "self_attn.v_proj"),
    "v_proj": ("self_attn.v_proj", "self_attn.k_proj"),
    "gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "up_proj": ("mlp.up_proj", "mlp.gate_proj"),
    "down_proj": ("mlp.down_proj",),
}


def same_shape(evidence: Evidence) -> Iterator[tuple[str, Take]]:
    """(name, how to get it) of the checkpoint's other tensors of the op's weight's shape.

    The op's own layer first, then the layers after it and before it.
    """
    context, own = evidence.context, _OWN.get(evidence.op)
    if own is None:
        return
    layer = evidence.layer if evidence.layer is not None else 0
    is_final = evidence.op == "final_norm"
    probe = torch.zeros(1, dtype=torch.int64)
    for distance in range(_LAYERS):
        present = False
        for other in dict.fromkeys((layer + distance, layer - distance)):
            if other < 0:
                continue
            for kind in own:
                if other == layer and kind == own[0] and not is_final:
                    present = True
                    continue
                name = f"model.layers.{other}.{kind}.weight"
                if context.weight_rows(name, probe) is not None:
                    present = True
                    yield name, _taker(evidence, name)
        if not present:
            break
    if not is_final and evidence.op.endswith("norm"):
        last = context.weight(_FINAL)
        if last is not None:
            yield _FINAL, _taker(evidence, _FINAL)


def _taker(evidence: Evidence, name: str) -> Take:
    def take(ids: Tensor | None = None) -> Tensor:
        made = evidence.context.weight_rows(name, ids)
        assert made is not None
        return made

    return take


def read_as_bf16(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(type, tensor) of a bfloat16 tensor, had the file held the type and the loader not looked.

    fp16: the same places, other bits. fp32: each number takes two places, low half first.
    """
    half = weight.to(torch.float32).to(torch.float16)
    yield "fp16", half.view(torch.bfloat16)
    wide = weight.reshape(-1)[: (weight.numel() + 1) // 2].to(torch.float32)
    yield "fp32", wide.view(torch.bfloat16)[: weight.numel()].reshape(weight.shape)
