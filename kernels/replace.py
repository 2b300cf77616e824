"""Replaces one function of a kernels file by that of a small .cu file: how a repair is put in.

    file = replace_function(lift(), Path("repairs/softmax-nan.cu"), kernel="softmaxKernel")

The small file's last function takes the place of the one of the same name, and what stands before
it (functions that it needs) comes along. `#line` tells the compilers where each line is from, so
that a diagnostic names the file that it means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kernels.declarations import Item, Survey, survey
from kernels.errors import KernelsError
from kernels.lift import Kernel, KernelsFile
from kernels.tokens import read

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[^\n]*", re.M)
_LINE = re.compile(r'^#line (\d+) "((?:[^"\\\n]|\\.)*)"$', re.M)


def replace_function(file: KernelsFile, path: Path, kernel: str | None = None) -> KernelsFile:
    """`file` with one function of its device text replaced by the last function of `path`.

    kernel: where that is a kernel, the name that it has in `file`, if it is not the same.
    `path` and `sha256` stay those of `file`: they say what the user's file is.
    Raises KernelsError where the function is not in `file`, or is a kernel of other parameters.
    """
    text = _INCLUDE.sub("", path.read_text(encoding="utf-8"))
    found = survey(read(str(path), text))
    own = _functions(found)[-1]
    if kernel not in (None, own.name) and own.kind == "kernel":
        text = re.sub(rf"\b{own.name}\b", str(kernel), text)
        found = survey(read(str(path), text))
        own = _functions(found)[-1]
    known = survey(read(str(file.path), file.device_text))
    old = next((item for item in _functions(known) if item.name == own.name), None)
    if old is None:
        raise KernelsError(f"{file.path} has no function {own.name} for {path.name} to replace")
    kernels: Mapping[str, Kernel] = file.kernels
    if own.kind == "kernel":
        before, after = file.kernels[own.name], found.kernels[own.name]
        parameters = after.parameters(found)
        if [p.ctype for p in parameters] != [p.ctype for p in before.parameters]:
            raise KernelsError(
                f"{file.path}:{before.line}: {own.name} must take "
                f"({', '.join(p.ctype for p in parameters)}) for {path.name} to replace it "
                f"(got ({', '.join(p.ctype for p in before.parameters)}))"
            )
        changed = replace(before, text=text[after.start : after.end], line=after.line)
        kernels = {**file.kernels, own.name: changed}
        text = f'{text[: own.start]}extern "C" {text[own.start :]}'
    device_text = file.device_text
    start = min([old.start, *(token.start for token in old.linkage)])
    number, name = _place(device_text, old.end)
    device_text = (
        f"{device_text[:start].rstrip(' ')}\n"
        f'#line 1 "{_quoted(path)}"\n{text}\n'
        f'#line {number} "{name}"\n{device_text[old.end :]}'
    )
    return replace(file, device_text=device_text, kernels=kernels)


def _functions(found: Survey) -> list[Item]:
    """Kernels and device functions, in their order; not the tables among the device's variables."""
    return [
        item for item in found.items if item.kind in ("kernel", "device") and _is_function(item)
    ]


def _is_function(item: Item) -> bool:
    return item.tokens[-1].text == "}"


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def _place(text: str, at: int) -> tuple[int, str]:
    """The line number and (quoted) file name that the compiler has for offset `at` of `text`."""
    last = list(_LINE.finditer(text, 0, at))[-1]
    return int(last[1]) + text.count("\n", last.end() + 1, at), last[2]
