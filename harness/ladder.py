"""Repair the engine step by step: which fault matters, and what each repair does to the tokens.

Starts without repairs, finds the first op that fails in one layer, tries each repair that declares
this op, alone and then together, keeps the smallest set with which the op passes, and goes on until
nothing fails. Each rung also runs the engine freely through all layers and compares its tokens with
the ideal's. The exit code is 0 if the last rung has nothing left that fails, else 1.

example:
  python -m harness ladder
  python -m harness ladder --max-new-tokens 32 --format json -o ladder.json
  python -m harness ladder --prompt-ids @long.txt
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness import options, prompt
from harness.errors import UsageError
from harness.prompt import Ids
from harness.repairs import PREFILL_EOS, REPAIRS, apply_repairs, repairs_of
from harness.report.output import Output
from harness.request import CompareRequest
from harness.result import SCHEMA, Culprit, Diagnosis, Kernels, Model, Report, Tokens
from harness.taps import EXECUTION_ORDER, PREFILL

if TYPE_CHECKING:
    from torch import Tensor

    from harness.probe import Event
    from harness.progress import Progress
    from reference.checkpoint import Checkpoint

CACHE_BYTES: Final = 3 << 30  # all of the model: each step of the ideal walks through all layers
_RUNGS: Final = 6  # of upstream's engine


@dataclass(frozen=True)
class LadderRequest:
    """What `ladder` is asked to do. Checks itself: raises UsageError for what can not be done.

    layer: where ops are compared. max_new_tokens: of each prompt, the first of them prefill's.
    decode_ids: what decode takes where ops are compared; the free runs take their own tokens.
    """

    layer: int = 0
    max_new_tokens: int = 8
    prompt_ids: tuple[Ids, ...] | None = None
    decode_ids: tuple[Ids, ...] | None = None
    model: str = options.SYNTHETIC
    seed: int = 0
    device: str = "auto"
    kernels: Path | None = None
    battery: bool = True
    output: Output = field(default_factory=Output)
    command: str = "python -m harness ladder"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be 1 or more (got {self.max_new_tokens})")
        if self.prompt_ids is not None:
            prompt.check_prompts(self.prompt_ids, "--prompt-ids")
            for ids in self.prompt_ids:
                prompt.check_vocabulary(ids, "--prompt-ids")
            if len(self.prompt_ids) > prompt.SLOTS:
                raise UsageError(
                    f"--prompt-ids must give one prompt a slot, at most {prompt.SLOTS} "
                    f"(got {len(self.prompt_ids)})"
                )
        prompt.check_length(self.prompt_ids, self.max_new_tokens)
        self.compare_request(())  # checks the rest

    def compare_request(self, repairs: Sequence[str]) -> CompareRequest:
        """The isolated comparison of a rung. Races show on the host only."""
        return CompareRequest(
            layers=(self.layer,),
            prompt_ids=self.prompt_ids,
            decode_ids=self.decode_ids,
            model=self.model,
            seed=self.seed,
            device=self.device,
            kernels=self.kernels,
            repairs=tuple(repairs),
            battery=self.battery,
            races=self.device != "cuda",
        )

    def race_request(self, repairs: Sequence[str]) -> CompareRequest:
        """Where ops run on a GPU: what looks for races of the same kernels on the host."""
        request = self.compare_request(repairs)
        return replace(request, device="host", races=True, battery=False, command="")

    def free_request(self) -> CompareRequest:
        """The free run through all layers."""
        return replace(
            self.compare_request(()),
            all_layers=True,
            mode="propagated",
            races=False,
            steps=max(1, self.max_new_tokens - 1),
            command="",
        )


@dataclass(frozen=True)
class Rung:
    """One set of repairs, and what is wrong with it.

    tried_for: the op that the last repairs were tried for, None at the foot. passes: whether that
    op passes now. kept: whether the ladder goes on from here. culprit: the first op that fails now,
    and what explains it; None at the top. tokens: of the free run.
    """

    repairs: tuple[str, ...]
    tried_for: Culprit | None
    passes: bool | None
    kept: bool
    culprit: Culprit | None
    diagnosis: tuple[Diagnosis, ...]
    upstream: str | None
    tokens: Tokens
    exit_code: int
    seconds: float


@dataclass(frozen=True)
class LadderReport:
    """All rungs in the order in which they were tried. True if the last repairs suffice."""

    schema: int
    command: str
    device: str
    model: Model
    kernels: Kernels
    layer: int
    rungs: tuple[Rung, ...]
    repairs: tuple[str, ...]  # those kept
    remaining: Culprit | None  # what no repair makes pass
    seconds: float
    exit_code: int

    def __bool__(self) -> bool:
        return self.exit_code == 0


# --- climbing -----------------------------------------------------------------------------------

# Compares with these repairs, runs freely with them.
Compare = Callable[[tuple[str, ...]], Report]
Run = Callable[[tuple[str, ...]], Tokens]


def climb(compare: Compare, run: Run) -> Iterator[Rung]:
    """The rungs, from none to the repairs with which nothing fails that a repair can help.

    Knows of a repair only which ops it declares. An op that none makes pass is left behind, and the
    next one that fails is looked at.
    """
    kept: tuple[str, ...] = ()
    behind: set[tuple[str, str]] = set()  # (phase, op)
    started = time.perf_counter()
    report = compare(kept)
    yield _rung(report, run(kept), None, True, time.perf_counter() - started, behind)
    while (culprit := first_culprit(report, behind)) and (culprit.phase, culprit.op) not in behind:
        candidates = [name for name in repairs_of(culprit.phase, culprit.op) if name not in kept]
        found: tuple[tuple[str, ...], Report] | None = None
        for size in range(1, len(candidates) + 1):
            for added in combinations(candidates, size):
                names = tuple(name for name in REPAIRS if name in (*kept, *added))
                started = time.perf_counter()
                tried = compare(names)
                keep = found is None and _passes(tried, culprit)
                seconds = time.perf_counter() - started
                yield _rung(tried, run(names), culprit, keep, seconds, behind)
                found = (names, tried) if keep else found
            if found is not None:
                break
        if found is None:
            behind.add((culprit.phase, culprit.op))
        else:
            kept, report = found


def culprits(report: Report) -> list[Culprit]:
    """The ops that failed in values and those that raced, in execution order."""
    found = list(report.culprits)
    known = {(culprit.phase, culprit.op) for culprit in found}
    for race in report.races:
        if (race.phase, race.op) not in known:
            known.add((race.phase, race.op))
            found.append(Culprit(race.phase, race.step, race.layer, race.op, "race", ()))
    return sorted(
        found, key=lambda c: (c.phase != PREFILL, c.step or 0, EXECUTION_ORDER[c.phase][c.op])
    )


def first_culprit(report: Report, behind: Collection[tuple[str, str]] = ()) -> Culprit | None:
    """The first op that fails, in values or by a race; one left behind only if no other does."""
    found = culprits(report)
    return next((c for c in found if (c.phase, c.op) not in behind), next(iter(found), None))


def _passes(report: Report, culprit: Culprit) -> bool:
    return (culprit.phase, culprit.op) not in {(c.phase, c.op) for c in culprits(report)}


def _rung(
    report: Report,
    tokens: Tokens,
    tried_for: Culprit | None,
    kept: bool,
    seconds: float,
    behind: Collection[tuple[str, str]],
) -> Rung:
    culprit = first_culprit(report, behind)
    rows = [
        row
        for row in report.results
        if culprit and (row.phase, row.op) == (culprit.phase, culprit.op) and row.failed()
    ]
    names = culprit.hypotheses if culprit else ()
    said = {each.hypothesis: each for row in reversed(rows) for each in row.diagnosis}
    races = [  # of a race that no row tells
        Diagnosis("race", race.sentence)
        for race in report.races
        if culprit
        and culprit.verdict == "race"
        and (race.phase, race.op) == (culprit.phase, culprit.op)
    ]
    return Rung(
        repairs=report.repairs,
        tried_for=tried_for,
        passes=None if tried_for is None else _passes(report, tried_for),
        kept=kept,
        culprit=culprit,
        diagnosis=tuple(said[name] for name in names if name in said) or tuple(races[:1]),
        upstream=next((row.upstream for row in rows if row.upstream), None),
        tokens=tokens,
        exit_code=int(culprit is not None),
        seconds=seconds,
    )


# --- free runs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ideal:
    """The ideal's own run: its events, its greedy tokens and the logits of ideal and exact behind
    each, one list a prompt."""

    events: Sequence[Event]
    tokens: list[list[int]]
    logits: list[list[tuple[Tensor, Tensor]]]


class FreeRuns:
    """The engine running freely with one set of repairs after another, beside the ideal.

    The ideal walks once, for it is the same for all; the weights are brought to the device once,
    and only the kernels change between runs.
    """

    def __init__(self, request: LadderRequest, checkpoint: Checkpoint, progress: Progress) -> None:
        from harness.memory import Memory
        from harness.session import Session

        self._request, self._progress = request, progress
        self._session = session = Session(request.free_request(), progress, checkpoint)
        session.steps = request.max_new_tokens - 1  # none, if prefill's token is all
        self.device = session.engine.device.name
        self._calls = session.engine.calls
        self._memory = Memory(session.engine)
        self._ideal = self._walk()
        for layer in range(checkpoint.layers):
            progress.update("weights", layer, checkpoint.layers)
            session.load({"any"}, layer)
        session.load({"logits", "final_norm"}, None)

    def _walk(self) -> Ideal:
        from harness.control import plan
        from harness.walk import FreeWalk

        session = self._session
        stages = (len(session.prompts) + session.steps) * (session.checkpoint.layers + 2)
        done = iter(range(stages + 1))
        walk = FreeWalk(
            session.checkpoint,
            lambda cases: self._progress.update("ideal", next(done, stages), stages),
        )
        expected = plan(
            session.prompts, walk, layers=session.checkpoint.layers, steps=session.steps
        )
        return Ideal(expected.events, walk.tokens, walk.logits)

    def __call__(self, repairs: tuple[str, ...]) -> Tokens:
        """The engine's tokens with these repairs, compared with the ideal's."""
        from harness.devices import open_device
        from harness.propagated import Listener, compare_tokens
        from kernels.lift import lift

        self._progress.update(f"tokens with {', '.join(repairs) or 'no repair'}")
        session, engine = self._session, self._session.engine
        kernels = apply_repairs(lift(self._request.kernels), repairs)
        # A second device launches the repaired kernels on the first one's memory.
        launcher = open_device(self._request.device, kernels)
        listener = Listener(engine, None, (), (), None)
        launcher.on_incident = engine.device.on_incident
        engine.calls = self._calls.with_kernels(kernels, launcher)
        engine.check_eos_after_prefill = PREFILL_EOS in repairs
        session.poison(self._memory, self._ideal.events)
        session.run()
        return compare_tokens(listener.tokens, self._ideal.tokens, self._ideal.logits)


# --- the verb -----------------------------------------------------------------------------------


def ladder(
    request: LadderRequest, progress: Progress, checkpoint: Checkpoint | None = None
) -> LadderReport:
    """Climb. Raises the classes of harness.errors for a user's mistake.

    checkpoint: instead of the request's model; it should hold all its tensors once read.
    """
    from harness.compare import compare
    from reference.checkpoint import open_checkpoint

    started = time.perf_counter()
    if checkpoint is None:
        checkpoint = open_checkpoint(request.model, seed=request.seed, cache_bytes=CACHE_BYTES)
    request.compare_request(()).check_layers(checkpoint.layers)
    progress.announce(_expectation(request, checkpoint.layers))
    last: list[Report] = []

    def compare_with(repairs: tuple[str, ...]) -> Report:
        progress.update(f"compare with {', '.join(repairs) or 'no repair'}")
        report = compare(request.compare_request(repairs), progress, checkpoint)
        if request.device == "cuda":
            races = compare(request.race_request(repairs), progress, checkpoint).races
            report = replace(report, races=races)
        last[:] = [report]
        return report

    runs = FreeRuns(request, checkpoint, progress)
    rungs = tuple(climb(compare_with, runs))
    top = [rung for rung in rungs if rung.kept][-1]
    return LadderReport(
        schema=SCHEMA,
        command=request.command,
        device=runs.device,
        model=last[0].model,
        kernels=last[0].kernels,
        layer=request.layer,
        rungs=rungs,
        repairs=top.repairs,
        remaining=top.culprit,
        seconds=time.perf_counter() - started,
        exit_code=top.exit_code,
    )


def _expectation(request: LadderRequest, layers: int) -> str:
    """How long on a CPU of two processors, and how much memory; as measured."""
    prompts = request.prompt_ids or [()] * prompt.SLOTS
    lengths = [len(ids) for ids in prompts]
    if request.prompt_ids is None:
        lengths = list(prompt.HARD_CODED_LENGTHS[: prompt.SLOTS])
    share = layers / 16
    events = len(lengths) + request.max_new_tokens - 1
    ideal = events * (1 + 4 * share) + sum(lengths) * (0.1 + 0.4 * share)
    run = request.max_new_tokens * (0.2 + share) + sum(lengths) * (0.02 + 0.1 * share)
    seconds = 20 * share + ideal + _RUNGS * (10 + run)
    memory = 2.5 + 5 * share + max(lengths) * 4e-3
    return (
        f"ladder: about {max(1, round(seconds / 60))} min on a CPU, {memory:.0f} GiB of memory, "
        f"for some {_RUNGS} rungs"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ladder`."""
    group = parser.add_argument_group("what is run")
    group.add_argument(
        "--layer",
        type=options.layers,
        default=((0,), False),
        metavar="N",
        help="the layer whose ops are compared (default 0); tokens go through all layers",
    )
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=LadderRequest.max_new_tokens,
        metavar="N",
        help=f"tokens of a prompt to show (default {LadderRequest.max_new_tokens})",
    )
    group.add_argument(
        "--prompt-ids",
        action="append",
        metavar="IDS",
        help="a prompt as 1,2,3; once a slot, or 1,2,3;4,5, or @FILE (default: two hard-coded)",
    )
    group.add_argument(
        "--decode-ids",
        action="append",
        metavar="IDS",
        help="tokens that decode takes where ops are compared; 128009 ends a slot after prefill",
    )
    group.add_argument(
        "--no-battery",
        dest="battery",
        action="store_false",
        help="compare on the model's own activations only",
    )
    options.add_common(parser)


def from_args(args: argparse.Namespace) -> LadderRequest:
    """The request that the parsed options make."""
    layers, _ = args.layer
    if len(layers) != 1:
        raise UsageError("--layer must be one layer for ladder; name the first that fails")
    model, seed = options.model_of(args)
    return LadderRequest(
        layer=layers[0],
        max_new_tokens=args.max_new_tokens,
        prompt_ids=args.prompt_ids and prompt.parse_ids(args.prompt_ids, "--prompt-ids"),
        decode_ids=args.decode_ids and prompt.parse_ids(args.decode_ids, "--decode-ids"),
        model=model,
        seed=seed,
        device=args.device,
        kernels=options.kernels_of(args),
        battery=args.battery,
        output=options.output_of(args),
        command=args.command,
    )


def run(args: argparse.Namespace) -> int:
    """Climb, report, and give the exit code."""
    request = from_args(args)
    from harness.progress import Progress
    from harness.report.ladder import as_json, as_text

    with Progress() as progress:
        report = ladder(request, progress)
    output = request.output
    output.write_either(lambda: as_text(report, output.verbosity), lambda: as_json(report))
    return report.exit_code
