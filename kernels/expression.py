"""Host-side C++ expressions of a kernels file: parsed, and evaluated with C's arithmetic.

Integers divide by truncation, floats are float32 unless double, pointers step by their element's
size. Whatever is not understood raises KernelsError with file:line; nothing is guessed.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.errors import KernelsError
from kernels.tokens import Token, matching, split_commas
from kernels.values import (
    QUALIFIERS,
    SIZES,
    TYPE_WORDS,
    Ctype,
    Dim3,
    Exit,
    Float32,
    Launched,
    Pointer,
    Scope,
    Stream,
    convert,
    normal_type,
    to_float32,
)


@dataclass(frozen=True)
class Node:
    """An expression: `kind` says what `parts` holds; `token` is where it stands."""

    kind: str
    token: Token
    parts: tuple[Any, ...] = ()


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
_MATH: dict[str, Callable[..., float]] = {
    name + suffix: function
    for name, function in (
        ("ceil", math.ceil),
        ("floor", math.floor),
        ("sqrt", math.sqrt),
        ("log2", math.log2),
        ("fabs", math.fabs),
    )
    for suffix in ("", "f")
}
_MATH["abs"] = math.fabs
# Calls that do not change which kernel runs on what; each succeeds.
_HARMLESS = frozenset(
    (
        "cudaGetLastError",
        "cudaPeekAtLastError",
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaFuncSetAttribute",
        "fflush",
    )
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
    return (
        value
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _name(node: Node, scope: Scope) -> Any:
    name = node.parts[0]
    name = name.rsplit("::", 1)[-1]  # a kernels file's namespaces are one
    for table in (scope.variables, scope.constants, _NAMED):
        if name in table:
            if table[name] is None:
                raise scope.error(node.token, f"{name} is used before it is set")
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
    return (
        type(value)(-value)
        if op == "-" and isinstance(value, float)
        else -value
        if op == "-"
        else value
    )


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
    if scope.outer:
        scope.outer(name)  # raises the reason if the file defines it in a way not understood
    if name == "dim3":
        if len(values) > 3:
            raise scope.error(token, "dim3 takes at most 3 values")
        return Dim3(*(convert(v, Ctype("unsigned"), token, scope) for v in values))
    if name in ("max", "min"):
        a, b = _numbers(name, values, 2, token, scope)
        return max(a, b) if name == "max" else min(a, b)
    if name == "abs" and len(values) == 1 and isinstance(values[0], int):
        return abs(values[0])
    if name in _MATH:
        (a,) = _numbers(name, values, 1, token, scope)
        value = float(_MATH[name](a))
        single = isinstance(a, Float32) or (name.endswith("f") and name[:-1] in _MATH)
        return to_float32(value) if single else value
    if name in ("printf", "fprintf", "puts", "perror"):
        text, rest = (values[1], values[2:]) if name == "fprintf" else (values[0], values[1:])
        try:
            shown = re.sub(
                r"%([-+ 0#]*\d*(?:\.\d+)?)(?:hh|h|ll|l|z|j|t)?u?(?=[diu])", r"%\1", str(text)
            )
            scope.printed.append(shown.replace("%u", "%d") % tuple(rest))
        except (TypeError, ValueError):
            raise scope.error(token, "this printf format is not understood") from None
        return 0
    if name == "cudaGetErrorString":
        return "no error"
    if name in ("exit", "abort", "_exit"):
        raise Exit
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
        shared = convert(evaluate(shape[2], scope), Ctype("unsigned long"), shape[2].token, scope)
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
