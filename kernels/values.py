"""The values and types of host code in a kernels file: what an expression's evaluation works on."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.errors import KernelsError
from kernels.tokens import Token

_INT_RANGES = {
    "bool": (0, 1),
    "char": (-128, 127),
    "unsigned char": (0, 255),
    "short": (-(2**15), 2**15 - 1),
    "unsigned short": (0, 2**16 - 1),
    "int": (-(2**31), 2**31 - 1),
    "unsigned": (0, 2**32 - 1),
    "long": (-(2**63), 2**63 - 1),
    "unsigned long": (0, 2**64 - 1),
}
_SPELLINGS = {
    "signed char": "char",
    "int8_t": "char",
    "uint8_t": "unsigned char",
    "short int": "short",
    "int16_t": "short",
    "unsigned short int": "unsigned short",
    "uint16_t": "unsigned short",
    "signed": "int",
    "signed int": "int",
    "int32_t": "int",
    "unsigned int": "unsigned",
    "uint": "unsigned",
    "uint32_t": "unsigned",
    "long int": "long",
    "long long": "long",
    "long long int": "long",
    "int64_t": "long",
    "ptrdiff_t": "long",
    "ssize_t": "long",
    "unsigned long int": "unsigned long",
    "unsigned long long": "unsigned long",
    "unsigned long long int": "unsigned long",
    "uint64_t": "unsigned long",
    "size_t": "unsigned long",
    "uintptr_t": "unsigned long",
    "uint3": "dim3",
    "bfloat16": "__nv_bfloat16",
    "nv_bfloat16": "__nv_bfloat16",
    "half": "__half",
}
SIZES = {
    **dict.fromkeys(("bool", "char", "unsigned char"), 1),
    **dict.fromkeys(("short", "unsigned short", "__nv_bfloat16", "__half"), 2),
    **dict.fromkeys(("int", "unsigned", "float", "__nv_bfloat162", "__half2"), 4),
    **dict.fromkeys(("long", "unsigned long", "double", "float2"), 8),
    "float4": 16,
}
# Words that may precede a type and say nothing about a value.
QUALIFIERS = frozenset(
    (
        "const",
        "constexpr",
        "static",
        "inline",
        "volatile",
        "register",
        "struct",
        "extern",
        "typename",
        "__restrict__",
        "__restrict",
        "restrict",
    )
)
TYPE_WORDS = frozenset(
    (
        "void",
        "auto",
        "int",
        "long",
        "short",
        "char",
        "float",
        "double",
        "bool",
        "unsigned",
        "signed",
        "dim3",
        "cudaError_t",
        "cudaStream_t",
        "cudaError",
    )
) | frozenset(w for w in (*_SPELLINGS, *SIZES) if " " not in w)


class Float32(float):
    """A C float; arithmetic between two of them rounds to float32."""


class Pointer(int):
    """An address with its element size in bytes (0: unknown, no arithmetic)."""

    size: int

    def __new__(cls, address: int, size: int) -> Pointer:
        made = super().__new__(cls, address)
        made.size = size
        return made


@dataclass
class Dim3:
    x: int = 1
    y: int = 1
    z: int = 1

    def values(self) -> tuple[int, int, int]:
        return (self.x, self.y, self.z)


class Stream:
    """std::cout or std::cerr on the left of <<."""


@dataclass(frozen=True)
class Ctype:
    """A type as the evaluator sees it: a base name and the number of stars."""

    base: str
    stars: int = 0

    @property
    def element_size(self) -> int:
        return 8 if self.stars > 1 else SIZES.get(self.base, 0)


@dataclass(frozen=True)
class Launched:
    """A `kernel<<<...>>>(...)` as evaluated."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[int | float, ...]
    shared: int
    line: int


class Exit(Exception):
    """exit() or abort() in a host call: nothing after it runs."""


@dataclass
class Scope:
    """What names mean while an expression is evaluated, and what evaluating it did."""

    name: str  # the file's, for errors
    constants: Mapping[str, int | float] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    types: dict[str, Ctype] = field(default_factory=dict)
    outer: Callable[[str], Any] | None = None  # file-scope variables; None if it has no value
    functions: Mapping[str, Callable[[Scope, list[Any], Token], Any]] = field(default_factory=dict)
    launches: list[Launched] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    def error(self, token: Token, message: str) -> KernelsError:
        return KernelsError(f"{self.name}:{token.line}: {message}")


def normal_type(words: Sequence[str], aliases: Mapping[str, Ctype]) -> Ctype:
    """`const unsigned int *` as Ctype("unsigned", 1)."""
    stars = sum(w == "*" for w in words)
    plain = [w for w in words if w not in QUALIFIERS and w not in ("*", "&", "std", "::")]
    if len(plain) == 1 and plain[0] in aliases:
        alias = aliases[plain[0]]
        return Ctype(alias.base, alias.stars + stars)
    order = {"unsigned": 0, "signed": 0, "long": 1, "short": 1}
    base = " ".join(sorted(plain, key=lambda w: order.get(w, 2)))
    return Ctype(_SPELLINGS.get(base, base), stars)


def convert(value: Any, ctype: Ctype, token: Token, scope: Scope) -> Any:
    """`value` as a variable of `ctype` holds it. KernelsError if it does not fit."""
    if ctype.stars:
        if not isinstance(value, int):
            raise scope.error(token, f"a pointer cannot hold {value!r}")
        return Pointer(value, ctype.element_size)
    if ctype.base == "auto":
        return value
    if ctype.base == "dim3":
        if isinstance(value, Dim3):
            return Dim3(*value.values())
        return Dim3(int(value))
    if ctype.base == "float":
        return to_float32(value)
    if ctype.base == "double":
        return float(value)
    if ctype.base in _INT_RANGES:
        if isinstance(value, (Dim3, str, Stream)):
            raise scope.error(token, f"{ctype.base} cannot hold {value!r}")
        if ctype.base == "bool":
            return int(value != 0)
        number = int(value)  # C truncates towards zero as Python does
        low, high = _INT_RANGES[ctype.base]
        if not low <= number <= high:
            raise scope.error(token, f"{number} does not fit into {ctype.base}")
        return number
    return value


def to_float32(value: Any) -> Float32:
    try:
        return Float32(struct.unpack("f", struct.pack("f", float(value)))[0])
    except OverflowError:
        return Float32(math.copysign(math.inf, value))
