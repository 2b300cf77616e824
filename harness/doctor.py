"""Say what this machine has, and what each missing piece would give.

The exit code is 0 if `compare` can run here on the CPU, 1 if a piece that it needs is missing.
A GPU is never needed: it runs the same kernels where they are meant to run, and faster.

example:
  python -m harness doctor
  python -m harness doctor --model ~/Llama-3.2-1B --format json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from harness import options
from harness.prompt import has_tokenizer
from harness.report.output import FORMATS, write_stdout

_GIB: Final = 2**30
_INSTALL: Final = "run make setup"
_CUDA_EXTRA: Final = "pip install -e '.[cuda]'"


@dataclass(frozen=True)
class Piece:
    """One thing that this machine has or lacks.

    found: what is there, with its version or size; None where it is missing.
    needed: whether `compare` on the CPU needs it. gives: what it is good for.
    remedy: how to get it, where it is missing.
    """

    name: str
    found: str | None
    needed: bool
    gives: str
    remedy: str


class _Missing(Exception):
    """A piece is not there; `str` tells why, where that is more than its absence."""


def _piece(name: str, look: Callable[[], str], needed: bool, gives: str, remedy: str) -> Piece:
    try:
        return Piece(name, look(), needed, gives, remedy)
    except _Missing as error:
        reason = [part for part in (str(error), remedy) if part]
        return Piece(name, None, needed, gives, "; ".join(reason))


def look(model: str = options.SYNTHETIC) -> list[Piece]:
    """Every piece, needed ones first. model: as --model, whose tokenizer is looked for."""
    return [*_needed(), *_optional(model), *_gpu()]


def can_compare(pieces: list[Piece]) -> bool:
    """Whether `compare` can run on the CPU of this machine."""
    return all(piece.found is not None for piece in pieces if piece.needed)


def _needed() -> Iterator[Piece]:
    yield _piece("Python", _python, True, "runs the harness", "install Python 3.11 or newer")
    yield _piece("PyTorch", lambda: _package("torch"), True, "the reference; GEMM", _INSTALL)
    yield _piece("NumPy", lambda: _package("numpy"), True, "memory of the engine", _INSTALL)
    yield _piece("safetensors", lambda: _package("safetensors"), True, "checkpoints", _INSTALL)
    yield _piece("rich", lambda: _package("rich"), True, "the report as text", _INSTALL)
    yield _piece("C++ compiler", _compiler, True, "runs the CUDA kernels on this CPU", "")
    yield _piece("compile cache", _cache, True, "kernels are compiled once", "free some disk space")


def _optional(model: str) -> Iterator[Piece]:
    yield _piece("cores, memory", _size, False, "more of both: faster, more layers at once", "")
    yield _piece("thread switch", _switch, False, "how fast kernels run on this CPU", "")
    yield _piece(
        "addr2line",
        _line_teller,
        False,
        "the lines of races and of illegal accesses",
        "install binutils",
    )
    yield _piece(
        "transformers",
        lambda: _package("transformers"),
        False,
        "--prompt TEXT, and a second opinion on the reference",
        _INSTALL,
    )
    yield _piece(
        "tokenizer",
        lambda: _tokenizer(model),
        False,
        "--prompt TEXT",
        "give a Hugging Face folder as --model",
    )
    yield _piece(
        "ziglang",
        lambda: _package("ziglang"),
        False,
        "a C++ compiler where the system has none",
        "pip install ziglang",
    )


def _gpu() -> Iterator[Piece]:
    yield _piece(
        "NVIDIA GPU",
        _devices,
        False,
        "--device cuda: the kernels where they are meant to run",
        "install the driver, 580 or newer",
    )
    cublas = "--device cuda: the GEMMs as the engine calls them"
    yield _piece("cuBLAS", lambda: _library("cublas"), False, cublas, _CUDA_EXTRA)
    yield _piece(
        "nvmath-python", lambda: _package("nvmath", "nvmath-python"), False, cublas, _CUDA_EXTRA
    )
    compiling = "--device cuda: compiles the kernels"
    yield _piece("NVRTC", _nvrtc, False, compiling, _CUDA_EXTRA)
    yield _piece("cuda_bf16.h", _bf16_header, False, compiling, _CUDA_EXTRA)


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _package(module: str, distribution: str | None = None) -> str:
    """The version of a package that can be imported; a broken one is missing, and says why."""
    name = distribution or module
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise _Missing from None
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise _Missing(f"{name} {version} can not be imported ({_one_line(error)})") from error
    return version


def _compiler() -> str:
    from kernels.compiler import find_compiler
    from kernels.errors import KernelsError

    try:
        command = find_compiler().command
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except KernelsError as error:
        raise _Missing(str(error)) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise _Missing(f"{shlex.join(command)} does not run: {_one_line(error)}") from error
    return f"{done.stdout.partition(chr(10))[0].strip()}: {shlex.join(command)}"


def _switch() -> str:
    """From one CUDA thread to the next at a barrier; a compilation, the first time."""
    from kernels.compiler import find_compiler
    from kernels.errors import KernelsError
    from kernels.measure import switch_nanoseconds

    try:
        if "ziglang" in find_compiler().command:
            return "not measured: ziglang's first compilation takes minutes"
        return f"{switch_nanoseconds():.0f} ns"
    except (KernelsError, OSError) as error:
        raise _Missing(_one_line(error)) from error


def _line_teller() -> str:
    from kernels.places import find_tool

    tool = find_tool()
    if tool is None:
        raise _Missing
    return tool


def _cache() -> str:
    from kernels.compiler import cache_folder

    try:
        return str(cache_folder())
    except OSError as error:
        raise _Missing(_one_line(error)) from error


def _size() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{cores} cores, {total / _GIB:.0f} GiB"


def _tokenizer(model: str) -> str:
    if not has_tokenizer(model):
        raise _Missing("made-up weights have none" if model == options.SYNTHETIC else "")
    return str(Path(model))


def _devices() -> str:
    try:
        from cuda.bindings import driver

        _check(driver.cuInit(0))
        version = _check(driver.cuDriverGetVersion())
        names = []
        for ordinal in range(_check(driver.cuDeviceGetCount())):
            device = _check(driver.cuDeviceGet(ordinal))
            name = _check(driver.cuDeviceGetName(100, device)).split(b"\0")[0].decode()
            size = _check(driver.cuDeviceTotalMem(device)) / _GIB
            names.append(f"{name}, {size:.0f} GiB")
    except _Missing:
        raise
    except RuntimeError as error:
        raise _Missing("no driver was found") from error
    except Exception as error:
        # Whatever goes wrong in a driver is a reason to report, never one to stop for.
        raise _Missing(_one_line(error)) from error
    if not names:
        raise _Missing("the driver sees no GPU")
    return f"{'; '.join(names)} (CUDA {version // 1000}.{version % 1000 // 10})"


def _check(returned: tuple[Any, ...]) -> Any:
    """The value of a driver call, whose first part is its status."""
    status, *values = returned
    if status != 0:
        raise _Missing(f"the driver says {status.name}")
    return values[0] if values else None


def _nvrtc() -> str:
    _library("nvrtc")
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        raise _Missing(_one_line(error)) from error
    if status != 0:
        raise _Missing(status.name)
    return f"{major}.{minor}"


def _library(name: str) -> str:
    try:
        from cuda import pathfinder

        return pathfinder.load_nvidia_dynamic_lib(name).abs_path or name
    except Exception as error:
        raise _Missing from error


def _bf16_header() -> str:
    try:
        from cuda import pathfinder

        found = pathfinder.locate_nvidia_header_directory("cudart")
    except Exception as error:
        raise _Missing from error
    if found is None or not (Path(found.abs_path) / "cuda_bf16.h").is_file():
        raise _Missing
    return found.abs_path


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def as_json(pieces: list[Piece]) -> str:
    """The pieces as a JSON object, schema 1."""
    able = can_compare(pieces)
    data = {
        "schema": 1,
        "compare_on_cpu": able,
        "pieces": [asdict(piece) for piece in pieces],
        "exit_code": 0 if able else 1,
    }
    return json.dumps(data, indent=2) + "\n"


def as_text(pieces: list[Piece]) -> str:
    """The pieces as text: what is there, then what is not and how to get it, then the upshot."""
    width = max(len(piece.name) for piece in pieces)
    lines = ["This machine has"]
    lines += [f"  {p.name:{width}}  {p.found}" for p in pieces if p.found is not None]
    missing = [p for p in pieces if p.found is None]
    if missing:
        lines += ["", "It lacks"]
    for p in missing:
        needed = "NEEDED: " if p.needed else ""
        lines += [f"  {p.name:{width}}  {needed}{p.gives}", f"  {'':{width}}  {p.remedy}"]
    upshot = (
        "compare can run here, on the CPU: python -m harness compare --layer 0"
        if can_compare(pieces)
        else "compare can not run here before what is NEEDED is there."
    )
    return "\n".join([*lines, "", upshot]) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument(
        "--model",
        default=options.SYNTHETIC,
        metavar=f"{options.SYNTHETIC}|PATH",
        help="look for this folder's tokenizer",
    )
    parser.add_argument(
        "--format", type=options.one_of(FORMATS), default="text", metavar="|".join(FORMATS)
    )


def run(args: argparse.Namespace) -> int:
    """Look, tell, and give the exit code."""
    pieces = look(args.model)
    write_stdout(as_json(pieces) if args.format == "json" else as_text(pieces))
    return 0 if can_compare(pieces) else 1
