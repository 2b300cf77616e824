"""Repairs: named, small replacements of one kernel or one host step of the engine.

A repair knows which op it is for, never whether that op is wrong: `ladder` tries the repairs of the
op that failed. To add one: a file in kernels/repairs/ whose last function replaces the one of the
same name, and an entry in REPAIRS.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness.errors import UsageError
from harness.taps import DECODE, PREFILL

if TYPE_CHECKING:
    from kernels.lift import KernelsFile, Launch, Refusal


@dataclass(frozen=True)
class Repair:
    """A repair of the ops `ops`, pairs of phase and op.

    host_call: whose kernel it replaces; None for a step of the host, which the engine carries out
    itself. files: of kernels/repairs/; what several share comes first and is taken once.
    sample: numbers to launch the call with, when asking whether a file's launch is like ours.
    """

    name: str
    summary: str
    ops: tuple[tuple[str, str], ...]
    upstream: str
    host_call: str | None = None
    files: tuple[str, ...] = ()
    sample: tuple[int, ...] = ()


_ROPES: Final = ((DECODE, "q_rope"), (DECODE, "k_rope"))
_ROPE_SAMPLE: Final = (4096, 257, 2048)

REPAIRS: Final = {
    repair.name: repair
    for repair in (
        Repair(
            "softmax-nan",
            "merging two fully masked nodes of prefill's softmax gives no NaN",
            ((PREFILL, "softmax"),),
            "kernels.cu:257-309",
            "softmax",
            ("softmax-nan.cu",),
            (4096, 17),
        ),
        Repair(
            "decode-rope-pairing",
            "decode rotates the halves (i, i + 32), as prefill does, not neighbours",
            _ROPES,
            "kernels.cu:371-405",
            "ropeDecode",
            ("decode-rope.cu", "decode-rope-pairing.cu"),
            _ROPE_SAMPLE,
        ),
        Repair(
            "decode-rope-scaling",
            "decode rotates by Llama 3's scaled frequencies, as prefill does",
            _ROPES,
            "kernels.cu:371-405",
            "ropeDecode",
            ("decode-rope.cu", "decode-rope-scaling.cu"),
            _ROPE_SAMPLE,
        ),
        Repair(
            "attention-race",
            "a barrier ends the token loop of decode's attention",
            ((DECODE, "attention"),),
            "kernels.cu:461-528",
            "pagedAttention",
            ("attention-race.cu",),
            (3, 2, 4096, 8192, 12288, 16384, 20480, 24576),
        ),
        Repair(
            "prefill-eos",
            "an end token that prefill emits ends its sequence",
            ((PREFILL, "schedule"), (PREFILL, "block_table")),
            "main.cpp:533-552",
        ),
    )
}
PREFILL_EOS: Final = "prefill-eos"


def parse_repairs(lists: Iterable[str]) -> tuple[str, ...]:
    """The names in lists such as "a,b", each once, in the order of REPAIRS.

    Raises UsageError for a name that is no repair, and suggests the nearest.
    """
    given = [name.strip() for text in lists for name in text.split(",")]
    for name in given:
        check_repair(name)
    return tuple(name for name in REPAIRS if name in given)


def check_repair(name: str) -> None:
    """Raise UsageError unless this is a repair."""
    if name in REPAIRS:
        return
    near = difflib.get_close_matches(name, REPAIRS, n=1, cutoff=0.4)
    advice = f"did you mean {near[0]}?" if near else "name one of them"
    raise UsageError(f"--repair must be of {', '.join(REPAIRS)} (got {name!r}); {advice}")


def repairs_of(phase: str, op: str) -> tuple[str, ...]:
    """The names of the repairs that declare this op."""
    return tuple(repair.name for repair in REPAIRS.values() if (phase, op) in repair.ops)


def apply_repairs(kernels: KernelsFile, names: Iterable[str]) -> KernelsFile:
    """`kernels` with the kernels of these repairs in place of its own; their order is no matter.

    `path` and `sha256` of the result are still those of the user's file: a report names its repairs
    beside them. Repairs of a host step change nothing here.
    Raises UsageError for an unknown name, KernelsError for a file that a repair does not fit.
    """
    wanted = parse_repairs(names)
    done: set[str] = set()
    for repair in (REPAIRS[name] for name in wanted):
        if repair.host_call is None:
            continue
        if not done.intersection(repair.files):
            _check_launch(kernels, repair)
        for name in repair.files:
            if name not in done:
                done.add(name)
                kernels = _with_file(kernels, repair.host_call, name)
    return kernels


def _with_file(kernels: KernelsFile, host_call: str, name: str) -> KernelsFile:
    from kernels.replace import replace_function

    return replace_function(kernels, repair_path(name), kernels.host_calls[host_call].kernel)


@cache
def _own() -> KernelsFile:
    from kernels.lift import lift

    return lift()


def _check_launch(kernels: KernelsFile, repair: Repair) -> None:
    """A repair's kernel is written for our launch: another grid or order would go wrong."""
    from kernels.errors import KernelsError
    from kernels.lift import Launch

    assert repair.host_call is not None
    ours, theirs = (file.call(repair.host_call, *repair.sample) for file in (_own(), kernels))
    assert isinstance(ours, Launch)
    if isinstance(theirs, Launch) and _told(theirs) == _told(ours):
        return
    line = kernels.host_calls[repair.host_call].line
    raise KernelsError(
        f"{kernels.path}:{line}: {repair.host_call} must launch {_spelled(ours)} on "
        f"{repair.sample} for repair {repair.name} (got {_spelled(theirs)}); drop the repair"
    )


def _told(launch: Launch) -> tuple[object, ...]:
    return (launch.grid, launch.block, launch.arguments)


def _spelled(launch: Launch | Refusal) -> str:
    from kernels.lift import Refusal

    if isinstance(launch, Refusal):
        return "nothing"
    return f"<<<{launch.grid}, {launch.block}>>>({', '.join(map(str, launch.arguments))})"


def repair_path(file: str) -> Path:
    """Where a file of a repair lies."""
    from kernels.lift import own_path

    return own_path().parent / "repairs" / file
