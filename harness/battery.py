"""The stress battery: fixed inputs that show faults on which ordinary activations are silent.

An eps of 1e-6 shows only in rows of rms 1e-3, a softmax that subtracts no maximum only above 88, a
rounded position only from 257 on, an argmax that starts at 0.0 only where all logits are negative.
Inputs are a pure function of (pass, op, input name): the same for a clean engine and a faulty one,
and on every machine. All values lie on the bf16 grid, and correct float32 arithmetic passes on all
of them.

Use: run the control flow of each `Pass` on a dummy prompt (prefill) or at its positions (decode),
and before each op of `pass.ops` overwrite the op's inputs with `battery_inputs(pass, op, weights)`.

To add a kind of row: a function in `ROWS`. To add a length or position: a `Pass` in `PASSES`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from reference.config import Config
from reference.rounding import round_to_bf16

_MODEL: Final = Config()
_GROUP: Final = _MODEL.query_heads // _MODEL.kv_heads

_WIDTHS: Final = {
    "attn_norm": _MODEL.hidden,
    "q_proj": _MODEL.hidden,
    "k_proj": _MODEL.hidden,
    "v_proj": _MODEL.hidden,
    "q_rope": _MODEL.hidden,
    "k_rope": _MODEL.kv,
    "o_proj": _MODEL.hidden,
    "mlp_norm": _MODEL.hidden,
    "gate_proj": _MODEL.hidden,
    "up_proj": _MODEL.hidden,
    "down_proj": _MODEL.intermediate,
    "final_norm": _MODEL.hidden,
    "logits": _MODEL.hidden,
}

_SHARED: Final = (
    *("embed", "attn_norm", "q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "kv_write"),
    *("o_proj", "attn_residual", "mlp_norm", "gate_proj", "up_proj", "swiglu", "down_proj"),
    *("mlp_residual", "final_norm", "logits", "argmax"),
)
_PREFILL: Final = (*_SHARED, "scores", "mask", "softmax", "attn_v")
_LENGTHS: Final = (
    *("embed", "attn_norm", "q_rope", "k_rope", "kv_write", "scores", "mask", "softmax", "attn_v"),
    *("attn_residual", "argmax"),
)
_DECODE: Final = (*_SHARED, "attention")
_POSITIONS: Final = (
    *("embed", "attn_norm", "q_rope", "k_rope", "kv_write", "attention", "attn_residual"),
    *("mlp_norm", "swiglu", "mlp_residual", "final_norm", "argmax"),
)


@dataclass(frozen=True)
class Pass:
    """One walk of the control flow, and the ops that are judged on the way.

    Prefill: `tokens` of the prompt. Decode: the position of each slot, None where the slot has
    ended; the rows of its inputs are the active slots in order, each sees position + 1 keys.
    """

    name: str
    phase: str
    ops: tuple[str, ...]
    tokens: int | None = None
    positions: tuple[int | None, ...] = field(default=())

    def __post_init__(self) -> None:
        if (self.phase == "prefill") != (self.tokens is not None) or self.tokens == 0:
            raise ValueError(f"a prefill pass needs tokens, a decode pass positions (got {self})")
        if self.phase == "decode" and not self.active:
            raise ValueError(f"a decode pass needs an active slot (got {self})")

    @property
    def active(self) -> tuple[int, ...]:
        """The slots that run, in order."""
        return tuple(slot for slot, p in enumerate(self.positions) if p is not None)

    @property
    def row_positions(self) -> tuple[int, ...]:
        """The position of each row of the inputs."""
        if self.tokens is not None:
            return tuple(range(self.tokens))
        return tuple(p for p in self.positions if p is not None)


PASSES: Final = (
    Pass("battery-prefill-33", "prefill", _PREFILL, tokens=33),
    Pass("battery-prefill-1", "prefill", _LENGTHS, tokens=1),
    Pass("battery-prefill-15", "prefill", _LENGTHS, tokens=15),
    Pass("battery-prefill-16", "prefill", _LENGTHS, tokens=16),
    Pass("battery-prefill-17", "prefill", _LENGTHS, tokens=17),
    Pass("battery-prefill-258", "prefill", ("q_rope", "k_rope"), tokens=258),
    Pass("battery-decode-0-257", "decode", _DECODE, positions=(0, 257)),
    Pass("battery-decode-2047-32", "decode", _POSITIONS, positions=(2047, 32)),
    Pass("battery-decode-14-15", "decode", _POSITIONS, positions=(14, 15)),
    Pass("battery-decode-ended-16", "decode", _POSITIONS, positions=(None, 16)),
)


_NAMES: Final = tuple(each.name for each in PASSES)
_FIRST_DECODE: Final = [each.phase for each in PASSES].index("decode")


def battery(phase: str, ops: set[str] | None = None) -> list[Pass]:
    """The passes of "prefill" or "decode", in order, cut down to `ops` if given."""
    cut = []
    for each in PASSES:
        kept = tuple(op for op in each.ops if ops is None or op in ops)
        if each.phase == phase and kept:
            cut.append(Pass(each.name, phase, kept, each.tokens, each.positions))
    return cut


def battery_inputs(each: Pass, op: str, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inputs of `op` in a pass, by the recorder's names: float64 on the bf16 grid, ids int64.

    weights: what the model supplies to this op, passed through: "weight" of norms, GEMMs and embed,
    "inv_freq" of the ropes. Raises ValueError if the pass does not have the op.
    """
    if op not in each.ops:
        raise ValueError(f"op must be one of {', '.join(each.ops)} in {each.name} (got {op!r})")
    rows = len(each.row_positions)
    stream = _Stream(f"{each.name}/{op}")
    # Decode has two rows: each pass goes on where the one before ended, so together they have most.
    first = 2 * (_NAMES.index(each.name) - _FIRST_DECODE) if each.phase == "decode" else 0
    if op == "embed":
        ids = [0, _MODEL.vocab - 1, 128000, 1, 65535, 65536, 128000, 0x7FFF]
        return {"tokens": torch.tensor([ids[(first + i) % 8] for i in range(rows)]), **weights}
    if op in _WIDTHS:
        inputs: dict[str, Any] = {"x": _mixed(stream, "x", rows, _WIDTHS[op], first)}
        if op.endswith("rope"):
            inputs["positions"] = torch.tensor(each.row_positions)
        return {**inputs, **weights}
    if op == "argmax":
        count = 1 if each.phase == "prefill" else rows  # prefill looks at its last row only
        return {"logits": torch.stack([_logits(stream, i, each) for i in range(count)])}
    if op == "kv_write":
        return {name: _mixed(stream, name, rows, _MODEL.kv, first) for name in ("k", "v")}
    if op == "attention":
        return _attention(stream, each)
    return _OTHERS[op](stream, rows, first)


# --- random numbers


@dataclass(frozen=True)
class _Stream:
    """Random numbers that depend on a name only: NumPy's Philox, whose raw words never change."""

    name: str

    def uniform(self, what: str, *shape: int) -> np.ndarray:
        """Uniform in (0, 1), float64."""
        words = np.random.Philox(key=[zlib.crc32(what.encode()), zlib.crc32(self.name.encode())])
        raw = words.random_raw(int(np.prod(shape))).reshape(shape)
        return ((raw >> 12).astype(np.float64) + 0.5) * 2.0**-52

    def normal(self, what: str, *shape: int) -> np.ndarray:
        """Standard normal, float64 (Box and Muller 1958)."""
        radius = np.sqrt(-2 * np.log(self.uniform(what + "/radius", *shape)))
        return radius * np.cos(2 * np.pi * self.uniform(what + "/angle", *shape))


def _grid(x: np.ndarray) -> Tensor:
    return round_to_bf16(torch.from_numpy(np.ascontiguousarray(x)))


# --- rows of activations


def _small(z: np.ndarray, _: np.ndarray) -> np.ndarray:
    return z * 1e-3


def _large(z: np.ndarray, _: np.ndarray) -> np.ndarray:
    return z * 300


def _ordinary(z: np.ndarray, _: np.ndarray) -> np.ndarray:
    return z


def _massive(z: np.ndarray, _: np.ndarray) -> np.ndarray:
    """One channel 100 times the rest, as real hidden states have."""
    z = z.copy()
    z[z.size // 3] = 100
    return z


def _heavy(z: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Heavy tails: a normal over the square root of a uniform has infinite variance."""
    return z / np.sqrt(u)


def _shifted(z: np.ndarray, _: np.ndarray) -> np.ndarray:
    return z + 1.5


def _level(z: np.ndarray, _: np.ndarray) -> np.ndarray:
    """All elements equal: no summation order makes a difference."""
    return np.full_like(z, -0.75)


def _cancelling(z: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Each element's negative follows it, -0 among them: sums of pairs vanish."""
    pairs = np.repeat(z[: z.size // 2], 2)
    pairs[1::2] *= -1
    pairs[:2] = 0.0, -0.0
    return pairs


Row = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # (normals, uniforms), both (width,) -> (width,)
ROWS: Final[tuple[Row, ...]] = (
    *(_small, _large, _massive, _heavy, _shifted, _ordinary, _level, _cancelling),
)


def _mixed(stream: _Stream, what: str, rows: int, width: int, first: int) -> Tensor:
    """Rows of all kinds in turn, beginning with kind `first`: (rows, width)."""
    z = stream.normal(what, rows, width)
    u = stream.uniform(what + "/tails", rows, width)
    kinds = (ROWS[(first + i) % len(ROWS)] for i in range(rows))
    return _grid(np.stack([kind(z[i], u[i]) for i, kind in enumerate(kinds)]))


# --- inputs that are not just rows


def _residual(stream: _Stream, rows: int, first: int) -> dict[str, Any]:
    """Rows of all kinds plus an ordinary row; in the first columns exact ties, up and down."""
    x = _mixed(stream, "x", rows, _MODEL.hidden, first)
    y = _mixed(stream, "y", rows, _MODEL.hidden, first + 5)
    odd = torch.arange(128, dtype=torch.float64) / 128 + 1  # bf16 in [1, 2), even and odd last bits
    for start, half in ((0, 2.0**-8), (128, -(2.0**-8)), (256, 3 * 2.0**-8)):
        x[:, start : start + 128] = odd
        y[:, start : start + 128] = half  # half a step: x + y lies between two neighbours
    x[:, 384:512] = y[:, 384:512].neg()  # cancels to zero
    return {"x": x, "y": y}


def _swiglu(stream: _Stream, rows: int, first: int) -> dict[str, Any]:
    """Gates of all kinds, and in the first columns a ramp -128..127, over exp's range both ways."""
    gate = _mixed(stream, "gate", rows, _MODEL.intermediate, first)
    gate[:, :256] = torch.arange(-128.0, 128.0, dtype=torch.float64)
    return {"gate": gate, "up": _mixed(stream, "up", rows, _MODEL.intermediate, first + 3)}


def _scores(stream: _Stream, rows: int, _: int) -> dict[str, Any]:
    """Queries of which some give scores of +100 or -100, some equal scores, some tiny ones."""
    k = _grid(stream.normal("k", rows, _MODEL.kv))
    return {"q": _queries(stream, k, rows), "k": k}


def _queries(stream: _Stream, k: Tensor, rows: int) -> Tensor:
    """Queries (rows, 2048) for keys k (len, 512): a head's kind moves on with its row."""
    heads, head = _MODEL.query_heads, _MODEL.head
    q = torch.from_numpy(stream.normal("q", rows, heads, head))  # ordinary scores: about +-1
    for i in range(rows):
        for h in range(heads):
            kind = (i + h) % 6
            key = k[min(i, len(k) - 1)].reshape(-1, head)[h // _GROUP]  # its own key
            if kind in (0, 1):
                sign = 1 if kind == 0 else -1
                q[i, h] = sign * 800 * key / key.square().sum()  # this score is +-100
            elif kind == 2:
                q[i, h] = 0.0
            elif kind == 3:
                q[i, h] *= 1e-3
            elif kind == 4:
                q[i, h, 5] = 30.0  # one channel decides
    return round_to_bf16(q.flatten(1))


def _raw_scores(stream: _Stream, rows: int) -> Tensor:
    """(32, rows, rows): a row's kind moves on with its head, so that every length has all kinds."""
    n, heads = rows, _MODEL.query_heads
    z, u = stream.normal("scores", heads, n, n), stream.uniform("scores/sign", heads, n, n)
    kinds = (
        z,  # ordinary
        np.full_like(z, -2.5),  # equal
        np.where(u < 0.5, 100.0, -100.0),  # the extremes; exp(-200) is 0
        z * 30 - 60,  # exp of some underflows, some to a subnormal
        np.broadcast_to(-3.0 * np.arange(n), z.shape),  # falls past exp's underflow, at -104
        np.broadcast_to(
            -100.0 + 0.5 * np.arange(n), z.shape
        ),  # all below -80, the last the greatest
        z * 1e-3,
        np.where(u < 0.1, 100.0, z),  # few keys decide
    )
    turn = (np.arange(heads)[:, None] + np.arange(n)) % len(kinds)  # (32, n)
    return _grid(np.choose(turn[:, :, None], kinds))


def _later(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


def _mask(stream: _Stream, rows: int, _: int) -> dict[str, Any]:
    return {"scores": _raw_scores(stream, rows)}


def _softmax(stream: _Stream, rows: int, _: int) -> dict[str, Any]:
    return {"scores": _raw_scores(stream, rows).masked_fill(_later(rows), -torch.inf)}


def _attn_v(stream: _Stream, rows: int, _: int) -> dict[str, Any]:
    """Probabilities of every kind of score, and values of every kind of row."""
    masked = _raw_scores(stream, rows).masked_fill(_later(rows), -torch.inf)
    probs = round_to_bf16(masked.softmax(dim=-1))
    return {"probs": probs, "v": _mixed(stream, "v", rows, _MODEL.kv, 0)}


def _attention(stream: _Stream, each: Pass) -> dict[str, Any]:
    """One row of queries a slot, of every kind of head; values of every kind of row."""
    keys, values, queries = [], [], []
    for row, position in enumerate(each.row_positions):
        one = _Stream(f"{stream.name}/{row}")
        k = _grid(one.normal("k", position + 1, _MODEL.kv))
        keys.append(k)
        values.append(_mixed(one, "v", position + 1, _MODEL.kv, row))
        queries.append(_queries(one, k[-1:], 1))
    return {"q": torch.cat(queries), "keys": keys, "values": values}


def _logits(stream: _Stream, row: int, each: Pass) -> Tensor:
    """One row of logits (128256,): all negative, or the greatest one tied, or first, or last."""
    z = np.abs(stream.normal(f"logits/{row}", _MODEL.vocab)) * 3
    kind = (_NAMES.index(each.name) + row) % 4
    if kind == 0:
        z = -1.0 - z  # all negative
    elif kind == 1:
        z[[777, 4242, 128255]] = 50.0  # an exact tie: the first one counts
    elif kind == 2:
        z[0] = z[1] = 50.0  # index 0, tied with the next
    else:
        z = -np.abs(z)
        z[-1] = 50.0
    return _grid(z)


_OTHERS: Final[dict[str, Callable[[_Stream, int, int], dict[str, Any]]]] = {
    "attn_residual": _residual,
    "mlp_residual": _residual,
    "swiglu": _swiglu,
    "scores": _scores,
    "mask": _mask,
    "softmax": _softmax,
    "attn_v": _attn_v,
}
