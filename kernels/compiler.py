"""The system's C++ compiler, and a cache of what it made.

Order: $CXX (may hold arguments), g++, clang++, c++, the `ziglang` wheel. Cache folder:
$TINY_VLLM_DIFF_CACHE, else the platform's user cache, else a temporary folder. An object's file
name is a hash of all that went into it, and it appears by a rename: parallel processes may build
the same one twice, but never see half of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels.errors import KernelsError

FLAGS = (
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    # g++ fuses a*b+c by default on machines that can; the kernels say themselves what is fused
    "-ffp-contract=off",
    # CUDA kernels reinterpret pointers and let int wrap
    "-fno-strict-aliasing",
    "-fwrapv",
    # its checks take switching stacks for an error
    "-U_FORTIFY_SOURCE",
    "-fno-stack-protector",
)
# For objects whose accesses to memory are watched. -O1: an access must stay with the line and the
# thread that it is from.
WATCHED_FLAGS = ("-O1", "-fsanitize=thread", "-DSIMT_WATCHED")
KERNEL_FLAGS = (
    "-fno-exceptions",
    "-fno-sanitize=undefined",
    "-fsanitize=bounds",
    "-fno-sanitize-recover=bounds",
    # a fiber's stack is 64 KiB
    "-Wframe-larger-than=49152",
)
_KEEP = 600  # objects in the cache folder; the oldest go first
# g++ and clang spell -Werror for this one warning differently, so it is looked for in what they say
_FRAME = re.compile(
    r"^(?P<where>[^\n]+?:\d+):(?:\d+:)? warning: (?P<what>[^\n]*frame-larger-than[^\n]*)", re.M
)
_ERROR = re.compile(r"^(?P<where>[^\n]+?:\d+):(?:\d+:)? (?:fatal )?error: (?P<what>[^\n]+)", re.M)


@dataclass(frozen=True)
class Compiler:
    """A command that compiles C++, and what tells it from another one."""

    command: tuple[str, ...]
    identity: str


def find_compiler() -> Compiler:
    """The compiler to use. KernelsError saying what to install if there is none."""
    asked = os.environ.get("CXX", "").strip()
    if asked:
        command = shlex.split(asked)
        path = shutil.which(command[0])
        if path is None:
            raise KernelsError(
                f"CXX is {asked!r}, but there is no program {command[0]!r}; "
                "set CXX to a C++ compiler or unset it"
            )
        return Compiler((path, *command[1:]), _identity(path, command[1:]))
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is not None:
            return Compiler((path,), _identity(path, ()))
    wheel = importlib.util.find_spec("ziglang")
    if wheel is not None and wheel.origin:
        return Compiler((sys.executable, "-m", "ziglang", "c++"), _identity(wheel.origin, ("zig",)))
    raise KernelsError(
        "no C++ compiler found: install g++ or clang (Debian: apt install g++; macOS: "
        "xcode-select --install), or run `pip install ziglang`, or set CXX"
    )


def _identity(path: str, arguments: tuple[str, ...] | list[str]) -> str:
    real = os.path.realpath(path)
    about = os.stat(real)
    return " ".join((path, real, str(about.st_size), str(about.st_mtime_ns), *arguments))


@cache
def machine_flags() -> tuple[str, ...]:
    """Flags for what this processor can do. Only fused multiply-add in hardware matters."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        words = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text(errors="replace")[:8192]))
    except OSError:
        return ()
    return ("-mavx2", "-mfma") if {"avx2", "fma"} <= words else ()


def cache_folder() -> Path:
    """A folder for compiled objects that exists and can be written to."""
    asked = os.environ.get("TINY_VLLM_DIFF_CACHE")
    if asked:
        tried = [Path(asked)]
    elif sys.platform == "darwin":
        tried = [Path("~/Library/Caches/tiny-vllm-diff")]
    else:
        tried = [Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tiny-vllm-diff"]
    user = os.getuid() if hasattr(os, "getuid") else os.getpid()
    tried.append(Path(tempfile.gettempdir()) / f"tiny-vllm-diff-{user}")
    for folder in tried:
        try:
            folder = folder.expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        # code from here is loaded into this process: nobody else may own it
        if os.access(folder, os.W_OK | os.X_OK) and folder.stat().st_uid == user:
            return folder
    return Path(tempfile.mkdtemp(prefix="tiny-vllm-diff-"))


@dataclass
class Build:
    """One object on its way. `start` returns at once; `finish` waits and gives its path."""

    path: Path
    process: subprocess.Popen[str] | None = None
    folder: Path | None = None
    command: tuple[str, ...] = ()
    link: tuple[str, ...] = ()  # empty: an object to be linked into another one
    beside: Build | None = None  # an object to link in

    def finish(self) -> Path:
        """The finished object. KernelsError if it does not compile."""
        if self.process is None or self.folder is None:
            return self.path
        try:
            _, message = self.process.communicate()
            if self.process.returncode:
                raise _compile_error(message, self.command)
            frame = _FRAME.search(message)
            if frame and not frame["where"].partition(":")[0].endswith(
                ".hpp"
            ):  # not a plain loop's
                raise KernelsError(
                    f"{frame['where']}: {frame['what']}; local arrays this large need a GPU",
                    message.strip(),
                )
            made = self.folder / "out.o"
            if self.link:
                made = self._linked(made)
            os.replace(made, self.path)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.communicate()
            shutil.rmtree(self.folder, ignore_errors=True)
        _prune(self.path.parent)
        return self.path

    def _linked(self, compiled: Path) -> Path:
        made = compiled.with_name("out.so")
        command = [*self.link, str(compiled), "-o", str(made)]
        if self.beside is not None:
            command.insert(-2, str(self.beside.finish()))
        linked = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        if linked.returncode:
            raise KernelsError(
                f"{self.link[0]} cannot link a shared object; try another CXX",
                linked.stderr.strip(),
            )
        return made


def start(
    kind: str,
    text: str,
    headers: tuple[Path, ...],
    extra: tuple[str, ...] = (),
    *,
    shared: bool = True,
    beside: Build | None = None,
) -> Build:
    """Begin to compile `text` into a shared object, unless the cache has it.

    shared: otherwise an object that is to be linked into another one, as its `beside`.
    """
    compiler = find_compiler()
    flags = (*FLAGS, *machine_flags(), *extra)
    key = hashlib.sha256()
    linked = beside.path.name if beside is not None else ""
    for part in (compiler.identity, *flags, platform.machine(), sys.platform, linked, text):
        key.update(part.encode() + b"\0")
    for header in headers:
        key.update(header.read_bytes() + b"\0")
    path = cache_folder() / f"{kind}-{key.hexdigest()[:32]}.{'so' if shared else 'o'}"
    if path.exists():
        with contextlib.suppress(OSError):
            os.utime(path)  # recently used: pruned last
        return Build(path)
    folder = Path(tempfile.mkdtemp(prefix="build-", dir=path.parent))
    source = folder / "in.cpp"
    source.write_text(text, encoding="utf-8")
    include = f"-I{Path(__file__).parent}"
    command = (
        *compiler.command,
        *flags,
        include,
        "-c",
        str(source),
        "-o",
        str(folder / "out.o"),
    )
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise KernelsError(
            f"cannot run {compiler.command[0]}: {error.strerror}; set CXX to a C++ compiler"
        ) from None
    link = (*compiler.command, "-shared", "-pthread") if shared else ()
    return Build(path, process, folder, command, link, beside)


def _compile_error(message: str, command: tuple[str, ...]) -> KernelsError:
    found = _ERROR.search(message)
    if found:
        return KernelsError(f"{found['where']}: {found['what']}", message.strip())
    return KernelsError(f"{command[0]} cannot compile the kernels", message.strip())


def _prune(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process may be pruning
        objects = sorted(folder.glob("*.*o"), key=lambda p: p.stat().st_mtime)
        for old in objects[:-_KEEP]:
            old.unlink(missing_ok=True)
