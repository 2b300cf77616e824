"""Host functions of a kernels file: parsed into statements, and run to see what they launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.expression import Node, Parser, evaluate
from kernels.tokens import Token, matching
from kernels.values import (
    QUALIFIERS,
    TYPE_WORDS,
    Ctype,
    Dim3,
    Exit,
    Scope,
    convert,
    normal_type,
)

_STEP_LIMIT = 100_000  # loop turns: a host call that needs more is not one we understand


@dataclass(frozen=True)
class Statement:
    """kind: block, declare, expression, if, while, do, for, return, break, continue."""

    kind: str
    token: Token
    parts: tuple[Any, ...] = ()


class _Jump(Exception):
    def __init__(self, kind: str, value: Any = None) -> None:
        super().__init__(kind)
        self.kind = kind
        self.value = value


class StatementParser(Parser):
    """Statements of a function's body; the tokens already had their macros expanded."""

    def body(self) -> Statement:
        token = self.take("{")
        inner: list[Statement] = []
        while self.peek() != "}":
            inner.append(self.statement())
        self.take("}")
        return Statement("block", token, tuple(inner))

    def statement(self) -> Statement:
        text = self.peek()
        if text == "{":
            return self.body()
        if text == ";":
            return Statement("block", self.take(), ())
        if text == "if":
            return self._if()
        if text == "while":
            token = self.take()
            condition = self._bracketed()
            return Statement("while", token, (condition, self.statement()))
        if text == "do":
            token = self.take()
            inner = self.statement()
            self.take("while")
            condition = self._bracketed()
            self.take(";")
            return Statement("do", token, (condition, inner))
        if text == "for":
            return self._for()
        if text == "return":
            token = self.take()
            value = None if self.peek() == ";" else self.expression()
            self.take(";")
            return Statement("return", token, (value,))
        if text in ("break", "continue"):
            token = self.take()
            self.take(";")
            return Statement(text, token)
        if text in ("switch", "goto", "try", "throw", "asm", "using", "case"):
            raise self.fail(f"{text!r} is not understood in a host call")
        if self._declares():
            return self._declaration()
        token = self.tokens[self.at]
        node = self.expression()
        self.take(";")
        return Statement("expression", token, (node,))

    def _bracketed(self) -> Node:
        self.take("(")
        node = self.expression()
        self.take(")")
        return node

    def _if(self) -> Statement:
        token = self.take()
        if self.peek() == "constexpr":
            self.take()
        condition = self._bracketed()
        yes = self.statement()
        no = None
        if self.peek() == "else":
            self.take()
            no = self.statement()
        return Statement("if", token, (condition, yes, no))

    def _for(self) -> Statement:
        token = self.take()
        close = matching(self.tokens, self.at, self.name)
        self.take("(")
        if self._declares():
            first = self._declaration()
        else:
            first = Statement("block", token, ())
            if self.peek() != ";":
                first = Statement("expression", token, (self.expression(),))
            self.take(";")
        condition = None if self.peek() == ";" else self.expression()
        self.take(";")
        last = None if self.at == close else self.expression()
        self.take(")")
        return Statement("for", token, (first, condition, last, self.statement()))

    def _declares(self) -> bool:
        """Does a declaration start here? (`name name`, `name *name =`, or a type word)"""
        words = 0
        while self.peek(words) in ("std", "::") or self.peek(words) in QUALIFIERS:
            words += 1
        first = self.peek(words)
        if first in TYPE_WORDS or first in self.aliases:
            return self.peek(words + 1) not in ("(", "{", ".")
        if not first or self.tokens[self.at + words].kind != "name":
            return False
        after = words + 1
        while self.peek(after) == "*":
            after += 1
        follows = self.at + after
        return (
            follows < len(self.tokens)
            and self.tokens[follows].kind == "name"
            and self.peek(after + 1) in ("=", ";", ",", "(", "{", "[")
        )

    def _declaration(self) -> Statement:
        token = self.tokens[self.at]
        words: list[str] = []
        static = False
        while True:
            text = self.peek()
            follows = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else token
            named = follows.kind == "name" or follows.text in ("*", "&", "::")
            typed = named and self.tokens[self.at].kind == "name"
            if not typed and text not in QUALIFIERS and text != "::":
                break
            static = static or text == "static"
            constant = "const" in words or "constexpr" in words or text in ("const", "constexpr")
            words.append(self.take().text)
        if static and not constant:
            raise self.fail("a static local variable is not understood in a host call", token)
        items = []
        while True:
            stars = 0
            while self.peek() in ("*", "&") or self.peek() in QUALIFIERS:
                if self.peek() == "&":
                    raise self.fail("a reference is not understood in a host call")
                stars += self.take().text == "*"
            name = self.take()
            if name.kind != "name":
                raise self.fail(f"{name.text!r} is not understood in a declaration", name)
            ctype = normal_type([*words, *("*" for _ in range(stars))], self.aliases)
            start: tuple[Node, ...] | None = None
            if self.peek() == "=":
                self.take()
                start = self._braced() if self.peek() == "{" else (self.assignment(),)
            elif self.peek() in ("(", "{"):
                start = self._braced()
            elif self.peek() == "[":
                raise self.fail("an array is not understood in a host call")
            items.append((name, ctype, start))
            if self.peek() != ",":
                break
            self.take()
        self.take(";")
        return Statement("declare", token, tuple(items))

    def _braced(self) -> tuple[Node, ...]:
        close = matching(self.tokens, self.at, self.name)
        values = self.arguments(self.at + 1, close)
        self.at = close + 1
        return values


def run(statement: Statement, scope: Scope) -> Any:
    """Run a function's body; its return value. Launches and prints are left in `scope`."""
    try:
        _run(statement, scope)
    except _Jump as jump:
        if jump.kind != "return":
            raise scope.error(statement.token, f"{jump.kind} outside a loop") from None
        return jump.value
    except Exit:
        return None
    return None


def _run(statement: Statement, scope: Scope) -> None:
    kind, parts = statement.kind, statement.parts
    if kind == "block":
        for inner in parts:
            _run(inner, scope)
    elif kind == "expression":
        evaluate(parts[0], scope)
    elif kind == "declare":
        for name, ctype, start in parts:
            _declare(name, ctype, start, scope)
    elif kind == "if":
        if evaluate(parts[0], scope):
            _run(parts[1], scope)
        elif parts[2] is not None:
            _run(parts[2], scope)
    elif kind == "while":
        _loop(statement, scope, parts[0], parts[1], None, False)
    elif kind == "do":
        _loop(statement, scope, parts[0], parts[1], None, True)
    elif kind == "for":
        _run(parts[0], scope)
        _loop(statement, scope, parts[1], parts[3], parts[2], False)
    elif kind == "return":
        raise _Jump("return", None if parts[0] is None else evaluate(parts[0], scope))
    else:
        raise _Jump(kind)


def _loop(
    statement: Statement,
    scope: Scope,
    condition: Node | None,
    body: Statement,
    last: Node | None,
    first_free: bool,
) -> None:
    for turn in range(_STEP_LIMIT):
        if not (first_free and turn == 0) and condition and not evaluate(condition, scope):
            return
        try:
            _run(body, scope)
        except _Jump as jump:
            if jump.kind == "break":
                return
            if jump.kind != "continue":
                raise
        if last is not None:
            evaluate(last, scope)
    raise scope.error(statement.token, f"this loop does not end within {_STEP_LIMIT} turns")


def _declare(name: Token, ctype: Ctype, start: tuple[Node, ...] | None, scope: Scope) -> None:
    scope.types[name.text] = ctype
    values = [evaluate(node, scope) for node in start or ()]
    if ctype == Ctype("dim3") and not (len(values) == 1 and isinstance(values[0], Dim3)):
        if len(values) > 3:
            raise scope.error(name, "dim3 takes at most 3 values")
        values = [Dim3(*(convert(v, Ctype("unsigned"), name, scope) for v in values))]
    if len(values) > 1:
        raise scope.error(name, f"{name.text} takes one value")
    if not values:
        scope.variables[name.text] = None
        return
    scope.variables[name.text] = convert(values[0], ctype, name, scope)


def function(
    parameters: Sequence[tuple[Ctype, str]],
    body: Callable[[], Statement],
    label: str,
) -> Callable[[Scope, list[Any], Token], Any]:
    """A helper of the file (`int ceil_div(int a, int b)`) as something `evaluate` can call."""

    def call(scope: Scope, values: list[Any], token: Token) -> Any:
        if len(values) != len(parameters):
            raise scope.error(token, f"{label} takes {len(parameters)} values (got {len(values)})")
        inner = Scope(
            scope.name,
            scope.constants,
            outer=scope.outer,
            functions=scope.functions,
            launches=scope.launches,
            printed=scope.printed,
        )
        bind(inner, parameters, values, token)
        return run(body(), inner)

    return call


def bind(
    scope: Scope, parameters: Sequence[tuple[Ctype, str]], values: Sequence[Any], token: Token
) -> None:
    for (ctype, name), value in zip(parameters, values, strict=True):
        scope.types[name] = ctype
        scope.variables[name] = convert(value, ctype, token, scope)


def local_names(statement: Statement) -> set[str]:
    """Names that `statement` declares anywhere inside."""
    found: set[str] = set()
    if statement.kind == "declare":
        found |= {name.text for name, _, _ in statement.parts}
    for part in statement.parts:
        if isinstance(part, Statement):
            found |= local_names(part)
    return found


def nodes_in(statement: Statement) -> list[Node]:
    """The expressions of `statement`, in source order."""
    found: list[Node] = []
    for part in statement.parts:
        if isinstance(part, Statement):
            found += nodes_in(part)
        elif isinstance(part, Node):
            found.append(part)
        elif statement.kind == "declare":
            found += part[2] or ()
    return found


def conditions_in(statement: Statement) -> list[Node]:
    """The conditions of its `if`s: the guards of a launch."""
    found = [statement.parts[0]] if statement.kind == "if" else []
    for part in statement.parts:
        if isinstance(part, Statement):
            found += conditions_in(part)
    return found


Aliases = Mapping[str, Ctype]
