"""One op's lesson in the terminal: what it computes, both programs' text, and this run's numbers.

All of it is looked up: the port's lines and the reference's by `inspect`, the kernel in the kernels
file that ran. Which function an op is stands in battery_cases.py.
"""

from __future__ import annotations

import difflib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness.errors import UsageError
from harness.repairs import REPAIRS, apply_repairs, repair_path
from harness.report.format import counted, in_encoding, number, place
from harness.report.output import write_stdout
from harness.result import Report, Result
from harness.taps import PREFILL, TAPS

if TYPE_CHECKING:
    from kernels.lift import KernelsFile

_GAP: Final = " | "
_PLAIN_WIDTH: Final = 110


def check_op(op: str) -> None:
    """Raise UsageError unless this op has a lesson; control flow has none."""
    ops = dict.fromkeys(op for taps in TAPS.values() for op in taps)
    if op in ops:
        return
    near = difflib.get_close_matches(op, ops, n=1, cutoff=0.4)
    advice = f"did you mean {near[0]!r}?" if near else f"the ops are {', '.join(ops)}"
    raise UsageError(f"--explain must name an op (got {op!r}); {advice}")


def explain(op: str, report: Report, kernels: KernelsFile, width: int) -> str:
    """The lesson, `width` columns wide. `kernels`: the file that ran, repairs included."""
    lines = [f"--- {op} ---", ""]
    lines += textwrap.wrap(_what(op), min(width, 100))
    phases = [phase for phase in TAPS if op in TAPS[phase]]
    ran = [phase for phase in phases if any(row.phase == phase for row in report.results)]
    alone = False
    reference = ["reference (reference/ops.py)", "", *reference_text(op).splitlines()]
    for phase in ran or phases:
        own = [f"port ({phase}; upstream {TAPS[phase][op].upstream})", ""]
        own += engine_text(phase, op, kernels, report.repairs).splitlines()
        column = max(map(len, own))
        fits = column + len(_GAP) + max(map(len, reference)) <= width
        lines += ["", *(_beside(own, reference, column) if fits else own)]
        alone = alone or not fits
    lines += ["", *reference] if alone else []
    lines += ["", "this run:", *_numbers([row for row in report.results if row.op == op])]
    return "\n".join(lines) + "\n"


def print_lesson(op: str, report: Report, path: Path | None) -> None:
    """Print the lesson after a report on the kernels file at `path` (None: our own)."""
    from kernels.lift import lift

    kernels = apply_repairs(lift(path), report.repairs)
    width = shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns
    text = "\n" + explain(op, report, kernels, width)
    write_stdout(in_encoding(text, sys.stdout.encoding))


def _what(op: str) -> str:
    """The first paragraph of the reference op's docstring."""
    return (inspect.getdoc(_function(op)) or "").split("\n\n")[0].replace("\n", " ")


def _function(op: str) -> object:
    from harness.battery_cases import REFERENCE

    return REFERENCE[op]


def reference_text(op: str) -> str:
    """The reference op's source."""
    return inspect.getsource(_function(op))  # type: ignore[arg-type]


def engine_text(phase: str, op: str, kernels: KernelsFile, repairs: Sequence[str] = ()) -> str:
    """The port's lines of an op, and the kernel that they launch, or the repairs of it."""
    from port import main

    whole = main.prefill if phase == PREFILL else main.decode_step
    lines = inspect.getsource(whole).splitlines()
    start = next(i for i, line in enumerate(lines) if re.search(rf'in op\(.*"{op}"', line))
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines) and (len(lines[end]) - len(lines[end].lstrip()) > indent):
        end += 1
    while lines[start - 1].lstrip().startswith("#"):
        start -= 1
    block = textwrap.dedent("\n".join(lines[start:end]))
    own = [REPAIRS[name] for name in repairs if (phase, op) in REPAIRS[name].ops]
    files = dict.fromkeys(file for repair in own for file in repair.files)
    calls = () if files else dict.fromkeys(re.findall(r"\bcall\.(\w+)\(", block))
    parts = [block, *(repair_path(file).read_text(encoding="utf-8").strip() for file in files)]
    parts += [_kernel_text(kernels, _camel(call)) for call in calls]
    if re.search(r"\bargmax\(", block):
        parts.append(inspect.getsource(main.argmax))
    return "\n\n".join(parts)


def _kernel_text(kernels: KernelsFile, host_call: str) -> str:
    """The kernel that a host call launches, with the comment above it."""
    text = kernels.kernels[kernels.host_calls[host_call].kernel].text
    at = kernels.text.find(text)
    above = kernels.text[:at].splitlines() if at > 0 else []
    comment: list[str] = []
    while above and above[-1].startswith("//"):
        comment.insert(0, above.pop())
    return "\n".join([*comment, text])


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _beside(left: Sequence[str], right: Sequence[str], column: int) -> Iterator[str]:
    """Two columns, the left one `column` wide."""
    for one, two in zip_longest(left, right, fillvalue=""):
        yield f"{one:{column}}{_GAP}{two}".rstrip()


def _numbers(rows: Sequence[Result]) -> Iterator[str]:
    if not rows:
        yield "  not compared; add --op, or --layer all"
    for row in rows:
        where = [row.phase, *([f"step {row.step}"] if row.step is not None else [])]
        where += [f"layer {row.layer}"] if row.layer is not None else []
        text = f"  {', '.join(where)}, {row.input}: {row.verdict}"
        if row.elements is not None:
            text += f", {counted(row.impossible or 0)} of {counted(row.elements)} impossible"
        if row.max_ulp is not None:
            text += f", at most {counted(row.max_ulp)} bf16 steps off"
        if row.worst is not None and row.impossible:
            text += (
                f", worst at {place(row.worst.index)}: got {number(row.worst.got)}, "
                f"want {number(row.worst.want)}"
            )
        yield text
        for each in row.diagnosis:
            yield f"    {each.sentence}"
