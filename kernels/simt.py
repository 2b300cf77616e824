"""Runs lifted CUDA kernels on the CPU: compile, cache, load, launch under a schedule.

    executor = Executor(lift())
    x = executor.allocate(17 * 2048 * 2, "x")        # an address; guarded, full of NaN
    executor.launch(file.call("rmsNorm", x, out, weight, 17))
    Executor(lift(), races=True)                     # the same, and take_races() after a launch

`python -m kernels.measure` measures a fiber switch and some launches on this machine.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from kernels import compiler
from kernels.errors import KernelsError
from kernels.lift import KernelsFile, Launch
from kernels.places import Place, Places
from kernels.races import Access, RaceReport
from kernels.simt_text import host_text, synchronising

HEADERS = ("simt.hpp", "simt_abi.hpp", "simt_math.hpp", "simt_bf16.hpp")
RUNTIME = (
    "simt_runtime.cpp",
    "simt_abi.hpp",
    "simt_block.hpp",
    "simt_fiber.hpp",
    "simt_memory.hpp",
    "simt_race.hpp",
)
CALLBACKS = ("simt_callbacks.cpp", "simt_abi.hpp")
SCHEDULES = ("benign", "reversed", "ahead", "ahead-reversed", "random")
# Threads of a launch from which a second OS thread pays for waking it.
_SPREAD = {True: 2_048, False: 16_384}
_SHARED_LIMIT = 232_448
_MANY_RACES = 64  # different ones that a launch tells
_ACCESSES = ("reads", "writes", "updates atomically")


class LaunchError(Exception):
    """A kernel's own fault at run time.

    `kernel`, `line` (of the kernels file, None if not known) and `message`; `block` and `thread`
    say who, `address` where an illegal access went.
    """

    def __init__(
        self,
        kernel: str,
        line: int | None,
        message: str,
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        address: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.line = line
        self.message = message
        self.block = block
        self.thread = thread
        self.address = address
        super().__init__(kernel, line, message)

    def __str__(self) -> str:
        where = f" at line {self.line}" if self.line else ""
        return f"{self.kernel}{where}: {self.message}"


@dataclass(frozen=True)
class GuardDamage:
    """A write outside an allocation.

    `offset` is the first changed byte's, counted from the data's start: negative before it, at
    least the data's size behind it.
    """

    name: str
    side: str  # "before" or "after"
    offset: int


class _Index(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))

    def values(self) -> tuple[int, int, int]:
        return (self.x, self.y, self.z)


class _Shape(ctypes.Structure):
    _fields_ = (
        ("grid", _Index),
        ("block", _Index),
        ("shared_bytes", ctypes.c_uint64),
        ("cooperative", ctypes.c_int),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("workers", ctypes.c_int),
        ("watch", ctypes.c_void_p),
    )


class _Party(ctypes.Structure):
    _fields_ = (
        ("program_counter", ctypes.c_uint64),
        ("block", _Index),
        ("thread", _Index),
        ("kind", ctypes.c_int),
    )


class _Race(ctypes.Structure):
    _fields_ = (
        ("first", _Party),
        ("second", _Party),
        ("allocation", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("element", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("name", ctypes.c_char * 64),
    )


class _Watch(ctypes.Structure):
    _fields_ = (
        ("races", ctypes.POINTER(_Race)),
        ("capacity", ctypes.c_int),
        ("count", ctypes.c_int),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("line", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("program_counter", ctypes.c_uint64),
        ("block", _Index),
        ("thread", _Index),
        ("message", ctypes.c_char * 400),
    )


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    )


class _Damage(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64), ("offset", ctypes.c_int64))


@cache
def _folder() -> Path:
    return Path(__file__).parent


def _start_runtime() -> compiler.Build:
    text = '#line 1 "simt_runtime.cpp"\n' + (_folder() / RUNTIME[0]).read_text(encoding="utf-8")
    return compiler.start("runtime", text, tuple(_folder() / name for name in RUNTIME[1:]))


def _start_callbacks() -> compiler.Build:
    text = (_folder() / CALLBACKS[0]).read_text(encoding="utf-8")
    headers = tuple(_folder() / name for name in CALLBACKS[1:])
    return compiler.start("callbacks", text, headers, shared=False)


@cache
def _load_runtime(path: Path) -> ctypes.CDLL:
    library = _open(path)
    library.simt_api.restype = ctypes.c_void_p
    library.simt_launch.argtypes = (ctypes.c_void_p,) * 4
    library.simt_allocate.argtypes = (ctypes.c_uint64, ctypes.c_void_p)
    library.simt_free.argtypes = (ctypes.c_void_p,)
    library.simt_free.restype = None
    library.simt_check.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    library.simt_base.argtypes = (ctypes.c_uint64,)
    library.simt_base.restype = ctypes.c_uint64
    return library


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise KernelsError(f"cannot load what the compiler made ({error}); run again") from None


def _parse_schedule(schedule: str) -> tuple[int, int]:
    name, _, seed = schedule.partition(":")
    if name not in SCHEDULES or (name == "random") != bool(seed) or (seed and not seed.isdigit()):
        raise KernelsError(
            f"schedule must be benign, reversed, ahead, ahead-reversed or random:SEED "
            f"(got {schedule!r})"
        )
    return SCHEDULES.index(name), int(seed or 0)


class Executor:
    """One kernels file, compiled for the CPU and ready to launch.

    schedule: "benign" (round-robin, each thread to its next barrier or shuffle), "reversed",
    "ahead" (one warp as far as it gets, warp 0 first), "ahead-reversed", or "random:SEED" (random
    warp order). Blocks run in order, backwards for the reversed ones. threads: OS threads at most
    (None: all processors); no result depends on it. races: look for accesses without an order
    between them, at some cost; `take_races` tells them. Memory of `allocate` lives as long as the
    executor.

    KernelsError if there is no compiler or the file does not compile; its `detail` is the
    compiler's message.
    """

    def __init__(
        self,
        file: KernelsFile,
        schedule: str = "benign",
        threads: int | None = None,
        races: bool = False,
    ) -> None:
        self.file = file
        self.schedule = schedule
        runtime = _start_runtime()
        self._cooperative, self._atomic = synchronising(file)
        if races:  # a loop over threads would mix up who does what
            self._cooperative = frozenset(file.kernels)
        text = host_text(file, self._cooperative)
        headers = tuple(_folder() / name for name in HEADERS)
        try:
            if races:
                flags = (*compiler.KERNEL_FLAGS, *compiler.WATCHED_FLAGS)
                beside = _start_callbacks()
                build = compiler.start("watched", text, headers, flags, beside=beside)
            else:
                build = compiler.start("kernels", text, headers, compiler.KERNEL_FLAGS)
            self.path = build.finish()
        finally:
            runtime_path = runtime.finish()
        self._runtime = _load_runtime(runtime_path)
        self._library = _open(self.path)
        self._library.simt_bind.argtypes = (ctypes.c_void_p,)
        self._library.simt_bind(self._runtime.simt_api())
        self._turn = threading.Lock()
        self._races: list[RaceReport] = []
        self._watch: _Watch | None = None
        if races:
            self._library.simt_watch.argtypes = (ctypes.c_void_p,)
            self._library.simt_watch(self._runtime.simt_api())
            self._watch = _Watch((_Race * _MANY_RACES)(), _MANY_RACES, 0)
        self._places = Places(self.path, file)
        self._entries = {
            name: ctypes.addressof(ctypes.c_char.in_dll(self._library, f"simt_kernel_{name}"))
            for name in file.kernels
        }
        self._threads = _processors() if threads is None else max(1, threads)
        self._allocations: dict[int, tuple[_Allocation, str]] = {}
        self._checked: ctypes.Array[_Allocation] | None = None
        self._finalizer = weakref.finalize(self, _free_all, self._runtime, self._allocations)

    @property
    def schedule(self) -> str:
        """In which order threads and blocks run; may be changed between launches."""
        return self._spelled_schedule

    @schedule.setter
    def schedule(self, schedule: str) -> None:
        self._schedule, self._seed = _parse_schedule(schedule)
        self._spelled_schedule = schedule

    def launch(self, launch: Launch) -> None:
        """Run every block to its end.

        LaunchError for a fault of the kernel (a barrier or shuffle that not all threads reach, an
        illegal access, a shape that CUDA refuses); the executor stays usable. KernelsError if the
        file has no such kernel or the arguments do not fit it.
        """
        kernel = self.file.kernels.get(launch.kernel)
        if kernel is None:
            raise KernelsError(f"{self.file.path} has no kernel {launch.kernel}")
        self._check_shape(launch)
        packed = kernel.pack(launch.arguments)
        cooperative = launch.kernel in self._cooperative
        total = _product(launch.grid) * _product(launch.block)
        spread = total >= _SPREAD[cooperative] and launch.kernel not in self._atomic
        shape = _Shape(
            _Index(*launch.grid),
            _Index(*launch.block),
            launch.shared,
            cooperative,
            self._schedule,
            self._seed,
            self._threads if spread else 1,
            ctypes.addressof(self._watch) if self._watch is not None else None,
        )
        report = _Report()
        with self._turn if self._watch is not None else nullcontext():
            status = self._runtime.simt_launch(
                self._entries[launch.kernel],
                ctypes.addressof(shape),
                packed.address,
                ctypes.addressof(report),
            )
            if self._watch is not None and self._watch.count:
                self._take(launch.kernel, self._watch)
        if status < 0:
            raise MemoryError("no memory for the stacks of the CPU executor")
        if status:
            raise self._launch_error(launch.kernel, report)

    def _check_shape(self, launch: Launch) -> None:
        def refuse(message: str) -> None:
            raise LaunchError(launch.kernel, None, message)

        threads = _product(launch.block)
        if min(launch.block) < 1 or threads > 1024 or launch.block[2] > 64:
            refuse(f"a block must have 1 to 1024 threads (got {'x'.join(map(str, launch.block))})")
        x, y, z = launch.grid
        if min(launch.grid) < 1 or x > 2**31 - 1 or y > 65535 or z > 65535:
            refuse(
                "a grid must be 1 to 2^31-1 x 65535 x 65535 "
                f"(got {'x'.join(map(str, launch.grid))})"
            )
        if not 0 <= launch.shared <= _SHARED_LIMIT:
            refuse(
                f"dynamic shared memory must be at most {_SHARED_LIMIT} bytes (got {launch.shared})"
            )

    def _launch_error(self, kernel: str, report: _Report) -> LaunchError:
        block, thread = report.block.values(), report.thread.values()
        message = report.message.decode(errors="replace")
        line: int | None = report.line or None
        address = None
        if report.kind == 2:
            address = int(report.address)
            message = f"{message} of {self._describe(address)}"
        if line is None and report.program_counter:
            line = self._line_of(report.program_counter)
        who = f"thread {thread} of block {block}"
        return LaunchError(kernel, line, f"{message} [{who}]", block, thread, address)

    def _describe(self, address: int) -> str:
        nearest = min(
            self._allocations.items(),
            key=lambda item: max(item[0] - address, address - item[0] - item[1][0].size, 0),
            default=None,
        )
        if nearest is None:
            return f"address {address:#x}"
        start, (allocation, name) = nearest
        name = name or "an unnamed allocation"
        if address < start:
            where = f"{start - address} bytes before the start of {name}"
        elif address >= start + allocation.size:
            where = f"{address - start - allocation.size} bytes past the end of {name}"
        else:
            where = f"inside {name}"
        return f"address {address:#x}, {where} ({allocation.size} bytes)"

    def _line_of(self, program_counter: int) -> int | None:
        """The kernels file's line of an instruction, if there is a tool to tell."""
        base = self._runtime.simt_base(program_counter)
        place = self._places.of(program_counter - base) if base else None
        return place.line if place is not None and place.file is None else None

    # --- races ---

    def take_races(self) -> list[RaceReport]:
        """What was found since the last call, each pair of lines once a launch."""
        taken, self._races = self._races, []
        return taken

    def _take(self, kernel: str, watch: _Watch) -> None:
        found = watch.races[: watch.count]
        watch.count = 0
        counters = [party.program_counter - 1 for r in found for party in (r.first, r.second)]
        base = self._runtime.simt_base(counters[0])
        places = iter(self._places.all_of(counter - base for counter in counters))
        reports: dict[object, RaceReport] = {}
        for race in found:
            report = self._race_report(kernel, race, next(places), next(places))
            sides = [(each.place, each.kind) for each in (report.first, report.second)]
            known = sides[0][0] is not None and sides[1][0] is not None
            key = (report.array, frozenset(sides), None if known else len(reports))
            if key in reports:
                report = replace(reports[key], count=reports[key].count + report.count)
            reports[key] = report
        self._races += reports.values()

    def _race_report(
        self, kernel: str, race: _Race, first: Place | None, second: Place | None
    ) -> RaceReport:
        shared = not race.allocation
        if shared:
            array = race.name.decode(errors="replace")
        else:
            held = self._allocations.get(race.allocation)
            array = (held[1] if held else "") or "an unnamed allocation"
        a, b = (
            Access(_ACCESSES[party.kind], place, party.block.values(), party.thread.values())
            for party, place in ((race.first, first), (race.second, second))
        )
        return RaceReport(
            kernel=kernel,
            array=array,
            shared=shared,
            offset=int(race.offset),
            element=int(race.offset // race.element) if shared else None,
            first=a,
            second=b,
            count=int(race.count),
            parted=self._places.parted(first, second),
        )

    def allocate(self, size: int, name: str = "") -> int:
        """`size` bytes of 0xFF at a page's start, guarded on both sides; free until written."""
        if size < 1:
            raise ValueError(f"size must be at least 1 byte (got {size})")
        made = _Allocation()
        failed = self._runtime.simt_allocate(size, ctypes.addressof(made))
        if failed:
            raise MemoryError(
                f"cannot map {size} bytes for {name or 'memory'}: {os.strerror(failed)}"
            )
        address = int(made.data or 0)
        self._allocations[address] = (made, name)
        self._checked = None
        return address

    def free(self, pointer: int) -> None:
        """Give an allocation back. ValueError if `pointer` is not the start of one."""
        if pointer not in self._allocations:
            raise ValueError(f"{pointer:#x} is not the start of an allocation")
        allocation, _ = self._allocations.pop(pointer)
        self._checked = None
        self._runtime.simt_free(ctypes.addressof(allocation))

    def damaged_guards(self, full: bool = False) -> list[GuardDamage]:
        """Writes outside allocations since the last call; repairs what it finds.

        By default it compares the 4 KiB before and behind each allocation's data (well under a
        microsecond each); `full` compares all of the guards, 1 MiB on each side (0.1 ms each).
        Beyond them an access is a LaunchError.
        """
        count = len(self._allocations)
        if self._checked is None:
            self._checked = (_Allocation * max(count, 1))(
                *(a for a, _ in self._allocations.values())
            )
        out = (_Damage * (2 * count + 1))()
        found = self._runtime.simt_check(self._checked, count, full, out)
        return [
            GuardDamage(
                self._allocations[d.data][1], "before" if d.offset < 0 else "after", int(d.offset)
            )
            for d in out[:found]
        ]


def _free_all(runtime: ctypes.CDLL, allocations: dict[int, tuple[_Allocation, str]]) -> None:
    for allocation, _ in allocations.values():
        runtime.simt_free(ctypes.addressof(allocation))
    allocations.clear()


def _product(values: Sequence[int]) -> int:
    return values[0] * values[1] * values[2]


def _processors() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, 64)


# --- comparing memory -----------------------------------------------------------------------------


@cache
def _memcmp() -> object:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return function


def first_difference(a: int, b: int, size: int) -> int | None:
    """Offset of the first byte in which `size` bytes at addresses a and b differ; None: none."""
    memcmp = _memcmp()
    assert callable(memcmp)
    if size <= 0 or memcmp(a, b, size) == 0:
        return None
    low = 0
    while size > 1:  # the difference lies in [low, low + size)
        half = size // 2
        if memcmp(a + low, b + low, half):
            size = half
        else:
            low, size = low + half, size - half
    return low
