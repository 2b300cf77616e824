"""What failed and why, in sentences: one finding a culprit, and the tokens of a free run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.report.format import counted, number, place
from harness.report.rows import ranges
from harness.result import MODEL_INPUT, Culprit, Race, Report, Result, Stray, Tokens

# Verdicts on values, which a hypothesis could explain; the others say by themselves what happened.
_EXPLICABLE = frozenset({"systematic", "diverged", "poisoned", "unchanged"})
_MANY_NOTES = 6
_MANY_TOKENS = 16  # a slot's tokens on one line


@dataclass(frozen=True)
class Finding:
    """A culprit as a title and the paragraphs below it."""

    title: str
    paragraphs: tuple[str, ...]


def findings(report: Report) -> list[Finding]:
    """One finding a culprit, in execution order. A reason is told once and then referred to."""
    told: dict[str, int] = {}
    return [_finding(report, n, culprit, told) for n, culprit in enumerate(report.culprits, 1)]


def _finding(report: Report, rank: int, culprit: Culprit, told: dict[str, int]) -> Finding:
    rows = [
        r
        for r in report.results
        if (r.phase, r.op) == (culprit.phase, culprit.op) and r.failed(report.strict)
    ]
    first = rows[0]
    title = f"#{rank} {_where(culprit)}: {culprit.verdict}"
    if culprit.hypotheses:
        title += f" - {' or '.join(culprit.hypotheses)}"
    if first.upstream:
        title += f" ({first.upstream})"
    events: list[Stray | Race] = [*report.strays, *report.races]
    sentences = (e.sentence for e in events if (e.phase, e.op) == (culprit.phase, culprit.op))
    return Finding(
        title,
        (
            *_figures(first),
            *dict.fromkeys(sentences),
            *([f"Note: {first.note}"] if first.note else []),
            *_reasons(rank, culprit, rows, told),
            *_extent(rows),
        ),
    )


def _where(culprit: Culprit) -> str:
    words = f"{culprit.phase} {culprit.op}"
    if culprit.step is not None:
        words += f", step {culprit.step}"
    if culprit.layer is not None:
        words += f", layer {culprit.layer}"
    return words


def _figures(row: Result) -> Iterator[str]:
    if row.elements is None:
        return
    on = "" if row.input == MODEL_INPUT else f" on battery input {row.input}"
    if row.verdict == "systematic":
        yield (
            f"{counted(row.improbable or 0)} of {counted(row.elements)} elements{on} are farther "
            "off than rounding makes likely, though none is impossible by itself."
        )
    elif row.impossible:
        yield f"{counted(row.impossible)} of {counted(row.elements)} elements{on} are impossible."
    if row.first_nan is not None:
        yield f"The first NaN or infinity stands at {place(row.first_nan)}."
    if row.worst is not None:
        low, high = (number(bound) for bound in row.worst.allowed)
        allowed = f"only {low}" if low == high else f"{low} to {high}"
        text = (
            f"Worst at {place(row.worst.index)}: got {number(row.worst.got)}, "
            f"want {number(row.worst.want)}, allowed {allowed}."
        )
        if row.passing_tolerance is not None:
            text += (
                f" A tolerance of {number(row.passing_tolerance)} would pass it."
                if math.isfinite(row.passing_tolerance)
                else " No tolerance would pass it."
            )
        yield text


def _reasons(
    rank: int, culprit: Culprit, rows: Sequence[Result], told: dict[str, int]
) -> Iterator[str]:
    sentences = {d.hypothesis: d.sentence for r in reversed(rows) for d in r.diagnosis}
    for name in culprit.hypotheses:
        sentence = sentences[name]
        before = told.setdefault(sentence, rank)
        yield f"Why: {sentence}" if before == rank else f"Why: {name}, as in #{before}."
    if not culprit.hypotheses and culprit.verdict in _EXPLICABLE:
        yield "Why: no known hypothesis explains every element."


def _extent(rows: Sequence[Result]) -> Iterator[str]:
    """Where else the op failed, if anywhere."""
    model = [r for r in rows if r.input == MODEL_INPUT]
    battery = list(dict.fromkeys(r.input for r in rows if r.input != MODEL_INPUT))
    parts = []
    if len(model) > 1:
        layers, steps = ranges(r.layer for r in model), ranges(r.step for r in model)
        parts += [f"layers {layers}" if layers else "", f"steps {steps}" if steps else ""]
    if battery:
        only = "" if model else "only "
        parts.append(f"{only}battery inputs {', '.join(battery)}")
    if any(parts):
        yield f"Fails in: {'; '.join(p for p in parts if p)}."


def notes_lines(report: Report, every: bool) -> Iterator[str]:
    """The notes of rows that did not fail, each once: a harmless variant, say."""
    places: dict[tuple[str, str, str, str], list[int | None]] = {}
    for r in report.results:
        if r.note is not None and not r.failed(report.strict):
            places.setdefault((r.phase, r.op, r.verdict, r.note), []).append(r.layer)
    shown = len(places) if every else _MANY_NOTES
    for (phase, op, verdict, note), layers in list(places.items())[:shown]:
        where = f", layer {ranges(layers)}" if ranges(layers) else ""
        yield f"Note: {phase} {op}{where}: {verdict}, {note}"
    if len(places) > shown:
        yield f"{len(places) - shown} more notes; -v shows them."


def tokens_lines(tokens: Tokens, every: bool) -> Iterator[str]:
    """The tokens of each slot beside the ideal's, and each place where they differ."""
    total = sum(len(ids) for ids in tokens.ideal)
    yield f"Tokens: {tokens.agree} of {total} are the ideal's."
    for slot, (port, ideal) in enumerate(zip(tokens.port, tokens.ideal, strict=True)):
        yield f"  slot {slot}  port   {_some(port, every)}"
        yield f"          ideal  {_some(ideal, every)}"
    for flip in tokens.flips:
        kind = "a tie within rounding" if flip.kind == "tie_within_rounding" else "a flip"
        yield (
            f"  slot {flip.slot}, token {flip.index}: {flip.port} for {flip.ideal}, {kind} "
            f"(margin {number(flip.margin)}, error {number(flip.error)})"
        )


def _some(ids: Sequence[int], every: bool) -> str:
    shown = ids if every else ids[:_MANY_TOKENS]
    return " ".join(str(i) for i in shown) + (" ..." if len(shown) < len(ids) else "")
