"""The claims as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from harness.report.format import number, seconds
from harness.report.json import plain

if TYPE_CHECKING:
    from harness.claims import Claim, ClaimsReport

_WIDTH = 110


def as_json(report: ClaimsReport) -> str:
    """The report as a JSON object, a claim or an angle a line."""
    lines = []
    for each in fields(report):
        value = plain(getattr(report, each.name))
        block = json.dumps(value, allow_nan=False)
        if each.name in ("claims", "angles") and isinstance(value, list):
            block = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        lines.append(f"{json.dumps(each.name)}: {block}")
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def as_text(report: ClaimsReport, verbosity: int = 0) -> str:
    """The report for a reader. verbosity: -1 gives a line a claim and no angles."""
    return "\n".join(_lines(report, verbosity)) + "\n"


def _lines(report: ClaimsReport, verbosity: int) -> Iterator[str]:
    if verbosity < 0:
        yield from (f"{claim.name}: {claim.verdict}" for claim in report.claims)
        return
    repairs = f"repairs: {', '.join(report.repairs)}" if report.repairs else "no repairs"
    yield report.command
    yield (
        f"device {report.device}, kernels {report.kernels.path} ({report.kernels.sha256[:12]}), "
        f"{repairs}"
    )
    for claim in report.claims:
        yield ""
        yield from _claim(claim)
        if claim.name == "rope-angles":
            yield ""
            yield from _angles(report)
    yield ""
    verdicts = [claim.verdict for claim in report.claims]
    counts = ", ".join(f"{v} {verdicts.count(v)}" for v in dict.fromkeys(verdicts))
    yield f"{len(verdicts)} claims: {counts}; {seconds(report.seconds)}"


def _claim(claim: Claim) -> Iterator[str]:
    yield f"{claim.name}: {claim.verdict}"
    for label, text in (("claim", claim.says), ("ran", claim.ran), ("found", claim.found)):
        yield from textwrap.wrap(
            f"{label + ':':6} {text}", _WIDTH, initial_indent="   ", subsequent_indent=" " * 10
        )
    for label, value in claim.figures.items():
        yield f"          {label}: {value if isinstance(value, str) else number(value)}"


def _angles(report: ClaimsReport) -> Iterator[str]:
    """A line an index: radians a position, and the angle at the position, in (-pi, pi]."""
    yield (f"   {'':5}  {'radians a position':^35}  {f'angle at {report.position}':^23}")
    yield (
        f"   {'index':>5}  {'Llama 3':>11} {'prefill':>11} {'decode':>11}  "
        f"{'prefill':>11} {'decode':>11}  {'difference':>10} {'allowed':>9}"
    )
    for row in report.angles:
        yield (
            f"   {row.index:5}  {row.llama3:11.4e} {row.prefill_frequency:11.4e} "
            f"{row.decode_frequency:11.4e}  {row.prefill_angle:11.6f} {row.decode_angle:11.6f}  "
            f"{row.difference:10.2e} {row.allowed:9.1e}  "
            f"{'agree' if row.agrees else 'differ'}"
        )
