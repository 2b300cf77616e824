"""Llama-3.2-1B made of the ops of ops.py, each rounded once where the engine stores bf16.

Two of them judge: `ideal` rounds at every tap (a perfect bf16 engine), `exact` never rounds. The
walk is layer by layer: all prompts and all teacher-forced decode steps go through one layer before
the next, so that a layer's weights are converted to float64 once.

    ideal, exact = ideal_and_exact(checkpoint)
    hidden = ideal.embed(tokens)
    for layer in range(ideal.config.layers):
        hidden = ideal.prefill_layer(layer, hidden, Cache(), record)
    logits, token = ideal.final(hidden, last_only=True)

`record(op, inputs, real)` is called at every tap in execution order: inputs as the rounding left
them, `real` the op's result before it is rounded. A record may keep the tensors, for none is
written to again; but each `weight` that it keeps is up to 128 MiB of a converted layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference import ops
from reference.checkpoint import Checkpoint
from reference.config import EMBED, FINAL_NORM, Config
from reference.rounding import round_to_bf16

Rounding = Callable[[Tensor], Tensor]
Record = Callable[[str, Mapping[str, Any], Tensor], None]


def identity(x: Tensor) -> Tensor:
    """The rounding of the exact run: none."""
    return x


def ignore(op: str, inputs: Mapping[str, Any], real: Tensor) -> None:
    """The record of a run that nobody watches."""


class Weights:
    """One layer's weights as float64 (0.5 GB) at a time, shared by all that walk through it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._layer = -1
        self._held: dict[str, Tensor] = {}

    def of_layer(self, layer: int, name: str) -> Tensor:
        """Tensor `name` (such as "mlp.up_proj") of a layer, float64; drops the layer before."""
        if layer != self._layer:
            self._held.clear()
            self._layer = layer
        if name not in self._held:
            full = f"model.layers.{layer}.{name}.weight"
            self._held[name] = self.checkpoint.tensor(full).to(torch.float64)
        return self._held[name]


class Cache:
    """Keys and values of one sequence in one layer, as kv_write stored them."""

    def __init__(self, width: int = 512) -> None:
        self.keys = torch.empty(0, width, dtype=torch.float64)  # (len, 512)
        self.values = torch.empty(0, width, dtype=torch.float64)  # (len, 512)

    def __len__(self) -> int:
        return self.keys.shape[0]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add rows k, v (n, 512). Earlier tensors stay as they are, for those who recorded them."""
        self.keys = torch.cat((self.keys, k))
        self.values = torch.cat((self.values, v))


class Llama:
    """The model with one rounding at all taps: round_to_bf16 (ideal) or identity (exact)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rounding: Rounding = round_to_bf16,
        weights: Weights | None = None,
    ) -> None:
        self.config: Config = checkpoint.config
        self.checkpoint = checkpoint
        self.rounding = rounding
        self.weights = weights or Weights(checkpoint)
        self.inv_freq = ops.llama3_inv_freq(
            self.config.head,
            self.config.rope_theta,
            self.config.rope_factor,
            self.config.rope_low_freq_factor,
            self.config.rope_high_freq_factor,
            self.config.rope_original_positions,
        )  # (32,)

    def embed(self, tokens: Sequence[int] | Tensor, record: Record = ignore) -> Tensor:
        """Hidden states (n, 2048) of n tokens.

        The recorded `weight` is not the table but the rows of these tokens, (n, 2048) bfloat16: a
        synthetic checkpoint then need not make the other 128 thousand.
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64)  # (n,)
        rows = self.checkpoint.rows(EMBED, ids)  # (n, 2048)
        real = ops.embed(torch.arange(len(ids)), rows)
        record("embed", {"tokens": ids, "weight": rows}, real)
        return self.rounding(real)

    def prefill_layer(
        self, layer: int, hidden: Tensor, cache: Cache, record: Record = ignore
    ) -> Tensor:
        """One layer over the n tokens of one prompt: (n, 2048) -> (n, 2048); fills `cache`."""
        if len(cache):
            raise ValueError(f"cache must be empty before prefill (got {len(cache)} rows)")
        tap = self._tap(record)
        positions = torch.arange(hidden.shape[0])  # (n,)
        q, k, v = self._project(layer, hidden, positions, tap)  # (n, 2048), (n, 512), (n, 512)
        self._write(k, v, [cache], tap)
        s = tap("scores", ops.scores, q=q, k=k)  # (32, n, n)
        s = tap("mask", ops.mask, scores=s)
        p = tap("softmax", ops.softmax, scores=s)
        x = tap("attn_v", ops.attn_v, probs=p, v=v)  # (n, 2048)
        return self._rest(layer, hidden, x, tap)

    def decode_layer(
        self,
        layer: int,
        hidden: Tensor,
        positions: Sequence[int] | Tensor,
        caches: Sequence[Cache],
        record: Record = ignore,
    ) -> Tensor:
        """One layer over one new token of each of m sequences: (m, 2048) -> (m, 2048).

        Row r is at positions[r], which must be len(caches[r]); its key and value are appended
        before attention reads them.
        """
        where = torch.as_tensor(positions, dtype=torch.int64)  # (m,)
        lengths = [len(cache) for cache in caches]
        if where.tolist() != lengths:
            raise ValueError(
                f"positions must be the caches' lengths {lengths} (got {where.tolist()})"
            )
        tap = self._tap(record)
        q, k, v = self._project(layer, hidden, where, tap)  # (m, 2048), (m, 512), (m, 512)
        self._write(k, v, caches, tap)
        keys, values = [c.keys for c in caches], [c.values for c in caches]  # (len, 512) each
        x = tap("attention", ops.attention, q=q, keys=keys, values=values)  # (m, 2048)
        return self._rest(layer, hidden, x, tap)

    def final(
        self, hidden: Tensor, record: Record = ignore, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logits of all rows (n, 128256), and greedy tokens (n,), or (1,) of the last row only.

        The engine computes all n rows of logits in prefill and reads the last (main.cpp:509-543).
        """
        tap = self._tap(record)
        norm = self.checkpoint.tensor(FINAL_NORM).to(torch.float64)  # (2048,)
        x = tap("final_norm", ops.rms_norm, x=hidden, weight=norm)  # (n, 2048)
        table = self.checkpoint.tensor(EMBED)  # (128256, 2048) bfloat16, tied
        logits = tap("logits", ops.linear, x=x, weight=table)  # (n, 128256)
        rows = logits[-1:] if last_only else logits
        tokens = ops.argmax(rows)
        record("argmax", {"logits": rows}, tokens)
        return logits, tokens

    def prefill(
        self, tokens: Sequence[int] | Tensor, record: Record = ignore
    ) -> tuple[Tensor, list[Cache]]:
        """Walk one prompt alone: its logits (n, 128256), and a cache a layer."""
        hidden = self.embed(tokens, record)
        caches = [Cache(self.config.kv) for _ in range(self.config.layers)]
        for layer, cache in enumerate(caches):
            hidden = self.prefill_layer(layer, hidden, cache, record)
        return self.final(hidden, record, last_only=True)[0], caches

    def decode(self, tokens: Sequence[int], caches: Sequence[Sequence[Cache]]) -> Tensor:
        """Walk one token of each of m sequences, caches[r] being prefill's: logits (m, 128256)."""
        hidden = self.embed(tokens)
        for layer in range(self.config.layers):
            rows = [sequence[layer] for sequence in caches]
            hidden = self.decode_layer(layer, hidden, [len(row) for row in rows], rows)
        return self.final(hidden)[0]

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens after `prompt`, end tokens not heeded."""
        logits, caches = self.prefill(prompt)
        tokens = [int(ops.argmax(logits[-1:]))]
        while len(tokens) < count:
            tokens.append(int(ops.argmax(self.decode(tokens[-1:], [caches]))))
        return tokens

    def _tap(self, record: Record) -> Callable[..., Tensor]:
        """What runs an op: compute the real result, show it, round it."""

        def tap(op: str, function: Callable[..., Tensor], **inputs: Any) -> Tensor:
            real = function(**inputs)
            record(op, inputs, real)
            return self.rounding(real)

        return tap

    def _project(
        self, layer: int, hidden: Tensor, positions: Tensor, tap: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first taps of both phases, up to rotation: q (n, 2048), k and v (n, 512)."""
        of = self.weights.of_layer
        x = tap("attn_norm", ops.rms_norm, x=hidden, weight=of(layer, "input_layernorm"))
        q = tap("q_proj", ops.linear, x=x, weight=of(layer, "self_attn.q_proj"))
        k = tap("k_proj", ops.linear, x=x, weight=of(layer, "self_attn.k_proj"))
        v = tap("v_proj", ops.linear, x=x, weight=of(layer, "self_attn.v_proj"))
        q = tap("q_rope", ops.rope, x=q, positions=positions, inv_freq=self.inv_freq)
        k = tap("k_rope", ops.rope, x=k, positions=positions, inv_freq=self.inv_freq)
        return q, k, v

    @staticmethod
    def _write(k: Tensor, v: Tensor, caches: Sequence[Cache], tap: Callable[..., Tensor]) -> None:
        """Append all rows to the one cache of a prefill, or row r to caches[r] of a decode step."""
        keys, values = tap("kv_write", ops.kv_write, k=k, v=v)  # (n, 512) each
        share = keys.shape[0] // len(caches)
        for cache, own_k, own_v in zip(caches, keys.split(share), values.split(share), strict=True):
            cache.append(own_k, own_v)

    def _rest(self, layer: int, hidden: Tensor, x: Tensor, tap: Callable[..., Tensor]) -> Tensor:
        """The last taps of both phases, from attention's result x to the new hidden state."""
        of = self.weights.of_layer
        x = tap("o_proj", ops.linear, x=x, weight=of(layer, "self_attn.o_proj"))
        hidden = tap("attn_residual", ops.residual, x=hidden, y=x)
        x = tap("mlp_norm", ops.rms_norm, x=hidden, weight=of(layer, "post_attention_layernorm"))
        gate = tap("gate_proj", ops.linear, x=x, weight=of(layer, "mlp.gate_proj"))  # (n, 8192)
        up = tap("up_proj", ops.linear, x=x, weight=of(layer, "mlp.up_proj"))  # (n, 8192)
        x = tap("swiglu", ops.swiglu, gate=gate, up=up)  # (n, 8192)
        x = tap("down_proj", ops.linear, x=x, weight=of(layer, "mlp.down_proj"))  # (n, 2048)
        return tap("mlp_residual", ops.residual, x=hidden, y=x)


def ideal_and_exact(checkpoint: Checkpoint) -> tuple[Llama, Llama]:
    """The two judges over one checkpoint, sharing each layer's converted weights."""
    weights = Weights(checkpoint)
    return Llama(checkpoint, round_to_bf16, weights), Llama(checkpoint, identity, weights)
