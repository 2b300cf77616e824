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
        unique = dict.fromkeys(found)
        return tuple(Diagnosis(" + ".join(f.names), _sentence(test, f)) for f in unique)


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


def _sentence(test: Test, finding: Finding) -> str:
    evidence = test.evidence
    where = f"; upstream {evidence.upstream}" if evidence.upstream else ""
    if finding.whole is not None:
        return f"{evidence.phase} {evidence.op}: {finding.whole}{where}"
    what = " with ".join((" and ".join(finding.phrases[:-1]), finding.phrases[-1]))
    what = what.removeprefix(" with ")
    elements = evidence.got.size
    nan = 0
    if not test.integral:
        nan = int(np.count_nonzero(torch.isnan(test.value).numpy()))
    if nan == elements:
        effect = f"gives all {nan:,} NaN"
    elif nan:
        effect = f"gives exactly these {nan:,} NaN and makes the other {elements - nan:,} possible"
    elif elements == 1:
        effect = "makes the element possible"
    else:
        effect = f"makes all {elements:,} elements possible"
    return f"{evidence.phase} {evidence.op}: {what.rstrip(',')} {effect}{where}"
