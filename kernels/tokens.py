"""C++ source text cut into tokens, with comments, strings and preprocessor lines understood.

Only what `lift` needs of the language. Conditional lines (`#if`, `#ifdef` ...) are followed: tokens
of a branch that is not taken are left out. Macros are kept aside; `expand` replaces them where an
expression is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kernels.errors import KernelsError

# What nvcc 13.0 for sm_90 defines by itself and a kernels file may ask about.
PREDEFINED = {
    "__CUDACC__": "1",
    "__NVCC__": "1",
    "__cplusplus": "201703L",
    "__CUDA_ARCH__": "900",
    "__CUDACC_VER_MAJOR__": "13",
    "__CUDACC_VER_MINOR__": "0",
    "CUDA_VERSION": "13000",
    "CUDART_VERSION": "13000",
    "__GNUC__": "12",
    "__linux__": "1",
}

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\v\f]+|\\\n)
  | (?P<newline>\n)
  | (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
  | (?P<string>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)"
              |(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<char>'(?:\\.|[^'\\\n])+')
  | (?P<number>(?:0[xX][0-9a-fA-F']*(?:\.[0-9a-fA-F]*)?(?:[pP][+-]?\d+)?
              |(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[uUlLfFzZ]*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<punct><<<|>>>|<<=|>>=|\.\.\.|->\*?|::|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#
              |[-+*/%&|^~!<>=?:;,.(){}\[\]\#@$\\])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    """One word of the source: kind is name, number, string, char or punct; end is exclusive."""

    kind: str
    text: str
    start: int
    end: int
    line: int  # 1-based

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Macro:
    """A `#define`; parameters is None for one without parentheses."""

    name: str
    parameters: tuple[str, ...] | None
    body: tuple[Token, ...]
    line: int


@dataclass(frozen=True)
class Source:
    """The tokens of a file, its macros, and where its preprocessor lines and dead branches are."""

    name: str
    text: str
    tokens: tuple[Token, ...]
    macros: Mapping[str, Macro]
    defines: tuple[tuple[int, int], ...]  # spans of #define and #undef lines that are in force
    other_lines: tuple[tuple[int, int], ...]  # spans of #include, #if ..., and untaken branches

    def error(self, at: Token | int, message: str) -> KernelsError:
        line = at if isinstance(at, int) else at.line
        return KernelsError(f"{self.name}:{line}: {message}")


def _raw_tokens(name: str, text: str) -> tuple[list[Token], list[tuple[int, int, int]]]:
    """Tokens, and (start, end, line) of every preprocessor line (continuation lines joined)."""
    tokens: list[Token] = []
    directives: list[tuple[int, int, int]] = []
    at, line, fresh = 0, 1, True  # fresh: nothing but blanks and comments on this line so far
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or (match.lastgroup == "punct" and text.startswith("/*", at)):
            what = "unterminated comment" if text.startswith("/*", at) else "unreadable character"
            raise KernelsError(f"{name}:{line}: {what} {text[at : at + 12]!r}")
        kind, word = match.lastgroup or "", match.group()
        if kind == "delimiter":
            kind = "string"
        if kind == "punct" and word == "#" and fresh:
            end = _directive_end(text, at)
            directives.append((at, end, line))
            line += text.count("\n", at, end)
            at = end
            continue
        if kind not in ("space", "newline", "comment"):
            tokens.append(Token(kind, word, at, match.end(), line))
            fresh = False
        if kind == "newline":
            fresh = True
        line += word.count("\n")
        at = match.end()
    return tokens, directives


def _directive_end(text: str, at: int) -> int:
    """Where the preprocessor line that starts at `at` ends (its newline is not part of it)."""
    while at < len(text) and text[at] != "\n":
        if text.startswith("\\\n", at):
            at += 2
        elif text.startswith("/*", at):
            close = text.find("*/", at + 2)
            at = len(text) if close < 0 else close + 2
        elif text.startswith("//", at):
            while at < len(text) and text[at] != "\n":
                at += 2 if text.startswith("\\\n", at) else 1
        elif text[at] in "\"'":
            string = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'").match(text, at)
            at = string.end() if string else at + 1
        else:
            at += 1
    return at


def read(name: str, text: str) -> Source:
    """Cut `text` (with \\n line ends) into a Source. KernelsError with file:line if it cannot."""
    raw, directives = _raw_tokens(name, text)
    macros: dict[str, Macro] = {}
    defines: list[tuple[int, int]] = []
    dropped: list[tuple[int, int]] = []
    kept: list[Token] = []
    # one entry per open #if: [a branch was taken, this branch is taken, line]
    stack: list[list[int | bool]] = []
    dead_from = -1
    position = 0

    def live() -> bool:
        return all(bool(entry[1]) for entry in stack)

    for start, end, line in directives:
        while position < len(raw) and raw[position].start < start:
            if live():
                kept.append(raw[position])
            position += 1
        was_live = live()
        words, _ = _raw_tokens(name, " " + text[start + 1 : end])
        words = [
            replace(w, line=w.line + line - 1, start=w.start + start, end=w.end + start)
            for w in words
        ]
        verb = words[0].text if words else ""
        rest = words[1:]
        if verb in ("if", "ifdef", "ifndef"):
            taken = was_live and _condition(name, line, verb, rest, macros)
            stack.append([taken, taken, line])
        elif verb in ("elif", "else"):
            if not stack:
                raise KernelsError(f"{name}:{line}: #{verb} without #if")
            outer = all(bool(entry[1]) for entry in stack[:-1])
            entry = stack[-1]
            taken = (
                outer
                and not entry[0]
                and (verb == "else" or _condition(name, line, "if", rest, macros))
            )
            entry[0], entry[1] = bool(entry[0]) or taken, taken
        elif verb == "endif":
            if not stack:
                raise KernelsError(f"{name}:{line}: #endif without #if")
            stack.pop()
        elif was_live and verb == "define":
            macro = _define(name, text, rest, line)
            macros[macro.name] = macro
            defines.append((start, end))
        elif was_live and verb == "undef" and rest:
            macros.pop(rest[0].text, None)
            defines.append((start, end))
        elif was_live and verb == "error":
            raise KernelsError(f"{name}:{line}: {text[start:end].strip()}")
        if not (was_live and verb in ("define", "undef", "pragma", "line")):
            dropped.append((start, end))
        if was_live and not live():
            dead_from = end
        elif live() and not was_live and dead_from >= 0:
            dropped.append((dead_from, start))
            dead_from = -1
    if stack:
        raise KernelsError(f"{name}:{stack[-1][2]}: #if without #endif")
    kept.extend(raw[position:])
    return Source(name, text, tuple(kept), macros, tuple(defines), tuple(dropped))


def _define(name: str, text: str, words: Sequence[Token], line: int) -> Macro:
    if not words or words[0].kind != "name":
        raise KernelsError(f"{name}:{line}: #define without a name")
    head, body = words[0], list(words[1:])
    if body and body[0].text == "(" and body[0].start == head.end:
        close = next((i for i, word in enumerate(body) if word.text == ")"), None)
        if close is None:
            raise KernelsError(f"{name}:{line}: #define {head} lacks its ')'")
        parameters = tuple(w.text for w in body[1:close] if w.text != ",")
        return Macro(head.text, parameters, tuple(body[close + 1 :]), line)
    return Macro(head.text, None, tuple(body), line)


def _condition(
    name: str, line: int, verb: str, words: Sequence[Token], macros: Mapping[str, Macro]
) -> bool:
    from kernels.expression import Scope, evaluate_tokens  # it needs Token from here

    if verb != "if":
        if not words:
            raise KernelsError(f"{name}:{line}: #{verb} without a name")
        defined = words[0].text in macros or words[0].text in PREDEFINED
        return defined == (verb == "ifdef")
    plain: list[Token] = []
    i = 0
    while i < len(words):
        word = words[i]
        if word.text == "defined":
            bracket = i + 1 < len(words) and words[i + 1].text == "("
            at = i + (2 if bracket else 1)
            if at >= len(words):
                raise KernelsError(f"{name}:{line}: defined without a name")
            known = words[at].text in macros or words[at].text in PREDEFINED
            plain.append(replace(word, kind="number", text="1" if known else "0"))
            i = at + (2 if bracket else 1)
            continue
        plain.append(word)
        i += 1
    ready: list[Token] = []
    for word in expand(plain, macros, name):
        if word.kind != "name" or word.text in ("true", "false"):
            ready.append(word)
        elif word.text in PREDEFINED:
            ready.append(replace(word, kind="number", text=PREDEFINED[word.text].rstrip("L")))
        elif word.text.startswith("__"):
            raise KernelsError(f"{name}:{line}: #if asks for {word}, which is not known here")
        else:
            ready.append(replace(word, kind="number", text="0"))  # C: an unknown name counts as 0
    return bool(evaluate_tokens(ready, Scope(name)))


def expand(
    tokens: Sequence[Token],
    macros: Mapping[str, Macro],
    name: str,
    active: frozenset[str] = frozenset(),
) -> list[Token]:
    """`tokens` with macros replaced; each new token carries the line of its use."""
    out: list[Token] = []
    i = 0
    while i < len(tokens):
        word = tokens[i]
        macro = macros.get(word.text) if word.kind == "name" else None
        if macro is None or macro.name in active:
            out.append(word)
            i += 1
            continue
        body: list[Token] = [
            replace(b, line=word.line, start=word.start, end=word.end) for b in macro.body
        ]
        i += 1
        if macro.parameters is not None:
            if i >= len(tokens) or tokens[i].text != "(":
                out.append(word)
                continue
            close = matching(tokens, i, name)
            arguments = split_commas(tokens[i + 1 : close])
            if len(arguments) != len(macro.parameters) and macro.parameters[-1:] != ("...",):
                raise KernelsError(
                    f"{name}:{word.line}: macro {macro.name} takes {len(macro.parameters)} "
                    f"arguments (got {len(arguments)})"
                )
            given = dict(zip(macro.parameters, arguments, strict=False))
            if any(b.text in ("#", "##") for b in body):
                raise KernelsError(
                    f"{name}:{word.line}: macro {macro.name} pastes tokens (# or ##), "
                    "which is not understood; write the launch out"
                )
            filled: list[Token] = []
            for b in body:
                filled.extend(given.get(b.text, [b]) if b.kind == "name" else [b])
            body = filled
            i = close + 1
        out.extend(expand(body, macros, name, active | {macro.name}))
    return out


_CLOSES = {"(": ")", "[": "]", "{": "}", "<<<": ">>>"}


def matching(tokens: Sequence[Token], at: int, name: str) -> int:
    """Index of the bracket that closes the one at `at`."""
    stack: list[str] = []
    for i in range(at, len(tokens)):
        text = tokens[i].text
        if tokens[i].kind != "punct":
            continue
        if text in _CLOSES:
            stack.append(_CLOSES[text])
        elif text in (")", "]", "}", ">>>") and (stack[-1] == text or text != ">>>"):
            if stack[-1] != text:
                raise KernelsError(
                    f"{name}:{tokens[i].line}: found {text!r} where {stack[-1]!r} closes "
                    f"the bracket of line {tokens[at].line}"
                )
            stack.pop()
            if not stack:
                return i
    raise KernelsError(f"{name}:{tokens[at].line}: {tokens[at].text!r} is never closed")


def split_commas(tokens: Sequence[Token]) -> list[list[Token]]:
    """The comma-separated parts at bracket depth 0; none for no tokens."""
    if not tokens:
        return []
    parts: list[list[Token]] = [[]]
    depth = 0
    for word in tokens:
        if word.kind == "punct":
            if word.text in ("(", "[", "{"):
                depth += 1
            elif word.text in (")", "]", "}"):
                depth -= 1
            elif word.text == "," and depth == 0:
                parts.append([])
                continue
        parts[-1].append(word)
    return parts
