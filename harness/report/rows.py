"""The rows of the table: results, folded where telling them apart would tell the reader nothing.

Results of one op fold into one row where their verdicts agree, over layers, steps and battery
inputs. Every result is in exactly one row, and a row stands where its first result ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from harness.result import MODEL_INPUT, Report, Result


@dataclass(frozen=True)
class Row:
    """Results of one op that share a verdict (or are `exact` and `rounding`)."""

    results: tuple[Result, ...]
    culprit: int | None  # the number of the culprit that this row belongs to, from 1
    slot: int | None = None  # the one slot that it tells of; None where it tells of all
    detailed: bool = False  # show every figure, also where nothing is wrong

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def verdict(self) -> str:
        """Of all its results: `exact` only if every one is."""
        verdicts = {result.verdict for result in self.results}
        return "rounding" if len(verdicts) > 1 else self.first.verdict

    @property
    def model_results(self) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.input == MODEL_INPUT)

    @property
    def battery_inputs(self) -> tuple[str, ...]:
        """Names of the battery's inputs in this row, in order."""
        names = (r.input for r in self.results if r.input != MODEL_INPUT)
        return tuple(dict.fromkeys(names))


def plain_rows(report: Report) -> list[Row]:
    """One row a result, with every figure."""
    number = _culprit_number(report)
    return [Row((r,), number(r), r.slot, detailed=True) for r in report.results]


def folded_rows(report: Report) -> list[Row]:
    """As few rows as tell the whole story.

    Failures fold only with failures of the same verdict and the same hypotheses; battery inputs
    that pass fold into the op's first row that passes.
    """
    number = _culprit_number(report)
    # Where a slot does not pass, the others must be told apart from it.
    apart = {_place(r) for r in report.results if not _passes(r)}
    groups: dict[tuple[Hashable, int | None], list[Result]] = {}
    for result in report.results:
        slot = result.slot if _place(result) in apart else None
        groups.setdefault((_fold_key(result), slot), []).append(result)
    rows = [
        Row(tuple(part), number(part[0]), slot)
        for (_, slot), group in groups.items()
        for part in _rectangles(group)
    ]
    position = {id(result): place for place, result in enumerate(report.results)}
    return sorted(rows, key=lambda row: position[id(row.first)])


def _culprit_number(report: Report) -> Callable[[Result], int | None]:
    numbers = {(c.phase, c.op): number for number, c in enumerate(report.culprits, 1)}
    return lambda r: numbers[r.phase, r.op] if r.failed(report.strict) else None


def _passes(result: Result) -> bool:
    return result.verdict in ("exact", "rounding")


def _place(result: Result) -> Hashable:
    return (result.phase, result.step, result.layer, result.op, result.input)


def _fold_key(result: Result) -> Hashable:
    if _passes(result):
        return (result.phase, result.op, "passes", _magnitude(result.propagated))
    on_model = result.input == MODEL_INPUT
    reasons = tuple(d.hypothesis for d in result.diagnosis)
    return (result.phase, result.op, result.verdict, on_model, reasons)


def _magnitude(ratio: float | None) -> Hashable:
    """The power of two nearest to a ratio: where errors run on, rows show how they grow."""
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return str(ratio)  # NaN does not equal itself, but its name does
    return round(math.log2(ratio))


def _rectangles(group: Sequence[Result]) -> list[list[Result]]:
    """The group, split so that each part covers every pair of its steps and its layers.

    "steps 0-3, layers 0-15" must not claim a place that another row has. Battery results go with
    the first part.
    """
    on_model = [r for r in group if r.input == MODEL_INPUT]
    battery = [r for r in group if r.input != MODEL_INPUT]
    by_step: dict[int | None, list[Result]] = {}
    for result in on_model:
        by_step.setdefault(result.step, []).append(result)
    by_layers: dict[tuple[int | None, ...], list[Result]] = {}
    for part in by_step.values():
        by_layers.setdefault(tuple(dict.fromkeys(r.layer for r in part)), []).extend(part)
    parts = list(by_layers.values()) or [[]]
    parts[0] = [*parts[0], *battery]
    return parts


def ranges(numbers: Iterable[int | None]) -> str:
    """Numbers as a reader writes them: 0-3,5. None counts as nothing."""
    runs: list[list[int]] = []
    for number in sorted({n for n in numbers if n is not None}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
