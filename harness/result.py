"""What a comparison found: the records of JSON schema 1, field for field and in its order.

`Report.build` derives the fields that follow from others: culprits, counts and the exit code.
Figures that do not apply are None. Records are plain data: they print nothing and import nothing
heavy. To add a field: add it here, at the end of its record, and `report/json.py` writes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

SCHEMA: Final = 1

# From harmless to nothing known, in the order in which counts are shown.
VERDICTS: Final = (
    "exact",
    "rounding",
    "equivalent",
    "systematic",
    "diverged",
    "poisoned",
    "unchanged",
    "stray",
    "race",
    "not_run",
)
PASSES: Final = frozenset({"exact", "rounding", "equivalent"})
FAILURES: Final = frozenset(VERDICTS) - PASSES

MODEL_INPUT: Final = "model"  # `Result.input` of a row that ran on the model's own activations


@dataclass(frozen=True)
class Worst:
    """The element that misses its allowance by most."""

    index: tuple[int, ...]
    got: float
    want: float
    allowed: tuple[float, float]  # lowest and highest possible value


@dataclass(frozen=True)
class Diagnosis:
    """A hypothesis that explains every element of a failing tap, and its sentence for the reader.

    `hypothesis` is the registered name, for scripts; `sentence` stands by itself.
    """

    hypothesis: str
    sentence: str


@dataclass(frozen=True)
class Result:
    """One tap, judged: an op at a phase, step, layer and input. True unless it failed."""

    phase: str
    step: int | None  # None in prefill
    slot: int | None  # None where the row covers all slots
    layer: int | None  # None for ops outside the layers
    op: str
    input: str  # MODEL_INPUT, or the battery's name of it
    verdict: str
    shape: tuple[int, ...] | None = None
    impossible: int | None = None  # elements outside the strict interval
    improbable: int | None = None  # elements outside the statistical interval
    elements: int | None = None
    worst: Worst | None = None
    first_nan: tuple[int, ...] | None = None
    passing_tolerance: float | None = None  # max |got - want|
    max_abs: float | None = None
    rel_l2: float | None = None
    cosine: float | None = None
    max_ulp: int | None = None  # in bf16 steps
    noise_floor: float | None = None  # relative L2 of ideal against exact
    propagated: float | None = None  # relative L2 of port against exact, over the noise floor
    note: str | None = None
    diagnosis: tuple[Diagnosis, ...] = ()
    upstream: str | None = None  # upstream's lines, such as "main.cpp:329"

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)} (got {self.verdict!r})")

    def failed(self, strict: bool = False) -> bool:
        """Whether this row counts as a failure; `equivalent` does only when `strict`."""
        return self.verdict in FAILURES or (strict and self.verdict == "equivalent")

    def __bool__(self) -> bool:
        return not self.failed()


@dataclass(frozen=True)
class Culprit:
    """An op that failed, at the first row where it did."""

    phase: str
    step: int | None
    layer: int | None
    op: str
    verdict: str
    hypotheses: tuple[str, ...]


@dataclass(frozen=True)
class Race:
    """Two accesses without an order between them, found in one op's kernel."""

    phase: str
    step: int | None
    layer: int | None
    op: str
    sentence: str


@dataclass(frozen=True)
class Stray:
    """Something changed that the op does not declare as its output."""

    phase: str
    step: int | None
    layer: int | None
    op: str
    sentence: str  # which buffer or page, where in it, and what was there


@dataclass(frozen=True)
class Flip:
    """A generated token that differs from the ideal's."""

    slot: int
    index: int  # 0 is the token that prefill gives
    port: int
    ideal: int
    margin: float  # between the ideal's two greatest logits
    error: float  # the port's error of these logits against exact
    kind: str  # "tie_within_rounding" or "flip"


@dataclass(frozen=True)
class Tokens:
    """The tokens of a free run, one tuple a slot, and where they part from the ideal's."""

    port: tuple[tuple[int, ...], ...]
    ideal: tuple[tuple[int, ...], ...]
    agree: int  # tokens that are the ideal's at the same index
    flips: tuple[Flip, ...]


@dataclass(frozen=True)
class Model:
    """Which weights ran: `kind` "synthetic" has a seed, `kind` "checkpoint" a path."""

    kind: str
    seed: int | None
    path: str | None
    layers: int

    def __post_init__(self) -> None:
        if (self.seed is None) == (self.path is None):
            raise ValueError(f"a model must have a seed or a path (got {self})")


@dataclass(frozen=True)
class Kernels:
    """Which kernel file ran."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Report:
    """Everything that one comparison found. Make it with `Report.build`. True if nothing failed."""

    schema: int
    command: str  # as typed; `shlex.split` gives its words
    device: str
    model: Model
    repairs: tuple[str, ...]
    kernels: Kernels
    mode: str
    results: tuple[Result, ...]  # in execution order
    culprits: tuple[Culprit, ...]
    first_culprit: Culprit | None
    races: tuple[Race, ...]
    strays: tuple[Stray, ...]
    tokens: Tokens | None
    counts: dict[str, int]
    seconds: float
    exit_code: int

    @classmethod
    def build(
        cls,
        *,
        command: str,
        device: str,
        model: Model,
        kernels: Kernels,
        mode: str,
        results: Iterable[Result],
        seconds: float,
        repairs: Sequence[str] = (),
        races: Sequence[Race] = (),
        strays: Sequence[Stray] = (),
        tokens: Tokens | None = None,
    ) -> Report:
        """The report of `results` (in execution order), with what follows from them filled in."""
        rows = tuple(results)
        strict = _is_strict(command)
        culprits = culprits_of(rows, strict)
        return cls(
            schema=SCHEMA,
            command=command,
            device=device,
            model=model,
            repairs=tuple(repairs),
            kernels=kernels,
            mode=mode,
            results=rows,
            culprits=culprits,
            first_culprit=culprits[0] if culprits else None,
            races=tuple(races),
            strays=tuple(strays),
            tokens=tokens,
            counts=counts_of(rows),
            seconds=seconds,
            exit_code=exit_code_of(rows, strict),
        )

    @property
    def strict(self) -> bool:
        """Whether `equivalent` was asked to count as a failure."""
        return _is_strict(self.command)

    def __bool__(self) -> bool:
        return self.exit_code == 0


def _is_strict(command: str) -> bool:
    return "--strict" in shlex.split(command)


def culprits_of(results: Iterable[Result], strict: bool = False) -> tuple[Culprit, ...]:
    """The ops that failed, in execution order: one an op of a phase, at its first failing row.

    An op's hypotheses are those that explain all its failing rows which have an explanation;
    where no hypothesis does, all that explain one of them.
    """
    failing: dict[tuple[str, str], list[Result]] = {}
    for row in results:
        if row.failed(strict):
            failing.setdefault((row.phase, row.op), []).append(row)
    culprits = []
    for rows in failing.values():
        first = rows[0]
        culprits.append(
            Culprit(
                phase=first.phase,
                step=first.step,
                layer=first.layer,
                op=first.op,
                verdict=first.verdict,
                hypotheses=_shared_hypotheses(rows),
            )
        )
    return tuple(culprits)


def _shared_hypotheses(rows: Sequence[Result]) -> tuple[str, ...]:
    explained = [[d.hypothesis for d in row.diagnosis] for row in rows if row.diagnosis]
    every = list(dict.fromkeys(name for names in explained for name in names))
    shared = [name for name in every if all(name in names for names in explained)]
    return tuple(shared or every)


def counts_of(results: Iterable[Result]) -> dict[str, int]:
    """Rows a verdict; every verdict has its key."""
    counts = dict.fromkeys(VERDICTS, 0)
    for row in results:
        counts[row.verdict] += 1
    return counts


def exit_code_of(results: Sequence[Result], strict: bool = False) -> int:
    """0 nothing failed, 1 something failed, 2 nothing was run."""
    if not results:
        return 2
    return int(any(row.failed(strict) for row in results))
