"""The command that runs one culprit alone, made from the command that found it."""

from __future__ import annotations

import re
import shlex
from typing import Final

from harness.result import Culprit
from harness.taps import OPS

# Options of `compare` that say where to look or how to report: the new command sets its own.
_WITH_VALUE: Final = frozenset(
    {"--layer", "--phase", "--op", "--steps", "--format", "-o", "--explain"}
)
_FLAGS: Final = frozenset({"--fail-fast", "-v", "-q"})


def reproduce(command: str, culprit: Culprit) -> str:
    """`command`, narrowed to the culprit's layer, phase, step and op, reporting as text."""
    words = shlex.split(command)
    try:
        start = words.index("compare") + 1
    except ValueError:
        raise ValueError(f"command must be one of compare (got {command!r})") from None
    kept, layer = _split(words[start:])
    narrowed = ["--layer", str(culprit.layer)] if culprit.layer is not None else layer
    narrowed += ["--phase", culprit.phase]
    if culprit.step:
        narrowed += ["--steps", str(culprit.step + 1)]
    narrowed += ["--op", _pattern(culprit.op)]
    return shlex.join([*words[:start], *narrowed, *kept])


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words to keep, and those of --layer."""
    kept: list[str] = []
    layer: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in _WITH_VALUE:
            value = value if equals else next(rest, "")
            if name == "--layer":
                layer = ["--layer", value]
        elif not (word in _FLAGS or re.fullmatch(r"-[vq]+|-o.+", word)):
            kept.append(word)
    return kept, layer


def _pattern(op: str) -> str:
    """The shortest --op that selects this op and no other."""
    return op if sum(op in name for name in OPS) == 1 else f"^{op}$"
