"""The file-scope declarations of a kernels file: functions, constants, types, variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.errors import KernelsError
from kernels.expression import Parser, evaluate, evaluate_tokens
from kernels.host import StatementParser, function
from kernels.tokens import Source, Token, expand, matching, split_commas
from kernels.values import Ctype, Scope, convert, normal_type

_ATTRIBUTES = frozenset(
    (
        "__launch_bounds__",
        "__attribute__",
        "__align__",
        "alignas",
        "__declspec",
        "noexcept",
        "__cluster_dims__",
        "__maxnreg__",
        "decltype",
    )
)
_DROPPED_WORDS = frozenset(
    ("__restrict__", "__restrict", "restrict", "__grid_constant__", "register")
)


@dataclass(frozen=True)
class Parameter:
    """A function's parameter; `ctype` is its type as text ("const float*"), aliases resolved."""

    ctype: str
    name: str
    type: Ctype = field(repr=False, compare=False, default=Ctype(""))

    @property
    def pointer(self) -> bool:
        return self.type.stars > 0


@dataclass(frozen=True)
class Item:
    """A declaration: kind is kernel, device, type, constant or other; [start, end) in the text."""

    kind: str
    names: frozenset[str]
    tokens: tuple[Token, ...]
    start: int
    end: int
    linkage: tuple[Token, ...] = ()  # `extern "C"`, `static`, `inline` in front of a kernel

    @property
    def name(self) -> str:
        return next(iter(self.names), "")


@dataclass(frozen=True)
class Function:
    """A function with a body."""

    name_token: Token
    formal: tuple[Token, ...]
    body: tuple[Token, ...]  # with its braces
    start: int
    end: int
    template: bool

    @property
    def name(self) -> str:
        return self.name_token.text

    @property
    def line(self) -> int:
        return self.name_token.line

    def parameters(self, found: Survey) -> tuple[Parameter, ...]:
        words = expand(self.formal, found.source.macros, found.source.name)
        if [w.text for w in words] == ["void"]:
            return ()
        return tuple(_parameter(part, found) for part in split_commas(words))


@dataclass
class Survey:
    """All that was found in one file.

    `functions` are host functions, `kernels` plain (not templated) __global__ ones.
    """

    source: Source
    items: list[Item] = field(default_factory=list)
    kernels: dict[str, Function] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    constants: dict[str, int | float] = field(default_factory=dict)
    variables: dict[str, Ctype] = field(default_factory=dict)
    aliases: dict[str, Ctype] = field(default_factory=dict)
    unknown: dict[str, KernelsError] = field(default_factory=dict)  # without a value, and why
    namespaces: set[str] = field(default_factory=set)

    def explain(self, name: str) -> None:
        """Raise the reason why constant or function `name` has no meaning, if that is so."""
        if name in self.unknown:
            raise self.unknown[name]


def _parameter(words: Sequence[Token], found: Survey) -> Parameter:
    texts = [w.text for w in words if w.text not in _DROPPED_WORDS]
    if "=" in texts:
        texts = texts[: texts.index("=")]
    stars = texts.count("[")
    if stars:
        texts = texts[: texts.index("[")]
    name = ""
    if len(texts) > 1 and texts[-1].isidentifier() and texts[-2] != "::":
        name = texts.pop()
    kind = normal_type([*texts, *("*" for _ in range(stars))], found.aliases)
    const = "const " if "const" in texts and kind.stars else ""
    return Parameter(f"{const}{kind.base}{'*' * kind.stars}", name, kind)


def survey(source: Source) -> Survey:
    """Walk the file. KernelsError with file:line where its structure is not understood."""
    found = Survey(source)
    for words, body_at in _declarations(source, found.namespaces):
        _classify(found, words, body_at)
    for macro in source.macros.values():
        if macro.parameters is not None or not macro.body or macro.name in found.constants:
            continue
        scope = _scope(found)
        try:
            value = evaluate_tokens(expand(macro.body, source.macros, source.name), scope)
        except KernelsError as error:
            found.unknown.setdefault(macro.name, error)
            continue
        if isinstance(value, (int, float)):
            found.constants[macro.name] = value
    return found


def _declarations(source: Source, namespaces: set[str]) -> Iterator[tuple[list[Token], int]]:
    """Each file-scope declaration's tokens, and where in them a function's body starts (or -1)."""
    tokens, name = source.tokens, source.name
    i, opened = 0, 0
    while i < len(tokens):
        word = tokens[i]
        if word.text == ";":
            i += 1
            continue
        if word.text == "}":
            if opened == 0:
                raise source.error(word, "'}' without '{'")
            opened -= 1
            i += 1
            continue
        skip = _block_opening(tokens, i)
        if skip:
            opened += 1
            namespaces |= {t.text for t in tokens[i:skip] if t.kind == "name"} - {
                "extern",
                "namespace",
            }
            i = skip
            continue
        end, body = _declaration_end(source, i)
        yield list(tokens[i:end]), body - i if body >= 0 else -1
        i = end
    if opened:
        raise source.error(tokens[-1], f"{name} ends inside a namespace or extern block")


def _block_opening(tokens: Sequence[Token], i: int) -> int:
    """Index after the `{` of `namespace x {` or `extern "C" {` at i, else 0."""
    texts = [t.text for t in tokens[i : i + 12]]
    if texts[0] == "inline" and texts[1:2] == ["namespace"]:
        texts, i = texts[1:], i + 1
    if texts[0] == "namespace" and "{" in texts:
        between = texts[1 : texts.index("{")]
        if all(t == "::" or t.isidentifier() for t in between):
            return i + len(between) + 2
    if texts[0] == "extern" and len(texts) > 2 and texts[1].startswith('"') and texts[2] == "{":
        return i + 3
    return 0


def _declaration_end(source: Source, start: int) -> tuple[int, int]:
    """(index after the declaration that starts at `start`, index of its function body or -1)."""
    tokens, name = source.tokens, source.name
    i = start
    called = initialised = False
    if tokens[i].text == "template":
        i += 1
        depth = 0
        while i < len(tokens):
            depth += {"<": 1, ">": -1, ">>": -2, "<<<": 3, ">>>": -3}.get(tokens[i].text, 0)
            i += 1
            if depth <= 0:
                break
    while i < len(tokens):
        text = tokens[i].text if tokens[i].kind == "punct" else ""
        if text == ";":
            return i + 1, -1
        if text in ("(", "["):
            if text == "(" and not initialised and i > start and tokens[i - 1].kind == "name":
                called = called or tokens[i - 1].text not in _ATTRIBUTES
            i = matching(tokens, i, name) + 1
            continue
        if text == "{":
            close = matching(tokens, i, name)
            if called and not initialised:
                return close + 1, i
            i = close + 1
            continue
        if text == "}":
            break
        initialised = initialised or text == "="
        i += 1
    raise source.error(tokens[start], f"the declaration of {tokens[start]} does not end")


_TYPE_STARTS = ("struct", "class", "union", "enum", "typedef", "using")


def _classify(found: Survey, words: list[Token], body_at: int) -> None:
    source = found.source
    texts = [w.text for w in words]
    template = texts[0] == "template"
    start, end = words[0].start, words[-1].end
    head = texts[: texts.index("{")] if "{" in texts else texts
    expanded = {
        w.text for w in expand(words[: len(head)], source.macros, source.name) if w.kind == "name"
    }
    opener = _call_opener(words, body_at if body_at >= 0 else len(words))
    if {"__global__", "__device__"} & expanded and opener > 0 and "=" not in texts[:opener]:
        kind = "kernel" if "__global__" in expanded else "device"
        if template and kind == "kernel":
            return
        name = words[opener - 1]
        linkage = tuple(
            w
            for w in words[: opener - 1]
            if kind == "kernel" and (w.text in ("extern", "static", "inline") or w.kind == "string")
        )
        found.items.append(Item(kind, frozenset([name.text]), tuple(words), start, end, linkage))
        if body_at >= 0:
            made = _function(found, words, opener, body_at, template)
            if kind == "kernel":
                if name.text in found.kernels:
                    raise source.error(
                        name,
                        f"kernel {name} is defined twice (also at line "
                        f"{found.kernels[name.text].line}); keep one",
                    )
                found.kernels[name.text] = made
            elif "__host__" in expanded:
                found.functions[name.text] = made
        return
    if body_at >= 0:
        made = _function(found, words, opener, body_at, template)
        constant = "constexpr" in head  # may be called from device code (--expt-relaxed-constexpr)
        if constant:
            names = frozenset([made.name])
            found.items.append(Item("device", names, tuple(words), start, end))
        previous = found.functions.pop(made.name, None)
        if previous is not None or made.name in found.unknown:  # fine, unless a launch needs it
            found.unknown[made.name] = source.error(
                made.name_token, f"{made.name} is defined more than once; keep one"
            )
        else:
            found.functions[made.name] = made
        return
    first = texts[texts.index(">") + 1] if template and ">" in texts else texts[0]
    if first in _TYPE_STARTS:
        _type(found, words, first)
        return
    if opener > 0 and "=" not in texts[:opener] and "const" not in texts:
        return  # a prototype, or a variable of a class type
    _variable(found, words)


def _call_opener(words: Sequence[Token], stop: int) -> int:
    """Index of the `(` that opens a function's parameters before `stop`, or -1."""
    i = 0
    while i < stop:
        text = words[i].text
        named = i > 0 and words[i - 1].kind == "name" and words[i - 1].text not in _ATTRIBUTES
        if text == "(" and named:
            return i
        if text in ("(", "["):
            depth = 0
            while i < stop:
                depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(words[i].text, 0)
                if depth == 0:
                    break
                i += 1
        i += 1
    return -1


def _function(
    found: Survey, words: list[Token], opener: int, body_at: int, template: bool
) -> Function:
    if opener <= 0:
        raise found.source.error(words[0], f"{words[0]} ... {{ is not understood")
    close = matching(words, opener, found.source.name)
    return Function(
        words[opener - 1],
        tuple(words[opener + 1 : close]),
        tuple(words[body_at:]),
        words[0].start,
        words[-1].end,
        template,
    )


def _type(found: Survey, words: list[Token], first: str) -> None:
    texts = [w.text for w in words]
    names: set[str] = set()
    if first == "using" and "=" in texts:
        names = {texts[1]}
        found.aliases[texts[1]] = normal_type(texts[3:-1], found.aliases)
    elif first == "using":
        return  # using namespace std; using std::max;
    elif first == "typedef":
        names = {texts[-2]}
        if "{" not in texts and "(" not in texts:
            found.aliases[texts[-2]] = normal_type(texts[1:-2], found.aliases)
    else:
        names = (
            {w.text for w in words[: texts.index("{")] if w.kind == "name"}
            if "{" in texts
            else set()
        )
        names -= {"struct", "class", "union", "enum", "template", "typename"}
        if first == "enum" and "{" in texts:
            names |= _enumerators(found, words, texts)
    item = Item("type", frozenset(names), tuple(words), words[0].start, words[-1].end)
    found.items.append(item)


def _enumerators(found: Survey, words: list[Token], texts: list[str]) -> set[str]:
    opening = texts.index("{")
    close = matching(words, opening, found.source.name)
    names: set[str] = set()
    following = 0
    for part in split_commas(words[opening + 1 : close]):
        if not part:
            continue
        if len(part) > 2 and part[1].text == "=":
            try:
                following = int(_value(found, part[2:]))
            except KernelsError as error:
                found.unknown[part[0].text] = error
                continue
        found.constants[part[0].text] = following
        names.add(part[0].text)
        following += 1
    return names


def _scope(found: Survey) -> Scope:
    functions: dict[str, Any] = {}
    for name, made in found.functions.items():
        if not made.template:

            def body(made: Function = made) -> Any:
                words = expand(made.body, found.source.macros, found.source.name)
                return StatementParser(words, found.source.name, found.aliases).body()

            formal = [(p.type, p.name) for p in made.parameters(found)]
            functions[name] = function(formal, body, name)
    return Scope(found.source.name, found.constants, functions=functions, outer=found.explain)


def _value(found: Survey, words: Sequence[Token]) -> Any:
    ready = expand(words, found.source.macros, found.source.name)
    return evaluate(Parser(ready, found.source.name, found.aliases).whole(), _scope(found))


def _variable(found: Survey, words: list[Token]) -> None:
    """`const int a = 1, b = 2;`, `static float *d_cos = nullptr;`, `__device__ float table[64];`"""
    texts = [w.text for w in words]
    device = bool({"__device__", "__constant__", "__managed__", "__shared__"} & set(texts))
    constant = ("const" in texts or "constexpr" in texts) and not device
    stop = next((i for i, t in enumerate(texts) if t in ("=", "{", "[", "(", ",", ";")), len(texts))
    head = words[: stop - 1]
    names: set[str] = set()
    for k, part in enumerate(split_commas(words[stop - 1 : -1])):
        stars = sum(w.text == "*" for w in part[:3])
        part = [w for i, w in enumerate(part) if not (w.text in ("*", "&") and i < 3)]
        if not part or part[0].kind != "name":
            return  # a class-type variable or something else that only host code can use
        name = part[0]
        if k == 0:
            stars = 0  # the first declarator's stars are in `head`
        base = [w.text for w in head if w.text not in ("__device__", "__constant__", "__managed__")]
        base = base if k == 0 else [w for w in base if w != "*"]
        kind = normal_type([*base, *("*" for _ in range(stars))], found.aliases)
        names.add(name.text)
        found.unknown.pop(name.text, None)
        if constant and not kind.stars:
            _constant(found, name, part, kind)
        elif not device:
            found.variables[name.text] = kind
    kind_name = "device" if device else "constant" if constant else "other"
    found.items.append(
        Item(kind_name, frozenset(names), tuple(words), words[0].start, words[-1].end)
    )


def _constant(found: Survey, name: Token, part: Sequence[Token], kind: Ctype) -> None:
    source = found.source
    if len(part) > 2 and part[1].text == "=" and part[2].text != "{":
        words = part[2:]
    elif len(part) > 2 and part[1].text in ("{", "("):
        words = part[2:-1]
    else:
        found.unknown[name.text] = source.error(name, f"constant {name} is not a plain number")
        return
    try:
        value = convert(_value(found, words), kind, name, _scope(found))
    except KernelsError as error:
        found.unknown[name.text] = error
        return
    if not isinstance(value, (int, float)):
        found.unknown[name.text] = source.error(name, f"constant {name} is not a plain number")
    elif found.constants.get(name.text, value) != value:
        raise source.error(name, f"constant {name} has two values; give one another name")
    else:
        found.constants[name.text] = value


Constants = Mapping[str, int | float]
