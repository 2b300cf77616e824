"""Which lines of a kernels file the instructions of its object belong to, as addr2line tells.

An instruction may stem from a function of simt.hpp that was put into a kernel's statement: what
counts is the innermost place that is not a header of ours.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.lift import KernelsFile

_TOOLS = ("addr2line", "llvm-addr2line")
_MARK = re.compile(r'^#line (?P<line>\d+) "(?P<path>(?:[^"\\\n]|\\.)*)"$', re.M)


def find_tool() -> str | None:
    """The program that tells lines; None if there is none here."""
    return next(filter(None, map(shutil.which, _TOOLS)), None)


@dataclass(frozen=True)
class Place:
    """A line of a source file. `file` is None for the kernels file itself, else the path of what
    replaces a part of it."""

    line: int
    file: str | None = None

    def __str__(self) -> str:
        return f"line {self.line}" + (f" of {Path(self.file).name}" if self.file else "")


class Places:
    """The places of one object, each looked up once."""

    def __init__(self, library: Path, file: KernelsFile) -> None:
        self._library = library
        self._own = file.path.name
        marked = (mark["path"] for mark in _MARK.finditer(file.device_text))
        self._paths = {Path(path).name: re.sub(r"\\(.)", r"\1", path) for path in marked}
        self._known: dict[int, Place | None] = {}
        self._barriers = list(self._find_barriers(file.device_text))

    def of(self, offset: int) -> Place | None:
        """The place of the instruction so many bytes from where the object is loaded; None if it is
        none of the kernels', or no tool is there to tell."""
        return self.all_of([offset])[0]

    def all_of(self, offsets: Iterable[int]) -> list[Place | None]:
        wanted = list(offsets)
        fresh = sorted(set(wanted) - set(self._known))
        if fresh:
            self._known.update(dict.fromkeys(fresh))
            self._look_up(fresh)
        return [self._known[offset] for offset in wanted]

    def parted(self, a: Place | None, b: Place | None) -> bool:
        """Whether a barrier of the block is written between two places of one file."""
        if a is None or b is None or a.file != b.file:
            return False
        low, high = sorted((a.line, b.line))
        return any(at.file == a.file and low < at.line < high for at in self._barriers)

    def _find_barriers(self, text: str) -> Iterator[Place]:
        path, line = None, 0
        for row in text.split("\n"):
            mark = _MARK.match(row)
            if mark:
                path, line = mark["path"], int(mark["line"])
                continue
            if path is not None and "__syncthreads" in row:
                name = Path(path).name
                yield Place(line, None if name == self._own else self._paths[name])
            line += 1

    def _look_up(self, offsets: list[int]) -> None:
        tool = find_tool()
        if tool is None:
            return
        told = subprocess.run(
            [tool, "-a", "-i", "-e", str(self._library), *map(hex, offsets)],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        offset = None
        for row in told.splitlines():
            if row.startswith("0x"):
                offset = int(row, 16)
            elif offset is not None and self._known.get(offset) is None:
                self._known[offset] = self._place(row)

    def _place(self, row: str) -> Place | None:
        path, _, rest = row.rpartition(":")
        name = Path(path).name
        line = rest.split(" ")[0]
        if name not in self._paths or not line.isdigit() or int(line) == 0:
            return None
        return Place(int(line), None if name == self._own else self._paths[name])
