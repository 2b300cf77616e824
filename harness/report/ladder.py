"""The ladder as text and as JSON: a rung is what was repaired, what fails next, and the tokens."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from harness.report.findings import tokens_lines
from harness.report.format import seconds
from harness.report.json import plain
from harness.result import Culprit

if TYPE_CHECKING:
    from harness.ladder import LadderReport, Rung

_WIDTH = 110


def as_json(report: LadderReport) -> str:
    """The report as a JSON object, a rung a line."""
    lines = []
    for each in fields(report):
        value = plain(getattr(report, each.name))
        block = json.dumps(value, allow_nan=False)
        if each.name == "rungs" and isinstance(value, list):
            block = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        lines.append(f"{json.dumps(each.name)}: {block}")
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def as_text(report: LadderReport, verbosity: int = 0) -> str:
    """The report for a reader. verbosity: -1 leaves the tokens out, 1 shows all of them."""
    return "\n".join(_lines(report, verbosity)) + "\n"


def _lines(report: LadderReport, verbosity: int) -> Iterator[str]:
    model = report.model
    weights = f"{model.kind} seed {model.seed}" if model.path is None else model.path
    yield report.command
    yield (
        f"device {report.device}, model {weights} ({model.layers} layers), "
        f"kernels {report.kernels.path} ({report.kernels.sha256[:12]}), ops of layer {report.layer}"
    )
    for number, rung in enumerate(report.rungs):
        yield ""
        yield from _rung(number, rung, verbosity)
    yield ""
    yield _summary(report)


def _rung(number: int, rung: Rung, verbosity: int) -> Iterator[str]:
    title = f"rung {number}: {' + '.join(rung.repairs) or 'no repairs'}"
    if rung.tried_for is not None:
        op = f"{rung.tried_for.phase} {rung.tried_for.op}"
        title += f" - {op} {'passes' if rung.passes else 'still fails'}"
        title += ", kept" if rung.kept else ", not kept"
    yield f"{title} ({seconds(rung.seconds)}, exit code {rung.exit_code})"
    if rung.culprit is None:
        yield "   nothing fails"
    else:
        upstream = f" ({rung.upstream})" if rung.upstream else ""
        yield f"   {_culprit(rung.culprit)}{upstream}"
        reasons = [each.sentence for each in rung.diagnosis] or ["no known hypothesis"]
        for reason in reasons:
            yield from _wrapped(f"why: {reason}")
    lines = tokens_lines(rung.tokens, every=verbosity > 0)
    yield f"   {next(lines)}"
    if verbosity >= 0:
        yield from (f"   {line}" for line in lines)


def _culprit(culprit: Culprit) -> str:
    words = f"first to fail: {culprit.phase} {culprit.op}"
    if culprit.step is not None:
        words += f", step {culprit.step}"
    if culprit.layer is not None:
        words += f", layer {culprit.layer}"
    reasons = f" - {' or '.join(culprit.hypotheses)}" if culprit.hypotheses else ""
    return f"{words}: {culprit.verdict}{reasons}"


def _summary(report: LadderReport) -> str:
    top = [rung for rung in report.rungs if rung.kept][-1]
    total = sum(map(len, top.tokens.ideal))
    repairs = " + ".join(report.repairs) or "no repairs"
    if report.remaining is None:
        end = f"with {repairs} nothing fails"
    else:
        op = f"{report.remaining.phase} {report.remaining.op}"
        end = f"with {repairs} no repair makes {op} pass"
    return (
        f"{len(report.rungs)} rungs: {end}; {top.tokens.agree} of {total} tokens are the ideal's; "
        f"{seconds(report.seconds)}"
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="   ", subsequent_indent="     ")
