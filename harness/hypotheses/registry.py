"""The register of hypotheses: what may be wrong with an op, by axis, and how to add one.

A hypothesis changes one thing about an op's recipe. To add one, in the file of the op's family:

    @hypothesis("sum instead of mean", axis="total", ops=NORMS)
    def _sum(recipe: Norm, evidence: Evidence) -> Norm:
        \"\"\"the sum of squares where their mean belongs\"\"\"
        return replace(recipe, divisor=1.0)

Its docstring is the noun phrase of the sentence that the user reads; `{}` in it takes a label. A
change returns None where it does not apply, or pairs (label, recipe) where it comes in several
forms. Hypotheses of different axes may hold together ("adjacent pairing" with "plain frequencies").
To add an op: its base recipe under `@base`, which must be the right one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.hypotheses.evidence import Evidence
from harness.hypotheses.recipe import Recipe

Changed = Recipe | None | Iterable[tuple[str, Recipe]]
Change = Callable[[Any, Evidence], Changed]

_HYPOTHESES: dict[str, list[Hypothesis]] = {}
_BASES: dict[str, Callable[[Evidence], Recipe]] = {}


@dataclass(frozen=True)
class Hypothesis:
    """One thing that may be wrong. alone: not tried together with others (it is dear, or total)."""

    name: str
    says: str
    axis: str
    change: Change
    alone: bool = False

    def options(self, recipe: Recipe, evidence: Evidence) -> Iterator[tuple[str, Recipe]]:
        """(phrase, changed recipe) of each form in which it applies."""
        made = self.change(recipe, evidence)
        if made is None:
            return
        if isinstance(made, Recipe):
            yield self.says, made
            return
        for label, each in made:
            yield self.says.format(label), each


def hypothesis(
    name: str, *, axis: str, ops: Sequence[str], says: str | None = None, alone: bool = False
) -> Callable[[Change], Change]:
    """Register a change under `name` for `ops`; `says` stands in for a missing docstring."""

    def register(change: Change) -> Change:
        text = says or inspect.getdoc(change)
        if not text:
            raise ValueError(f"hypothesis {name!r} must say what it means; give it a docstring")
        for op in ops:
            known = _HYPOTHESES.setdefault(op, [])
            if any(each.name == name for each in known):
                raise ValueError(f"hypothesis {name!r} of {op} is registered twice")
            known.append(Hypothesis(name, " ".join(text.split()), axis, change, alone))
        return change

    return register


def base(*ops: str) -> Callable[[Callable[[Evidence], Recipe]], Callable[[Evidence], Recipe]]:
    """Register how to make the right recipe of `ops`."""

    def register(make: Callable[[Evidence], Recipe]) -> Callable[[Evidence], Recipe]:
        _BASES.update(dict.fromkeys(ops, make))
        return make

    return register


def base_recipe(evidence: Evidence) -> Recipe:
    """The right recipe of the evidence's op. Raises ValueError for an op that has none."""
    if evidence.op not in _BASES:
        raise ValueError(f"op must be one of {', '.join(_BASES)} (got {evidence.op!r})")
    return _BASES[evidence.op](evidence)


def hypotheses_of(op: str) -> tuple[Hypothesis, ...]:
    """The hypotheses of an op, in the order in which they are tried and listed."""
    return tuple(_HYPOTHESES.get(op, ()))


def ops() -> tuple[str, ...]:
    """The ops that have a base recipe."""
    return tuple(_BASES)


def names(op: str | None = None) -> tuple[str, ...]:
    """The names of all hypotheses, or of one op's, each once."""
    known = _HYPOTHESES.values() if op is None else (_HYPOTHESES.get(op, []),)
    return tuple(dict.fromkeys(each.name for some in known for each in some))
