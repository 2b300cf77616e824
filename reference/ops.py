"""The ops of Llama 3, one pure function a tap: float64 in, the real (unrounded) float64 result out.

Shapes: n rows (tokens of a prompt, or active slots of a decode step); 2048 = 32 query heads x 64;
512 = 8 key/value heads x 64; query head h reads key/value head h // 4. Formulas: "The Llama 3 Herd
of Models" (arXiv 2407.21783) as Hugging Face's modeling_llama.py has them, whose names are given.
Parameters are named as in the record of model.py, so that `op(**inputs)` computes a tap again.
To add an op: a function here, a tap in model.py, a bound in harness/bounds.py.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HEAD = 64
GROUP = 4  # query heads that share one key/value head
CHUNK = (
    1024  # output rows of a bfloat16 weight converted to float64 at once: 16 MiB at 2048 columns
)


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of the embedding table (`embed_tokens`). tokens int64 (n,), table (rows, 2048)."""
    return table[tokens].to(torch.float64)  # (n, 2048)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467; LlamaRMSNorm). x (n, d), weight (d,).

    Nothing is rounded before the weight: Hugging Face rounds there in bf16, the engine does not.
    """
    root = torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)  # (n, 1)
    return x / root * weight.to(torch.float64)  # (n, d)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T. x (n, in), weight (out, in) float64 or bfloat16 -> (n, out).

    A bfloat16 weight is converted (exactly) in chunks of output rows: the 128256 rows of the output
    head would take 2 GiB as float64.
    """
    if weight.dtype == torch.float64:
        return x @ weight.T
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float64)
    for start in range(0, weight.shape[0], CHUNK):
        rows = weight[start : start + CHUNK].to(torch.float64)  # (<= CHUNK, in)
        out[:, start : start + CHUNK] = x @ rows.T
    return out


def llama3_inv_freq(
    head: int = HEAD,
    theta: float = 500000.0,
    factor: float = 32.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_positions: int = 8192,
) -> Tensor:
    """Angle per position of each pair of a head, float64 (head / 2,), all computed in float64.

    theta^(-2i/head) (RoPE, arXiv 2104.09864), then Llama 3's stretching of long wavelengths
    (`_compute_llama3_parameters` of Hugging Face's modeling_rope_utils.py): wavelengths over
    original/low are divided by factor, those under original/high kept, those between blended.
    """
    frequency = theta ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)  # (head / 2,)
    wavelength = 2 * math.pi / frequency
    keep = (original_positions / wavelength - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    keep = keep.clamp(0, 1)  # 0: long wave, divided by factor; 1: short wave, kept
    return (1 - keep) * frequency / factor + keep * frequency


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate pairs (i, i + 32) of each head by positions * inv_freq[i] (`apply_rotary_pos_emb`).

    x (n, heads * 64), positions int64 (n,), inv_freq float64 (32,) -> (n, heads * 64).
    """
    angle = positions.to(torch.float64)[:, None, None] * inv_freq  # (n, 1, 32)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.unflatten(1, (-1, 2, HEAD // 2)).unbind(2)  # (n, heads, 32) each
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=2)
    return turned.flatten(1)  # (n, heads * 64)


def kv_write(k: Tensor, v: Tensor) -> Tensor:
    """What the cache must hold: the rows themselves. k, v (n, 512) -> (2, n, 512)."""
    return torch.stack((k, v))


def _heads(x: Tensor) -> Tensor:
    """(n, heads * 64) -> (heads, n, 64)."""
    return x.unflatten(1, (-1, HEAD)).transpose(0, 1)


def _grouped(x: Tensor) -> Tensor:
    """Keys or values (n, 512) -> (32, n, 64), each head four times in a row (`repeat_kv`)."""
    return _heads(x).repeat_interleave(GROUP, dim=0)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q . k / sqrt(64) of every query with every key. q (m, 2048), k (n, 512) -> (32, m, n)."""
    return _heads(q) @ _grouped(k).transpose(1, 2) / math.sqrt(HEAD)


def mask(scores: Tensor) -> Tensor:
    """-infinity where the key is later than the query. (32, n, n) -> (32, n, n)."""
    n = scores.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool).triu(1)  # (n, n)
    return scores.masked_fill(later, -torch.inf)


def softmax(scores: Tensor) -> Tensor:
    """exp(x - max) / sum over the last dimension; where masked (-infinity) exactly 0. Any shape."""
    e = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return e / e.sum(dim=-1, keepdim=True)


def attn_v(probs: Tensor, v: Tensor) -> Tensor:
    """Values weighted by probabilities. probs (32, m, n), v (n, 512) -> (m, 2048)."""
    return (probs @ _grouped(v)).transpose(0, 1).flatten(1)


def attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Decode attention, nothing rounded inside: a row of q sees its own sequence's cached rows.

    q (m, 2048); keys, values: m tensors (len, 512), len of each row's own -> (m, 2048).
    """
    rows = [
        attn_v(softmax(scores(q[r : r + 1], k)), v)  # (1, 2048)
        for r, (k, v) in enumerate(zip(keys, values, strict=True))
    ]
    return torch.cat(rows)


def residual(x: Tensor, y: Tensor) -> Tensor:
    """x + y, both (n, 2048)."""
    return x + y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202; LlamaMLP). Both (n, 8192)."""
    return gate / (1 + torch.exp(-gate)) * up


def argmax(logits: Tensor) -> Tensor:
    """First index of the greatest logit of each row, int64. logits (rows, vocab) -> (rows,).

    As the engine's loop does (main.cpp:533-543): start at index 0, move on strictly greater only.
    So a NaN is never chosen, except at index 0, where nothing compares greater than it.
    """
    from_second = np.where(np.isnan(logits.numpy()), -np.inf, logits.numpy())
    index = from_second.argmax(axis=1)  # NumPy promises the first of equals
    index[np.isnan(logits[:, 0].numpy())] = 0
    return torch.from_numpy(index)  # (rows,)
