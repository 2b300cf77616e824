"""Host-side C++ expressions of a kernels file: parsed, and evaluated with C's arithmetic.

Integers divide by truncation, floats are float32 unless double, pointers step by their element size.
Whatever is not understood raises KernelsError with file:line; nothing is guessed.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.errors import KernelsError
from kernels.tokens import Token, matching, split_commas

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
    "const constexpr static inline volatile register signed unsigned struct extern typename "
    "__restrict__ __restrict restrict".split()
) - {"signed", "unsigned"}
TYPE_WORDS = frozenset(
    "void auto int long short char float double bool unsigned signed dim3 cudaError_t "
    "cudaStream_t cudaError".split()
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
class Node:
    """An expression: `kind` says what `parts` holds; `token` is where it stands."""

    kind: str
    token: Token
    parts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Launched:
    """A `kernel<<<...>>>(...)` as evaluated."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[int | float, ...]
    shared: int
    line: int


class _Exit(Exception):
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


# --- parsing --------------------------------------------------------------------------------------

_LEVELS = [
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
]
_ASSIGNS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=")
_CASTS = ("static_cast", "reinterpret_cast", "const_cast")


class Parser:
    """Recursive descent over tokens that already had their macros expanded."""

    def __init__(self, tokens: Sequence[Token], name: str, aliases: Mapping[str, Ctype]) -> None:
        self.tokens = tokens
        self.name = name
        self.aliases = aliases
        self.at = 0

    def fail(self, message: str, token: Token | None = None) -> KernelsError:
        token = token or (self.tokens[min(self.at, len(self.tokens) - 1)] if self.tokens else None)
        where = f"{self.name}:{token.line}" if token else self.name
        return KernelsError(f"{where}: {message}")

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at].text if at < len(self.tokens) else ""

    def take(self, text: str | None = None) -> Token:
        if self.at >= len(self.tokens):
            raise self.fail(f"the expression ends where {text or 'more'!r} is needed")
        token = self.tokens[self.at]
        if text is not None and token.text != text:
            raise self.fail(f"found {token.text!r} where {text!r} is needed")
        self.at += 1
        return token

    def whole(self) -> Node:
        node = self.expression()
        if self.at < len(self.tokens):
            raise self.fail(f"{self.peek()!r} is not understood here")
        return node

    def expression(self) -> Node:
        node = self.assignment()
        while self.peek() == ",":
            token = self.take()
            node = Node("comma", token, (node, self.assignment()))
        return node

    def assignment(self) -> Node:
        left = self.ternary()
        if self.peek() in _ASSIGNS:
            token = self.take()
            return Node("assign", token, (token.text, left, self.assignment()))
        return left

    def ternary(self) -> Node:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        token = self.take()
        yes = self.assignment()
        self.take(":")
        return Node("cond", token, (condition, yes, self.assignment()))

    def binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self.unary()
        node = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            token = self.take()
            node = Node("binary", token, (token.text, node, self.binary(level + 1)))
        return node

    def unary(self) -> Node:
        text = self.peek()
        if text in ("-", "+", "!", "~"):
            token = self.take()
            return Node("unary", token, (text, self.unary()))
        if text in ("++", "--"):
            token = self.take()
            return Node("step", token, (text, self.unary(), True))
        if text in ("*", "&"):
            raise self.fail(f"unary {text!r} is not understood in host code")
        if text == "(":
            close = matching(self.tokens, self.at, self.name)
            ctype = self.type_in(self.tokens[self.at + 1 : close])
            if ctype is not None:
                token = self.take()
                self.at = close + 1
                return Node("cast", token, (ctype, self.unary()))
        return self.postfix()

    def type_in(self, words: Sequence[Token]) -> Ctype | None:
        """The type that `words` spell, None if they are no type."""
        texts = [w.text for w in words if w.text not in ("std", "::")]
        names = [t for t in texts if t not in QUALIFIERS and t not in ("*", "&")]
        if not names or any(t not in TYPE_WORDS and t not in self.aliases for t in names):
            return None
        return normal_type(texts, self.aliases)

    def postfix(self) -> Node:
        node = self.primary()
        while True:
            text = self.peek()
            if text == ".":
                token = self.take()
                node = Node("member", token, (node, self.take().text))
            elif text in ("++", "--"):
                token = self.take()
                node = Node("step", token, (text, node, False))
            elif text == "<<<":
                node = self.launch(node)
            elif text in ("[", "->"):
                raise self.fail(f"{text!r} is not understood in host code")
            else:
                return node

    def primary(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return Node("value", token, (_number(token.text, self),))
        if token.kind == "char":
            return Node("value", token, (ord(_unescape(token.text[1:-1])),))
        if token.kind == "string":
            text = _unescape(token.text[1:-1])
            while self.at < len(self.tokens) and self.tokens[self.at].kind == "string":
                text += _unescape(self.take().text[1:-1])
            return Node("value", token, (text,))
        if token.text == "(":
            node = self.expression()
            self.take(")")
            return node
        if token.kind != "name":
            raise self.fail(f"{token.text!r} is not understood here", token)
        if token.text in _CASTS:
            self.take("<")
            start = self.at
            while self.peek() not in (">", ""):
                self.at += 1
            ctype = self.type_in(self.tokens[start : self.at])
            if ctype is None:
                raise self.fail(f"{token.text} to a type that is not understood", token)
            self.take(">")
            self.take("(")
            node = self.expression()
            self.take(")")
            return Node("cast", token, (ctype, node))
        if token.text == "sizeof":
            self.at -= 1
            close = matching(self.tokens, self.at + 1, self.name)
            words = self.tokens[self.at + 2 : close]
            ctype = self.type_in(words)
            self.at = close + 1
            if ctype is None and len(words) == 1:
                return Node("sizeof_name", token, (words[0].text,))
            size = 8 if ctype and ctype.stars else SIZES.get(ctype.base, 0) if ctype else 0
            if not size:
                raise self.fail("sizeof of something that is not understood", token)
            return Node("value", token, (size,))
        name = token.text
        while self.peek() == "::":
            self.take()
            part = self.take()
            name = part.text if name in ("std", "") else f"{name}::{part.text}"
        if self.peek() == "<" and name in ("max", "min"):  # std::max<int>(a, b)
            close = self.at + 1
            while close < len(self.tokens) and self.tokens[close].text != ">":
                close += 1
            if self.type_in(self.tokens[self.at + 1 : close]) is not None:
                self.at = close + 1
        if self.peek() in ("(", "{") and (self.peek() == "(" or name == "dim3"):
            close = matching(self.tokens, self.at, self.name)
            arguments = self.arguments(self.at + 1, close)
            self.at = close + 1
            if name in TYPE_WORDS and name != "dim3":
                ctype = normal_type([name], self.aliases)
                if len(arguments) != 1:
                    raise self.fail(f"{name}(...) takes one value", token)
                return Node("cast", token, (ctype, arguments[0]))
            return Node("call", token, (name, arguments))
        return Node("name", token, (name,))

    def arguments(self, start: int, end: int) -> tuple[Node, ...]:
        return tuple(
            Parser(part, self.name, self.aliases).whole()
            for part in split_commas(self.tokens[start:end])
        )

    def launch(self, kernel: Node) -> Node:
        token = self.take("<<<")
        if kernel.kind != "name":
            raise self.fail("only a plainly named kernel can be launched", token)
        close = matching(self.tokens, self.at - 1, self.name)
        shape = self.arguments(self.at, close)
        if not 2 <= len(shape) <= 4:
            raise self.fail(f"<<<>>> takes 2 to 4 values (got {len(shape)})", token)
        self.at = close + 1
        opening = self.at
        self.take("(")
        end = matching(self.tokens, opening, self.name)
        arguments = self.arguments(self.at, end)
        self.at = end + 1
        return Node("launch", kernel.token, (kernel.parts[0], shape, arguments))


def _number(text: str, parser: Parser) -> int | float:
    plain = text.replace("'", "").lower()
    try:
        if plain.startswith("0x"):
            return int(plain.rstrip("ulz"), 16)
        if plain.endswith("f") or "." in plain or "e" in plain:
            value = float(plain.rstrip("fl"))
            return to_float32(value) if plain.endswith("f") else value
        digits = plain.rstrip("ulz")
        return int(digits, 8) if digits.startswith("0") and len(digits) > 1 else int(digits)
    except ValueError:
        raise parser.fail(f"number {text!r} is not understood") from None


def _unescape(text: str) -> str:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


# --- evaluating -----------------------------------------------------------------------------------

_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_PLAIN = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_BITS = {
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}
_NAMED = {
    "true": 1,
    "false": 0,
    "nullptr": 0,
    "NULL": 0,
    "cudaSuccess": 0,
    "endl": "\n",
    "flush": "",
    "INT_MAX": 2**31 - 1,
    "stdout": 0,
    "stderr": 0,
}
# Calls that do not change which kernel runs on what; each succeeds.
_HARMLESS = frozenset(
    "cudaGetLastError cudaPeekAtLastError cudaDeviceSynchronize cudaStreamSynchronize "
    "cudaFuncSetAttribute fflush".split()
)
KNOWN_NAMES = frozenset(_NAMED) | {"cout", "cerr"}


def evaluate_tokens(tokens: Sequence[Token], scope: Scope) -> Any:
    """The value of an expression of constants, e.g. of a `#define`'s body."""
    return evaluate(Parser(tokens, scope.name, {}).whole(), scope)


def evaluate(node: Node, scope: Scope) -> Any:
    """The value of `node`; what it printed, assigned or launched is in `scope`."""
    return _EVALUATE[node.kind](node, scope)


def _binary(op: str, a: Any, b: Any, token: Token, scope: Scope) -> Any:
    if isinstance(a, Stream):
        if op != "<<":
            raise scope.error(token, f"a stream and {op!r} are not understood")
        scope.printed.append(_shown(b))
        return a
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        raise scope.error(token, f"{op!r} is not understood for these values")
    if op in _COMPARE:
        return int(_COMPARE[op](a, b))
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        if op == "+" and isinstance(b, Pointer):
            a, b = b, a
        if op not in ("+", "-") or isinstance(b, (Pointer, float)) or not a.size:
            raise scope.error(token, "this pointer arithmetic is not understood")
        return Pointer(_PLAIN[op](int(a), int(b) * a.size), a.size)
    whole = isinstance(a, int) and isinstance(b, int)
    if op in ("/", "%") and whole:
        if b == 0:
            raise scope.error(token, "division by zero")
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if op == "/" else a - quotient * b
    if op in _BITS:
        if not whole or (op in ("<<", ">>") and not 0 <= b < 64):
            raise scope.error(token, f"{op!r} takes whole numbers")
        return _BITS[op](a, b)
    if op == "%":
        raise scope.error(token, "'%' takes whole numbers")
    if op == "/":
        a, b = (a, b) if isinstance(a, float) else (type(b)(a), b)
        value = a / b if b else math.copysign(math.inf, a) if a else math.nan
    else:
        value = _PLAIN[op](a, b)
    double = any(isinstance(v, float) and not isinstance(v, Float32) for v in (a, b))
    return value if whole or double else to_float32(value)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _name(node: Node, scope: Scope) -> Any:
    name = node.parts[0]
    for table in (scope.variables, scope.constants, _NAMED):
        if name in table:
            return table[name]
    if name in ("cout", "cerr"):
        return Stream()
    value = scope.outer(name) if scope.outer else None
    if value is None:
        raise scope.error(
            node.token, f"{name} has no value known here; define it as a constant in this file"
        )
    return value


def _logic(node: Node, scope: Scope) -> Any:
    op, left, right = node.parts
    if op == "&&":
        return int(bool(evaluate(left, scope)) and bool(evaluate(right, scope)))
    if op == "||":
        return int(bool(evaluate(left, scope)) or bool(evaluate(right, scope)))
    return _binary(op, evaluate(left, scope), evaluate(right, scope), node.token, scope)


def _unary(node: Node, scope: Scope) -> Any:
    op, inner = node.parts
    value = evaluate(inner, scope)
    if op == "!":
        return int(not value)
    if op == "~":
        return ~value
    return type(value)(-value) if op == "-" and isinstance(value, float) else -value if op == "-" else value


def _store(target: Node, value: Any, scope: Scope) -> Any:
    if target.kind == "member":
        owner, part = target.parts
        dim = evaluate(owner, scope)
        if not isinstance(dim, Dim3) or part not in ("x", "y", "z"):
            raise scope.error(target.token, f".{part} is not understood")
        setattr(dim, part, convert(value, Ctype("unsigned"), target.token, scope))
        return value
    if target.kind != "name" or target.parts[0] not in scope.variables:
        raise scope.error(target.token, "only local variables can be assigned to")
    name = target.parts[0]
    scope.variables[name] = convert(value, scope.types[name], target.token, scope)
    return scope.variables[name]


def _assign(node: Node, scope: Scope) -> Any:
    op, target, right = node.parts
    value = evaluate(right, scope)
    if op != "=":
        value = _binary(op[:-1], evaluate(target, scope), value, node.token, scope)
    return _store(target, value, scope)


def _step(node: Node, scope: Scope) -> Any:
    op, target, before = node.parts
    old = evaluate(target, scope)
    new = _store(target, _binary(op[0], old, 1, node.token, scope), scope)
    return new if before else old


def _member(node: Node, scope: Scope) -> Any:
    owner, part = node.parts
    dim = evaluate(owner, scope)
    if not isinstance(dim, Dim3) or part not in ("x", "y", "z"):
        raise scope.error(node.token, f".{part} is not understood")
    return getattr(dim, part)


def _cast(node: Node, scope: Scope) -> Any:
    ctype, inner = node.parts
    return convert(evaluate(inner, scope), ctype, node.token, scope)


def _sizeof_name(node: Node, scope: Scope) -> int:
    ctype = scope.types.get(node.parts[0])
    size = 8 if ctype and ctype.stars else SIZES.get(ctype.base, 0) if ctype else 0
    if not size:
        raise scope.error(node.token, f"sizeof({node.parts[0]}) is not understood")
    return size


def _numbers(name: str, values: list[Any], count: int, token: Token, scope: Scope) -> list[Any]:
    if len(values) != count or not all(isinstance(v, (int, float)) for v in values):
        raise scope.error(token, f"{name} takes {count} numbers")
    return values


def _call(node: Node, scope: Scope) -> Any:
    name, arguments = node.parts
    token = node.token
    if name in _HARMLESS:  # its arguments may name what only CUDA knows
        return 0
    values = [evaluate(a, scope) for a in arguments]
    if name in scope.functions:
        return scope.functions[name](scope, values, token)
    if name == "dim3":
        if len(values) > 3:
            raise scope.error(token, "dim3 takes at most 3 values")
        return Dim3(*(convert(v, Ctype("unsigned"), token, scope) for v in values))
    if name in ("max", "min"):
        a, b = _numbers(name, values, 2, token, scope)
        return max(a, b) if name == "max" else min(a, b)
    if name in ("ceil", "ceilf", "floor", "floorf", "sqrt", "sqrtf", "log2", "log2f", "abs", "fabs"):
        (a,) = _numbers(name, values, 1, token, scope)
        if name == "abs" and isinstance(a, int):
            return abs(a)
        plain = name.removesuffix("f") if name != "fabs" else "fabs"
        value = {
            "ceil": math.ceil,
            "floor": math.floor,
            "sqrt": math.sqrt,
            "log2": math.log2,
            "abs": abs,
            "fabs": math.fabs,
        }[plain](a)
        single = isinstance(a, Float32) or name.endswith("f")
        return to_float32(value) if single else float(value)
    if name in ("printf", "fprintf", "puts", "perror"):
        text, rest = (values[1], values[2:]) if name == "fprintf" else (values[0], values[1:])
        try:
            shown = str(text).replace("%zu", "%d").replace("%lu", "%d").replace("%ld", "%d")
            scope.printed.append(shown.replace("%u", "%d").replace("%lld", "%d") % tuple(rest))
        except (TypeError, ValueError):
            raise scope.error(token, "this printf format is not understood") from None
        return 0
    if name == "cudaGetErrorString":
        return "no error"
    if name in ("exit", "abort", "_exit"):
        raise _Exit
    if name == "assert":
        if not values or not values[0]:
            raise scope.error(token, "this assert fails for the values given")
        return 0
    raise scope.error(token, f"call of {name}, which is not understood in host code")


def dim3_of(value: Any, token: Token, scope: Scope) -> tuple[int, int, int]:
    if isinstance(value, Dim3):
        return value.values()
    return (convert(value, Ctype("unsigned"), token, scope), 1, 1)


def _launch(node: Node, scope: Scope) -> Any:
    kernel, shape, arguments = node.parts
    grid = dim3_of(evaluate(shape[0], scope), shape[0].token, scope)
    block = dim3_of(evaluate(shape[1], scope), shape[1].token, scope)
    shared = 0
    if len(shape) > 2:
        shared = convert(
            evaluate(shape[2], scope), Ctype("unsigned long"), shape[2].token, scope
        )
    values = tuple(evaluate(a, scope) for a in arguments)
    scope.launches.append(Launched(kernel, grid, block, values, shared, node.token.line))
    return 0


def _comma(node: Node, scope: Scope) -> Any:
    evaluate(node.parts[0], scope)
    return evaluate(node.parts[1], scope)


_EVALUATE: dict[str, Callable[[Node, Scope], Any]] = {
    "value": lambda node, scope: node.parts[0],
    "name": _name,
    "binary": _logic,
    "unary": _unary,
    "cond": lambda node, scope: evaluate(
        node.parts[1] if evaluate(node.parts[0], scope) else node.parts[2], scope
    ),
    "assign": _assign,
    "step": _step,
    "member": _member,
    "cast": _cast,
    "sizeof_name": _sizeof_name,
    "call": _call,
    "launch": _launch,
    "comma": _comma,
}


def names_in(node: Any) -> list[tuple[str, Token]]:
    """Every identifier read anywhere in `node` (calls of functions not included)."""
    if isinstance(node, (tuple, list)):
        return [found for part in node for found in names_in(part)]
    if not isinstance(node, Node):
        return []
    if node.kind == "name":
        return [(node.parts[0], node.token)]
    if node.kind == "call" and node.parts[0] in _HARMLESS:
        return []
    return [found for part in node.parts for found in names_in(part)]


Exit = _Exit
