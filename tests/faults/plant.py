"""Plants a fault: one piece of text replaced by another, in the kernels or in the port's control
flow. The faults themselves are data beside this file; each comes from a public report.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import port.main
from kernels.lift import own_path


@dataclass(frozen=True)
class Edit:
    """`old` must stand exactly once in the text that is edited."""

    old: str
    new: str

    def apply(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(f"must stand once (stands {text.count(self.old)} times): {self.old!r}")
        return text.replace(self.old, self.new)


def plant_in_kernels(folder: Path, *edits: Edit, text: str | None = None) -> Path:
    """A copy of the project's kernels.cu (or of `text`) with the edits, in `folder`."""
    text = own_path().read_text() if text is None else text
    for edit in edits:
        text = edit.apply(text)
    path = folder / "kernels.cu"
    path.write_text(text)
    return path


def plant_in_port(
    patch: pytest.MonkeyPatch, function: str, *edits: Edit, module: ModuleType = port.main
) -> None:
    """Replace one function of `module` (port/main.py) by its own text with the edits."""
    text = inspect.getsource(getattr(module, function))
    for edit in edits:
        text = edit.apply(text)
    planted: dict[str, object] = {}
    # Its globals are the module's own, so that it calls, and is called by, the rest.
    exec(compile(text, f"<planted {function}>", "exec"), module.__dict__, planted)
    patch.setattr(module, function, planted[function])
