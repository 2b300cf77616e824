"""The rounding bound of each op: how far float32 may end from the real result, in any order.

Two allowances an element, in the unit of the result and before the one rounding to bf16: `b`
(strict), the worst case over every summation order, and `d` (statistical), what rounding errors
that do not conspire reach. `verdict` compares with [RNE(r - b), RNE(r + b)] and with the same of d.
Nothing here is tuned: each figure follows from u = 2^-24, the number of terms and the inputs; the
docstrings derive it. gamma_k = k u / (1 - k u) bounds k successive roundings, and a sum of k terms
in any order (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 3.1 and 4.2).

float32 has bf16's exponent range, so a product below 2^-126 loses up to 2^-150 that no relative
figure covers. Each op with products allows that too (`TINY`); it is visible only in subnormal
results.

Allowances are computed on demand for the elements asked for: a clean GEMM asks for the few that are
not correctly rounded, and reads a few weight rows instead of all of them.

To add an op: a function (inputs, real) -> Bound and its line in `_BOUNDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

U: Final = 2.0**-24  # unit roundoff of float32
TINY: Final = 2.0**-149  # float32's least subnormal: twice the error of a product that underflows
HEAD: Final = 64  # elements of a head
SCALE: Final = 0.125  # of attention scores, 1 / sqrt(HEAD)

_ROWS: Final = 1024  # weight rows converted at once: 8 MiB of float32 at 2048 columns
_GATHERED: Final = 2**21  # factors gathered at once: 16 MiB of float64 an operand
_DEAREST: Final = 3  # gathering a weight row costs as much as converting three in a matmul

Inputs = Mapping[str, Any]  # as the recorder gives them: Tensors, or lists of Tensors
Allowance = tuple[Tensor, Tensor]  # b and d of some elements, float64


@dataclass(frozen=True)
class Group:
    """A way to cut a result into parts that may fail as a whole."""

    name: str  # "row", "column" or "head"
    view: tuple[int, ...]  # the shape to see the result in
    over: tuple[int, ...]  # the axes of it that one part takes up


@dataclass(frozen=True)
class Bound:
    """The allowances of one result. `strict` and `statistical` are the whole tensors, float64.

    `at` gives (b, d) of the elements with the given flat indices (int64, any number), and is what
    to call for a few. `recheck` gives a finer, dearer allowance than d for some elements, or is
    None where d is b. `groups` are the rows, columns and heads that the systematic rule looks at.
    """

    shape: tuple[int, ...]
    at: Callable[[Tensor], Allowance]
    groups: tuple[Group, ...] = ()
    recheck: Callable[[Tensor], Tensor] | None = None

    @cached_property
    def _everywhere(self) -> Allowance:
        b, d = self.at(torch.arange(math.prod(self.shape)))
        return b.reshape(self.shape), d.reshape(self.shape)

    @property
    def strict(self) -> Tensor:
        """b of every element, of the result's shape."""
        return self._everywhere[0]

    @property
    def statistical(self) -> Tensor:
        """d of every element, of the result's shape."""
        return self._everywhere[1]


def bound_of(op: str, inputs: Inputs, real: Tensor) -> Bound:
    """The bound of `op` for its recorded inputs and its real (float64, unrounded) result.

    Raises ValueError for an op without a bound.
    """
    if op not in _BOUNDS:
        raise ValueError(f"op must be one of {', '.join(_BOUNDS)} (got {op!r})")
    return _BOUNDS[op](inputs, real)


def ops() -> tuple[str, ...]:
    """The names of the ops that have a bound."""
    return tuple(_BOUNDS)


# --- ops without arithmetic, or whose float32 result is exact -------------------------------------


def _exact(inputs: Inputs, real: Tensor) -> Bound:
    """b = 0: embed, kv_write, mask and argmax copy or compare; a residual add rounds only once.

    The float32 sum of two bf16 numbers may be inexact, but never changes what bf16 gets: it is
    inexact only where the exponents differ by more than 16, and there the sum is nowhere near a
    bf16 tie.
    """
    shape = tuple(real.shape)

    def at(flat: Tensor) -> Allowance:
        zero = torch.zeros(flat.numel(), dtype=torch.float64)
        return zero, zero

    return Bound(shape, at, _groups(shape))


# --- GEMMs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gemm:
    """The sums of one GEMM, C[..] = alpha * sum over K of a * w, seen element by element or whole.

    gather(flat): both factors of each asked element, float64 (m, K).
    whole(): sum|a||w| and ||a o w||_2 of every element, float64 (elements,), without alpha.
    dear: beyond how many elements whole() is the cheaper one.
    """

    terms: int
    alpha: float
    gather: Callable[[Tensor], tuple[Tensor, Tensor]]
    whole: Callable[[], Allowance]
    dear: int

    def sums(self, flat: Tensor) -> Allowance:
        """sum |a||w| and ||a o w||_2 of the elements `flat`."""
        if flat.numel() > self.dear:
            absolute, norm = self.whole()
            return absolute[flat], norm[flat]
        parts = []
        for part in self.portions(flat):
            a, w = self.gather(part)
            a.mul_(w).abs_()  # (m, K), products of bf16: exact
            parts.append((a.sum(1), torch.linalg.vector_norm(a, dim=1)))
        return torch.cat([s for s, _ in parts]), torch.cat([n for _, n in parts])

    def portions(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split(max(1, _GATHERED // self.terms))

    def bound(self, real: Tensor, groups: tuple[Group, ...]) -> Bound:
        """The bound of a GEMM.

        Products of bf16 are exact in float32 (8 + 8 bits), so only the K - 1 sums round, each by u
        of its partial sum at most: K u sum|a||w| in any order. Tensor cores may truncate instead,
        2u a sum, so b = g(K) sum|a||w| |alpha| with g(K) = 2uK / (1 - 2uK).

        d: roundings that do not conspire add up like a random walk. Partial sums run from 0 to r
        with a spread of ||a o w||_2, so on average they are half of |r| + ||a o w||_2 or less; K of
        them, each wrong by u at most, give d = u K/2 (|r| + ||a o w||_2 |alpha|), r with its alpha.

        recheck: 2u times the sum of the absolute partial sums (k = 0..K-1, float64), the worst that
        truncation in that order can do. It exceeds d where partial sums swell and then cancel.
        """
        k, alpha = self.terms, self.alpha
        worst = 2 * U * k / (1 - 2 * U * k)
        flat_real = real.reshape(-1)

        def at(flat: Tensor) -> Allowance:
            if not flat.numel():
                none = torch.zeros(0, dtype=torch.float64)
                return none, none
            absolute, norm = self.sums(flat)
            r = flat_real[flat].abs()
            b = worst * absolute * alpha + k * TINY
            d = U * k / 2 * (r + norm * alpha) + k * TINY
            return b, d

        def recheck(flat: Tensor) -> Tensor:
            parts = [torch.zeros(0, dtype=torch.float64)]
            for part in self.portions(flat):
                a, w = self.gather(part)
                partial = a.mul_(w).cumsum(1).abs_()  # (m, K)
                parts.append(2 * U * alpha * partial.sum(1) + k * TINY)
            return torch.cat(parts)

        return Bound(tuple(real.shape), at, groups, recheck)


def _linear(inputs: Inputs, real: Tensor) -> Bound:
    """q_proj ... down_proj and logits: x (n, K) against weight (out, K), alpha 1."""
    x, weight = inputs["x"], inputs["weight"]  # (n, K), (out, K)
    out, terms = weight.shape

    def gather(flat: Tensor) -> tuple[Tensor, Tensor]:
        return x[flat // out], weight[flat % out].to(torch.float64)  # (m, K) each

    def whole() -> Allowance:
        # In float32, half the price of float64: a sum of terms of one sign is off by gamma of its
        # roundings (K sums, 2 in a square's product and root) at most, so it is raised by that.
        # Rows are brought to a maximum near 1 first, so that no square overflows or matters and
        # vanishes.
        top = x.abs().amax(dim=1, keepdim=True)  # (n, 1)
        scale = torch.ldexp(torch.ones_like(top), torch.frexp(top)[1])
        small = (x.abs() / scale).to(torch.float32)  # (n, K)
        square = small * small
        absolute = torch.empty(x.shape[0], out)
        squares = torch.empty(x.shape[0], out)
        for start in range(0, out, _ROWS):
            rows = weight[start : start + _ROWS].abs().to(torch.float32)  # (<= _ROWS, K)
            absolute[:, start : start + _ROWS] = small @ rows.T
            squares[:, start : start + _ROWS] = square @ rows.mul_(rows).T
        raised = scale * (1 + 2 * (terms + 2) * U)
        total = absolute.to(torch.float64).mul_(raised)  # (n, out)
        norm = squares.to(torch.float64).sqrt_().mul_(raised)  # (n, out)
        return total.reshape(-1), norm.reshape(-1)

    gemm = _Gemm(terms, 1.0, gather, whole, out // _DEAREST)
    return gemm.bound(real, _groups(tuple(real.shape)))


def _headed(inputs: Inputs, real: Tensor) -> Bound:
    """q_proj, k_proj, v_proj: as every linear, and their columns belong to heads."""
    bound = _linear(inputs, real)
    return Bound(bound.shape, bound.at, _groups(bound.shape, heads=True), bound.recheck)


def _scores(inputs: Inputs, real: Tensor) -> Bound:
    """q (m, 2048) against k (n, 512), a head at a time: K = 64, alpha = 1/8 (which is exact)."""
    q, k = _heads(inputs["q"]), _heads(inputs["k"])  # (32, m, 64), (8, n, 64)
    (heads, rows, _), keys = q.shape, k.shape[1]
    shared = heads // k.shape[0]

    def gather(flat: Tensor) -> tuple[Tensor, Tensor]:
        head = flat // (rows * keys)
        return q[head, flat // keys % rows], k[head // shared, flat % keys]  # (m, 64) each

    def whole() -> Allowance:
        every = k.repeat_interleave(shared, dim=0).transpose(1, 2)  # (32, 64, n)
        return _sums(q, every)

    gemm = _Gemm(HEAD, SCALE, gather, whole, real.numel() // HEAD)
    return gemm.bound(real, _groups(tuple(real.shape)))


def _attn_v(inputs: Inputs, real: Tensor) -> Bound:
    """probs (32, m, n) against v (n, 512), a head at a time: K = n, alpha 1, result (m, 2048)."""
    probs, v = inputs["probs"], _heads(inputs["v"])  # (32, m, n), (8, n, 64)
    heads, _, keys = probs.shape
    shared = heads // v.shape[0]

    def gather(flat: Tensor) -> tuple[Tensor, Tensor]:
        row, head, column = flat // (heads * HEAD), flat // HEAD % heads, flat % HEAD
        return probs[head, row], v[head // shared, :, column]  # (m, n) each

    def whole() -> Allowance:
        every = v.repeat_interleave(shared, dim=0)  # (32, n, 64)
        total, norm = (s.reshape(heads, -1, HEAD) for s in _sums(probs, every))
        return total.transpose(0, 1).reshape(-1), norm.transpose(0, 1).reshape(-1)

    gemm = _Gemm(keys, 1.0, gather, whole, real.numel() // HEAD)
    return gemm.bound(real, _groups(tuple(real.shape), heads=True))


def _sums(a: Tensor, w: Tensor) -> Allowance:
    """sum |a||w| and ||a o w||_2 of a batched product a (..., m, K) @ w (..., K, n), flattened."""
    return (a.abs() @ w.abs()).reshape(-1), (a.square() @ w.square()).sqrt_().reshape(-1)


# --- the other ops: d is b ------------------------------------------------------------------------


def _dense(real: Tensor, b: Callable[[], Tensor], heads: bool = False) -> Bound:
    """A bound with d = b, of which `b` makes the whole tensor."""
    shape = tuple(real.shape)
    made: list[Tensor] = []

    def at(flat: Tensor) -> Allowance:
        if not made:
            made.append(b().expand(shape).reshape(-1))
        picked = made[0][flat]
        return picked, picked

    return Bound(shape, at, _groups(shape, heads))


def _norm(inputs: Inputs, real: Tensor) -> Bound:
    """Relative (n/2 + 6) u over rows of n elements.

    Squares of bf16 are exact; the sum of n of them, in any order, is off by gamma_n relatively, and
    the root halves that: n/2 u. The division by n, adding eps and eps' own rounding are halved too
    (1.5 u); the root, its store, divide and multiply round once each (4 u): less than 6 u.
    """
    terms = inputs["x"].shape[-1]
    weight = inputs["weight"].to(torch.float64)  # (n,)
    return _dense(real, lambda: (terms / 2 + 6) * U * real.abs() + TINY * (1 + weight.abs()))


def _rope(inputs: Inputs, real: Tensor) -> Bound:
    """(|x1| + |x2|) (angle error + 3u), angle error = |pos inv_freq| 8u + 4u.

    The angle's relative error: inv_freq by a float32 power, divisions and a blend, then its product
    with the position, 8 u in all; cos and sin have slopes of 1 at most and add up to 4 u of their
    own. Two products and a sum: 3 u, fused or not.
    """
    x, positions, inv_freq = inputs["x"], inputs["positions"], inputs["inv_freq"]

    def b() -> Tensor:
        angle = positions.to(torch.float64)[:, None, None] * inv_freq  # (n, 1, 32)
        error = angle.abs() * (8 * U) + 4 * U
        pair = x.abs().unflatten(1, (-1, 2, HEAD // 2)).sum(dim=2)  # (n, heads, 32)
        allowed = pair * (error + 3 * U) + 2 * TINY
        return torch.cat((allowed, allowed), dim=2).flatten(1)  # (n, heads * 64)

    return _dense(real, b, heads=True)


def _softmax(inputs: Inputs, real: Tensor) -> Bound:
    """Relative (n + 8) u + 2u |x - max| over rows of n; a masked entry must be exactly 0.

    The denominator is a sum of n positive terms in any order: n u. x - max rounds by u |x - max|,
    which exp turns into a relative error, once in the numerator and once in the denominator; two
    exponentials, the merge's products and the division: 8 u.
    """
    x = inputs["scores"]  # (..., n)

    def b() -> Tensor:
        away = x.amax(dim=-1, keepdim=True) - x
        relative = (x.shape[-1] + 8) * U + 2 * U * away
        return torch.where(away.isinf(), 0.0, real * relative + 2 * TINY)

    return _dense(real, b)


def _swiglu(inputs: Inputs, real: Tensor) -> Bound:
    """8u |r| + |a||b| 2^-126.

    exp, sum, reciprocal, two products: each 1 or 2 u. Below a = -88.7 exp(-a) overflows, the
    sigmoid becomes 0, and up to |a||b| 2^-126 (a subnormal sigmoid) is lost.
    """
    gate, up = inputs["gate"], inputs["up"]  # (n, 8192) each
    return _dense(
        real,
        lambda: 8 * U * real.abs() + gate.abs() * up.abs() * 2.0**-126 + TINY * (1 + up.abs()),
    )


# --- decode attention -----------------------------------------------------------------------------


def _attention(inputs: Inputs, real: Tensor) -> Bound:
    """A row sees `len` keys: scores, each a sum of 64, an online softmax, a weighted sum of values.

    b = sum p|v| (2 max score error + (4 len + 8) u), score error = g(64) sum|q||k| / 8 + 2u|s|: an
    error e of a score changes its weight by e relatively, in numerator and denominator; each of the
    len steps multiplies by a correction and adds, 4 roundings in all of weight and accumulator.

    d = u len/2 (|r| + ||p o v||_2) + 3 ||p o (v - r) o delta||_2 + 2u|r|, with
    delta_j = 32u (|s_j| + ||q o k_j||_2 / 8) + 4u + u|s_j - max|.
    The first term is a GEMM's d with K = len. delta_j is the GEMM's d of score j, its exponential's
    error and that of its difference from the maximum; it moves r by p_j (v_j - r) delta_j, the
    derivative of a weighted mean. These are independent: three standard deviations of their sum.
    2u|r| for the division.

    recheck: the first term of d becomes 2u sum |partial sums of p o v| (k = 0..len-1).
    """
    q, keys, values = inputs["q"], inputs["keys"], inputs["values"]  # (m, 2048), m x (len, 512)
    width = q.shape[1]
    made: list[Allowance] = []
    rests: list[Tensor] = []
    weighed: list[tuple[Tensor, Tensor]] = []  # of each row: p (32, len), v (8, len, 64)

    def make() -> None:
        bs, ds = [], []
        for row in range(q.shape[0]):
            k, v = _heads(keys[row]), _heads(values[row])  # (8, len, 64) each
            b, walk, rest, p = _attention_row(q[row], k, v, real[row].reshape(-1, HEAD))
            bs.append(b)
            ds.append(walk + rest)
            rests.append(rest)
            weighed.append((p, v))
        made.append((torch.stack(bs).reshape(-1), torch.stack(ds).reshape(-1)))

    def at(flat: Tensor) -> Allowance:
        if not made:
            make()
        b, d = made[0]
        return b[flat], d[flat]

    def recheck(flat: Tensor) -> Tensor:
        if not made:
            make()
        allowed = torch.empty(flat.numel(), dtype=torch.float64)
        for i, index in enumerate(flat.tolist()):
            row, head, column = index // width, index % width // HEAD, index % HEAD
            p, v = weighed[row]
            partial = (p[head] * v[head * v.shape[0] // p.shape[0], :, column]).cumsum(0)
            allowed[i] = 2 * U * partial.abs().sum() + rests[row][head, column]
        return allowed

    return Bound(tuple(real.shape), at, _groups(tuple(real.shape), heads=True), recheck)


def _attention_row(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """b, the two parts of d (32, 64) and the probabilities p (32, len) of one row.

    q (2048,), k and v (8, len, 64), r (32, 64).
    """
    length = k.shape[1]
    q = q.reshape(k.shape[0], -1, HEAD)  # (8, 4, 64): query heads by the key head they share
    r = r.reshape(q.shape)
    s = q @ k.transpose(1, 2) * SCALE  # (8, 4, len)
    p = s.softmax(dim=-1)
    absolute, norm = (
        part.reshape(s.shape) * SCALE for part in _sums(q, k.transpose(1, 2))
    )  # (8, 4, len) each
    error = 2 * U * HEAD / (1 - 2 * U * HEAD) * absolute + 2 * U * s.abs()
    lost = TINY * (1 + v.abs().sum(dim=1, keepdim=True))  # (8, 1, 64), products that underflow
    worst = 2 * error.amax(dim=-1, keepdim=True) + (4 * length + 8) * U  # (8, 4, 1)
    b = (p @ v.abs()) * worst + lost
    delta = HEAD / 2 * U * (s.abs() + norm) + 4 * U + U * (s.amax(dim=-1, keepdim=True) - s)
    # ||p o (v - r) o delta||^2, multiplied out so that it takes matmuls; the rounding of the
    # difference is 1e-8 of p |r| delta.
    moved = (p * delta).square()  # (8, 4, len)
    spread = moved @ v.square() - 2 * r * (moved @ v) + r.square() * moved.sum(-1, keepdim=True)
    walk = U * length / 2 * (r.abs() + (p.square() @ v.square()).sqrt())
    rest = 3 * spread.clamp(min=0).sqrt() + 2 * U * r.abs() + lost
    return tuple(part.flatten(0, 1) for part in (b, walk, rest, p))


# --- shapes ---------------------------------------------------------------------------------------


def _heads(x: Tensor) -> Tensor:
    """(n, heads * 64) -> (heads, n, 64)."""
    return x.unflatten(1, (-1, HEAD)).transpose(0, 1)


def _groups(shape: tuple[int, ...], heads: bool = False) -> tuple[Group, ...]:
    """Rows, columns and heads of a result: (n, width), (n, heads * 64) or (heads, queries, keys).

    A head is all of its elements in all rows. Of (heads, queries, keys) a row is one query of one
    head, a column one key of one head.
    """
    if len(shape) == 2:
        rows = Group("row", shape, (1,))
        columns = Group("column", shape, (0,))
        if not heads:
            return rows, columns
        return rows, columns, Group("head", (shape[0], shape[1] // HEAD, HEAD), (0, 2))
    if len(shape) == 3:
        return Group("row", shape, (2,)), Group("column", shape, (1,)), Group("head", shape, (1, 2))
    return ()


_BOUNDS: Final[dict[str, Callable[[Inputs, Tensor], Bound]]] = {
    "embed": _exact,
    "attn_norm": _norm,
    "q_proj": _headed,
    "k_proj": _headed,
    "v_proj": _headed,
    "q_rope": _rope,
    "k_rope": _rope,
    "kv_write": _exact,
    "scores": _scores,
    "mask": _exact,
    "softmax": _softmax,
    "attn_v": _attn_v,
    "attention": _attention,
    "o_proj": _linear,
    "attn_residual": _exact,
    "mlp_norm": _norm,
    "gate_proj": _linear,
    "up_proj": _linear,
    "swiglu": _swiglu,
    "down_proj": _linear,
    "mlp_residual": _exact,
    "final_norm": _norm,
    "logits": _linear,
    "argmax": _exact,
}
