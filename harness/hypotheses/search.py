"""The search for explanations: single changes first, then pairs, then (where cheap) threes.

It stops at the smallest number of changes that explains every element, and lists all explanations
of that size. Fits without a list (fits.py) come where no listed change explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from harness.hypotheses import fits
from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe, Test
from harness.hypotheses.registry import Hypothesis, base_recipe, hypotheses_of
from harness.result import Diagnosis

_DEPTH = {"q_rope": 3, "k_rope": 3, "mask": 3}  # elsewhere 2: each further change is dearer
_SHOWN = 3  # further forms of a hypothesis that a sentence spells out
_DEEP = frozenset(  # axes of which three may be wrong together
    ("pairing", "frequencies", "position", "rotation", "hidden", "row", "address")
)


@dataclass(frozen=True)
class Finding:
    """Changes that explain every element together, and their phrases; or a whole statement."""

    names: tuple[str, ...]
    phrases: tuple[str, ...]
    whole: str | None = None


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """All explanations of a failing op that need the fewest changes; empty if none is known.

    Raises ValueError for an op without a base recipe (only control flow has none).
    """
    with _one_thread():
        test = Test(evidence)
        if not test.failing.numel():
            return ()
        found = _fitted(fits.plain(test)) + _search(test, 1)
        found = found or _fitted(fits.of_one_number(test))
        for size in range(2, _DEPTH.get(evidence.op, 2) + 1):
            found = found or _search(test, size)
        found = found or _fitted(fits.of_many_numbers(test))
        forms: dict[str, list[Finding]] = {}
        for finding in dict.fromkeys(found):
            forms.setdefault(" + ".join(finding.names), []).append(finding)
        return tuple(Diagnosis(name, _sentence(test, some)) for name, some in forms.items())


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on one thread: most tensors here are so small that waking others costs more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fitted(found: Iterable[fits.Fit]) -> list[Finding]:
    return [Finding((fit.name,), (fit.says,), fit.whole) for fit in found]


def _search(test: Test, size: int) -> list[Finding]:
    """The combinations of exactly `size` changes, of different axes, that explain everything."""
    recipe = base_recipe(test.evidence)
    known = hypotheses_of(test.evidence.op)
    if size > 1:
        known = tuple(each for each in known if not each.alone)
    if size > 2:
        known = tuple(each for each in known if each.axis in _DEEP)
    return [
        Finding(names, phrases)
        for names, phrases, made in _combinations(recipe, test.evidence, known, size)
        if test.explains(made)
    ]


def _combinations(
    recipe: Recipe, evidence: Evidence, known: tuple[Hypothesis, ...], size: int
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Recipe]]:
    if size == 0:
        yield (), (), recipe
        return
    for i, each in enumerate(known):
        rest = tuple(other for other in known[i + 1 :] if other.axis != each.axis)
        for phrase, changed in each.options(recipe, evidence):
            for names, phrases, made in _combinations(changed, evidence, rest, size - 1):
                yield (each.name, *names), (phrase, *phrases), made


def _sentence(test: Test, forms: list[Finding]) -> str:
    """One statement for all forms in which a hypothesis explains: the first, then the rest."""
    evidence, first = test.evidence, forms[0]
    where = f"; upstream {evidence.upstream}" if evidence.upstream else ""
    start = f"{evidence.phase} {evidence.op}: "
    if first.whole is not None:
        return f"{start}{first.whole}{where}"
    others = [_joined(finding) for finding in forms[1:]]
    so_do = f" (so do {'; '.join(others[:_SHOWN])}" if others else ""
    if len(others) > _SHOWN:
        so_do += f"; and {len(others) - _SHOWN} more forms of this"
    so_do += ")" if others else ""
    return f"{start}{_joined(first)} {_effect(test)}{so_do}{where}"


def _joined(finding: Finding) -> str:
    """Such as "adjacent pairing with plain frequencies and a position one too far"."""
    first, *rest = (phrase.rstrip(",") for phrase in finding.phrases)
    return f"{first} with {' and '.join(rest)}" if rest else finding.phrases[0].rstrip(",")


def _effect(test: Test) -> str:
    elements = test.evidence.got.size
    nan = 0 if test.integral else int(np.count_nonzero(torch.isnan(test.value).numpy()))
    if nan == elements:
        return f"gives NaN in all {nan:,} elements"
    if nan:
        return f"gives exactly these {nan:,} NaN and makes the other {elements - nan:,} possible"
    if elements == 1:
        return "makes the element possible"
    return f"makes all {elements:,} elements possible"
