"""Where a report goes: standard output, or a file that is whole or not there at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness.errors import UsageError
from harness.report.format import in_encoding

if TYPE_CHECKING:
    from harness.result import Report

FORMATS: Final = ("text", "json")


@dataclass(frozen=True)
class Output:
    """How and where to report. Checked when made: UsageError if `path` can not be written.

    format: one of FORMATS; path: None for standard output; verbosity: -1 quiet, 0, 1 verbose.
    """

    format: str = "text"
    path: Path | None = None
    verbosity: int = 0

    def __post_init__(self) -> None:
        if self.path is not None:
            check_writable(self.path, "-o")

    def write(self, report: Report) -> None:
        """Write the report. With a path, standard output shows the culprits and the counts."""
        if self.path is None:
            if self.format == "json":
                write_stdout(self._plain(report))
            else:
                _print_text(report, self.verbosity)
            return
        write_whole(self.path, self._plain(report))
        _print_text(report, verbosity=-1)
        write_stdout(f"Wrote {self.path}\n")

    def write_either(self, as_text: Callable[[], str], as_json: Callable[[], str]) -> None:
        """Write another verb's report in the format that was asked for."""
        text = as_json() if self.format == "json" else as_text()
        if self.path is None:
            write_stdout(in_encoding(text, sys.stdout.encoding))
            return
        write_whole(self.path, text)
        write_stdout(f"Wrote {self.path}\n")

    def _plain(self, report: Report) -> str:
        if self.format == "json":
            from harness.report.json import as_json

            return as_json(report)
        from harness.report.text import as_text

        return as_text(report, self.verbosity)


def _print_text(report: Report, verbosity: int) -> None:
    """As wide and as colourful as a terminal allows; plain where standard output is none."""
    from harness.report.text import TextReport, as_text

    encoding = sys.stdout.encoding
    if sys.stdout.isatty() and encoding.lower().startswith("utf"):
        from rich.console import Console

        Console(highlight=False).print(TextReport(report, verbosity), crop=False)
    else:
        write_stdout(as_text(report, verbosity, encoding=encoding))


def write_stdout(text: str) -> None:
    """Write to standard output; a reader that has gone away (`| head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, where it would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_writable(path: Path, option: str) -> None:
    """Raise UsageError unless a file can be written at `path`; leaves no trace."""
    if path.is_dir():
        raise UsageError(f"{option} must name a file (got the folder {path})")
    try:
        if _is_special(path):
            with path.open("ab"):
                return
        # Root passes every permission check, so only trying tells (a read-only mount, /proc).
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"{option} can not write {path}: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, replacing it at once, so that no half report is ever seen.

    Raises UsageError if the disk refuses.
    """
    data = text.encode("utf-8", "backslashreplace")
    try:
        if _is_special(path):
            path.write_bytes(data)
            return
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data)
            os.replace(part, path.resolve())
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"-o can not write {path}: {error.strerror}") from error


def _is_special(path: Path) -> bool:
    """A device or a pipe, such as /dev/stdout: it must be written to, never replaced."""
    return path.exists() and not path.is_file()
