"""A report as text for a terminal or a log: the table, then what failed and why.

`TextReport` is the report as a rich renderable; `as_text` is the same without colours. Both are
functions of the report alone. To add a column: one `Column` in `_COLUMNS`.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from harness.report.findings import findings, notes_lines, tokens_lines
from harness.report.format import counted, in_encoding, number, place, seconds
from harness.report.reproduce import reproduce
from harness.report.rows import Row, folded_rows, plain_rows, ranges
from harness.result import VERDICTS, Report, Worst

QUIET: Final = -1
NORMAL: Final = 0
VERBOSE: Final = 1

# Characters that a line of a plain report may have; for -v enough for every figure.
PLAIN_WIDTH: Final = {QUIET: 140, NORMAL: 140, VERBOSE: 300}
_PROSE_WIDTH: Final = 110

_STYLES: Final = {"exact": "green", "rounding": "green", "equivalent": "cyan"}
_FAILURE_STYLE: Final = "bold red"


@dataclass(frozen=True)
class Column:
    """A column of the table.

    keep: columns are chosen from the highest `keep` down while they fit; ALWAYS is always there.
    verbose: only with -v.
    """

    header: str
    cell: Callable[[Row], str]
    keep: int
    justify: Literal["left", "right"] = "right"
    verbose: bool = False


ALWAYS: Final = 99


def _sum(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        values = [v for r in row.results if (v := getattr(r, name)) is not None]
        return counted(sum(values)) if values else ""

    return cell


def _greatest(name: str) -> Callable[[Row], str]:
    """The worst value in the row: NaN, else the greatest."""

    def cell(row: Row) -> str:
        values = [v for r in row.results if (v := getattr(r, name)) is not None]
        if not values:
            return ""
        nan = next((v for v in values if math.isnan(v)), None)
        return number(nan if nan is not None else max(values))

    return cell


def _least_cosine(row: Row) -> str:
    values = [r.cosine for r in row.results if r.cosine is not None]
    # Near 1, where all of them are, four digits tell nothing.
    return f"{min(values, key=lambda v: (not math.isnan(v), v)):.8g}" if values else ""


def _worst(part: Callable[[Worst], str]) -> Callable[[Row], str]:
    """A part of the worst element. Among right elements the worst is of no interest."""

    def cell(row: Row) -> str:
        right = row.verdict in ("exact", "rounding")
        return part(row.first.worst) if row.first.worst and (row.detailed or not right) else ""

    return cell


def _input(row: Row) -> str:
    battery = row.battery_inputs
    if row.model_results:
        return f"model +{len(battery)}" if battery else "model"
    return battery[0] if len(battery) == 1 else f"{len(battery)} battery"


_COLUMNS: Final = (
    Column("", lambda row: f"#{row.culprit}" if row.culprit else "", ALWAYS, "left"),
    Column("phase", lambda row: row.first.phase, ALWAYS, "left"),
    Column("step", lambda row: ranges(r.step for r in row.results), ALWAYS),
    Column("slot", lambda row: ranges([row.slot]), ALWAYS),
    Column("layer", lambda row: ranges(r.layer for r in row.results), ALWAYS),
    Column("op", lambda row: row.first.op, ALWAYS, "left"),
    Column("input", _input, ALWAYS, "left"),
    Column("verdict", lambda row: row.verdict, ALWAYS, "left"),
    Column("elements", _sum("elements"), 40),
    Column("impossible", _sum("impossible"), 90),
    Column("improbable", _sum("improbable"), 30),
    Column("worst at", _worst(lambda w: place(w.index)), 70, "left"),
    Column("got", _worst(lambda w: number(w.got)), 69),
    Column("want", _worst(lambda w: number(w.want)), 68),
    Column("allowed", _worst(lambda w: "..".join(map(number, w.allowed))), 20, "left"),
    Column("max ulp", _greatest("max_ulp"), 60),
    Column("passes at", _greatest("passing_tolerance"), 65),
    Column("max abs", _greatest("max_abs"), 10, verbose=True),
    Column("rel L2", _greatest("rel_l2"), 67, verbose=True),
    Column("cosine", _least_cosine, 15, verbose=True),
    Column("noise floor", _greatest("noise_floor"), 64, verbose=True),
    Column("x floor", _greatest("propagated"), 80),
    Column("upstream", lambda row: row.first.upstream or "", 50, "left"),
)
_GAP: Final = 2  # spaces between columns


@dataclass(frozen=True)
class TextReport:
    """A report that renders itself as wide as the console is.

    verbosity: QUIET (culprits and counts), NORMAL, or VERBOSE (every result and every figure).
    """

    report: Report
    verbosity: int = NORMAL

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        verbose = self.verbosity == VERBOSE
        width = options.max_width
        report = self.report
        if self.verbosity > QUIET:
            yield from _heading(report)
            yield from self._table(width)
        prose = min(width, _PROSE_WIDTH)
        for finding in findings(report):
            yield _line(finding.title, _FAILURE_STYLE)
            if self.verbosity == QUIET:
                continue
            for paragraph in finding.paragraphs:
                yield from _wrapped(paragraph, prose)
            yield Text()
        if self.verbosity > QUIET and (notes := list(notes_lines(report, verbose))):
            for note in notes:
                yield from _wrapped(note, prose)
            yield Text()
        if self.verbosity > QUIET and report.tokens is not None:
            for line in tokens_lines(report.tokens, verbose):
                yield _line(line)
            yield Text()
        if self.verbosity > QUIET and report.first_culprit is not None:
            yield _line("To run #1 alone:")
            yield _line("  " + reproduce(report.command, report.first_culprit), "bold")
            yield Text()
        yield _line(counts_line(report), _FAILURE_STYLE if not report else "bold green")

    def _table(self, width: int) -> Iterator[Table | Text]:
        verbose = self.verbosity == VERBOSE
        rows = plain_rows(self.report) if verbose else folded_rows(self.report)
        columns, dropped = _fitting([c for c in _COLUMNS if verbose or not c.verbose], rows, width)
        # The box itself puts one space between columns.
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        for column, needed in columns.items():
            table.add_column(column.header, justify=column.justify, no_wrap=True, min_width=needed)
        for row in rows:
            style = _STYLES.get(row.verdict, "") if row.culprit is None else _FAILURE_STYLE
            cells = [
                Text(c.cell(row), style if c.header in ("", "op", "verdict") else "")
                for c in columns
            ]
            table.add_row(*cells)
        yield table
        hints = []
        if not verbose and any(row.model_results and row.battery_inputs for row in rows):
            hints.append("+N: on so many inputs of the battery too.")
        if dropped:
            hints.append(f"Too narrow for: {', '.join(column.header for column in dropped)}.")
        for line in textwrap.wrap(" ".join(hints), width):
            yield _line(line, "dim")
        yield Text()


def _fitting(
    columns: Sequence[Column], rows: Sequence[Row], width: int
) -> tuple[dict[Column, int], list[Column]]:
    """The columns that say something and fit, with their widths, and those that do not fit."""
    widths = {}
    for column in columns:
        widest = max((len(column.cell(row)) for row in rows), default=0)
        if widest:
            widths[column] = max(widest, len(column.header))
    chosen = set()
    left = width
    for column in sorted(widths, key=lambda c: -c.keep):
        if widths[column] + _GAP <= left or column.keep == ALWAYS:
            chosen.add(column)
            left -= widths[column] + _GAP
    return (
        {column: needed for column, needed in widths.items() if column in chosen},
        [column for column in widths if column not in chosen],
    )


def _heading(report: Report) -> Iterator[Text]:
    yield _line(report.command, "bold")
    model = report.model
    weights = f"{model.kind} seed {model.seed}" if model.path is None else model.path
    facts = [
        f"device {report.device}",
        f"model {weights} ({model.layers} layers)",
        f"kernels {report.kernels.path} ({report.kernels.sha256[:12]})",
        f"{report.mode} mode",
        f"repairs: {', '.join(report.repairs)}" if report.repairs else "no repairs",
    ]
    yield _line(", ".join(facts))
    yield Text()


def counts_line(report: Report) -> str:
    """How many results had which verdict, how many ops failed, and how long it took."""
    total = sum(report.counts.values())
    if not total:
        return "Nothing was run."
    shown = [f"{counted(report.counts[v])} {v}" for v in VERDICTS if report.counts[v]]
    ops = len({(r.phase, r.op) for r in report.results})
    failed = f"{len(report.culprits)} of {ops} ops failed" if report.culprits else "nothing failed"
    checks = f"{counted(total)} check{'s' if total > 1 else ''}"
    return f"{checks}: {', '.join(shown)}; {failed}; {seconds(report.seconds)}"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ignore")


def _wrapped(paragraph: str, width: int) -> Iterator[Text]:
    lines = textwrap.wrap(
        paragraph,
        width,
        initial_indent="   ",
        subsequent_indent="     ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        yield _line(line)


def as_text(
    report: Report, verbosity: int = NORMAL, width: int | None = None, encoding: str = "utf-8"
) -> str:
    """The report without colours, `width` columns wide, in characters that `encoding` has."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width or PLAIN_WIDTH[verbosity],
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    console.print(TextReport(report, verbosity), crop=False)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    return in_encoding("\n".join(lines) + "\n", encoding)
