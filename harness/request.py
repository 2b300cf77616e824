"""Compare each op of the engine with a float64 reference, and say which op is wrong.

Every op gets the ideal's own activations (isolated mode), so each answers only for itself: a NaN
in one op hides nothing in the next. An element is judged by the worst rounding error that the op
can have made; there is no tolerance to tune. The exit code is 0 if nothing failed, 1 if something
did, 2 if the command could not be carried out.

example:
  python -m harness compare --layer 0
  python -m harness compare --layer 0-3 --phase decode --steps 2 --op 'rope$'
  python -m harness compare --layer all --format json -o report.json
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from harness import options, prompt
from harness.errors import UsageError
from harness.explain import check_op, print_lesson
from harness.prompt import Ids
from harness.repairs import check_repair, parse_repairs
from harness.report.output import Output
from harness.taps import CONTROL, OPS, TAPS

PHASES: Final = ("prefill", "decode", "both")
MODES: Final = ("isolated", "propagated")


@dataclass(frozen=True)
class CompareRequest:
    """What `compare` is asked to do. Checks itself: raises UsageError for what can not be done.

    layers: the layers to compare, in order; with `all_layers` those of the largest checkpoint, and
      `check_layers` says which the checkpoint at hand has.
    op: a regular expression that is searched in the ops' names; None selects every op.
    prompt_ids, decode_ids: one tuple a slot; None for the hard-coded prompts.
    prompt: texts instead of prompt_ids; `with_prompt_ids` turns them into those.
    """

    layers: tuple[int, ...] = (0,)
    all_layers: bool = False
    phase: str = "both"
    steps: int = 1
    op: str | None = None
    mode: str = "isolated"
    device: str = "auto"
    model: str = options.SYNTHETIC
    seed: int = 0
    prompt_ids: tuple[Ids, ...] | None = None
    decode_ids: tuple[Ids, ...] | None = None
    prompt: tuple[str, ...] | None = None
    kernels: Path | None = None
    repairs: tuple[str, ...] = ()
    battery: bool = True
    races: bool = False
    schedules: int = 0
    strict: bool = False
    fail_fast: bool = False
    explain: str | None = None
    output: Output = field(default_factory=Output)
    command: str = ""  # as typed; made from the other fields where nobody typed it

    def __post_init__(self) -> None:
        if not self.command:
            object.__setattr__(self, "command", self._written())
        if self.steps < 1:
            raise UsageError(
                f"--steps must be 1 or more (got {self.steps}); --phase prefill does without decode"
            )
        if self.op is not None:
            _check_op(self.op, self.phases)
        for name in self.repairs:
            check_repair(name)
        if self.explain is not None:
            check_op(self.explain)
            if self.output.format != "text":
                raise UsageError(f"--explain needs --format text (got {self.output.format})")
        self._check_races()
        self._check_prompts()

    def _check_races(self) -> None:
        if self.schedules < 0:
            raise UsageError(f"--schedules must be 1 or more (got {self.schedules})")
        for option, on in (("--races", self.races), ("--schedules", self.schedules > 0)):
            if on and self.device == "cuda":
                raise UsageError(
                    f"{option} needs --device host (got cuda); on a GPU run compute-sanitizer "
                    "--tool racecheck"
                )
            if on and self.mode != "isolated":
                raise UsageError(f"{option} needs --mode isolated (got {self.mode}); drop one")

    def _check_prompts(self) -> None:
        if self.prompt is not None and self.prompt_ids is not None:
            raise UsageError("--prompt and --prompt-ids must not both be given; drop one")
        if self.prompt is not None and not prompt.has_tokenizer(self.model):
            raise UsageError(
                f"--prompt needs a --model folder with a tokenizer (got {self.model}); "
                "use --prompt-ids"
            )
        for text in self.prompt or ():
            if not text.strip():
                raise UsageError("--prompt must not be empty; give some text")
        if self.prompt_ids is not None:
            prompt.check_prompts(self.prompt_ids, "--prompt-ids")
            for ids in self.prompt_ids:
                prompt.check_vocabulary(ids, "--prompt-ids")
        for ids in self.decode_ids or ():
            prompt.check_vocabulary(ids, "--decode-ids")
        given = self.prompt_ids or self.prompt
        slots = min(len(given), prompt.SLOTS) if given else prompt.SLOTS
        if self.decode_ids is not None and len(self.decode_ids) > slots:
            raise UsageError(
                f"--decode-ids must give one list a slot, at most {slots} "
                f"(got {len(self.decode_ids)})"
            )
        if "decode" in self.phases:
            prompt.check_length(self.prompt_ids, self.steps)

    def _written(self) -> str:
        """The command line that makes this request, apart from the report's options."""
        layers = f"{self.layers[0]}-{self.layers[-1]}" if self.layers[1:] else str(self.layers[0])
        words = ["--layer", "all" if self.all_layers else layers]
        for name in ("phase", "steps", "op", "mode", "device", "model", "seed", "kernels"):
            value = getattr(self, name)
            if value != getattr(CompareRequest, name):
                words += [f"--{name}", str(value)]
        for option, lists in (("prompt", self.prompt_ids), ("decode", self.decode_ids)):
            for ids in lists or ():
                words += [f"--{option}-ids", ",".join(map(str, ids))]
        for text in self.prompt or ():
            words += ["--prompt", text]
        if self.repairs:
            words += ["--repair", ",".join(self.repairs)]
        if self.schedules:
            words += ["--schedules", str(self.schedules)]
        flags = {"--no-battery": not self.battery, "--races": self.races, "--strict": self.strict}
        flags["--fail-fast"] = self.fail_fast
        words += [flag for flag, on in flags.items() if on]
        return shlex.join(["python", "-m", "harness", "compare", *words])

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases to run, in order."""
        return ("prefill", "decode") if self.phase == "both" else (self.phase,)

    def selects(self, op: str) -> bool:
        """Whether --op names this op."""
        return self.op is None or re.search(self.op, op) is not None

    def check_layers(self, available: int) -> tuple[int, ...]:
        """The layers to compare where a checkpoint has `available`. UsageError if one lacks."""
        if self.all_layers:
            return tuple(range(available))
        if self.layers[-1] >= available:
            raise UsageError(
                f"--layer must be 0 to {available - 1} for this checkpoint (got {self.layers[-1]})"
            )
        return self.layers

    def with_prompt_ids(self) -> CompareRequest:
        """The request with the texts of --prompt as token ids. Loads the tokenizer."""
        if self.prompt is None:
            return self
        ids = prompt.encode(self.model, self.prompt)
        return replace(self, prompt=None, prompt_ids=ids)


def _check_op(pattern: str, phases: tuple[str, ...]) -> None:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"--op must be a regular expression (got {pattern!r}: {error}); name an op to be safe"
        ) from error
    here = dict.fromkeys((*(op for phase in phases for op in TAPS[phase]), *CONTROL))
    if any(expression.search(op) for op in here):
        return
    elsewhere = [op for op in OPS if expression.search(op)]
    if elsewhere:
        raise UsageError(
            f"--op must match an op of the phase (got {pattern!r}: {elsewhere[0]} is no op of "
            f"{phases[0]}); change --phase"
        )
    near = difflib.get_close_matches(pattern, here, n=1, cutoff=0.4)
    advice = f"did you mean {near[0]!r}?" if near else f"the ops are {', '.join(here)}"
    raise UsageError(f"--op must match an op (got {pattern!r}); {advice}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    where = parser.add_argument_group("where to look")
    where.add_argument(
        "--layer",
        type=options.layers,
        default=((0,), False),
        metavar="N|A-B|all",
        help="the layers to compare (default 0)",
    )
    where.add_argument(
        "--phase", type=options.one_of(PHASES), default="both", metavar="|".join(PHASES)
    )
    where.add_argument("--steps", type=int, default=1, metavar="T", help="decode steps (default 1)")
    where.add_argument("--op", metavar="REGEX", help="compare only ops whose name matches")
    where.add_argument(
        "--no-battery",
        dest="battery",
        action="store_false",
        help="skip the stress inputs: the model's own activations only",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--mode",
        type=options.one_of(MODES),
        default="isolated",
        metavar="|".join(MODES),
        help="isolated blames an op; propagated lets errors run on (default isolated)",
    )
    how.add_argument(
        "--races",
        action="store_true",
        help="find accesses to memory that no barrier orders (on the CPU)",
    )
    how.add_argument(
        "--schedules",
        type=_count,
        default=0,
        metavar="K",
        help="run each kernel in K more orders of its threads, and compare bits (on the CPU)",
    )
    how.add_argument("--strict", action="store_true", help="harmless variants count as failures")
    how.add_argument("--fail-fast", action="store_true", help="stop at the first op that fails")
    how.add_argument(
        "--explain", metavar="OP", help="then show an op's text, the reference's and its numbers"
    )
    fed = parser.add_argument_group("what is fed")
    fed.add_argument(
        "--prompt-ids",
        action="append",
        metavar="IDS",
        help="a prompt as 1,2,3; once a slot, or 1,2,3;4,5, or @FILE (default: two hard-coded)",
    )
    fed.add_argument(
        "--decode-ids",
        action="append",
        metavar="IDS",
        help="tokens that decode is forced to take, written as --prompt-ids, one list a slot",
    )
    fed.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt as text; needs a --model folder with a tokenizer",
    )
    options.add_repair(parser)
    options.add_common(parser)


def _count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,3}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 to 9999 (got {text!r})")
    return int(text)


def from_args(args: argparse.Namespace) -> CompareRequest:
    """The request that the parsed options make."""
    layers, all_layers = args.layer
    model, seed = options.model_of(args)
    return CompareRequest(
        layers=layers,
        all_layers=all_layers,
        phase=args.phase,
        steps=args.steps,
        op=args.op,
        mode=args.mode,
        device=args.device,
        model=model,
        seed=seed,
        prompt_ids=args.prompt_ids and prompt.parse_ids(args.prompt_ids, "--prompt-ids"),
        decode_ids=args.decode_ids and prompt.parse_ids(args.decode_ids, "--decode-ids"),
        prompt=args.prompt and tuple(args.prompt),
        kernels=options.kernels_of(args),
        repairs=parse_repairs(args.repair),
        battery=args.battery,
        races=args.races,
        schedules=args.schedules,
        strict=args.strict,
        fail_fast=args.fail_fast,
        explain=args.explain,
        output=options.output_of(args),
        command=args.command,
    )


def run(args: argparse.Namespace) -> int:
    """Compare, report, and give the exit code."""
    request = from_args(args).with_prompt_ids()
    from harness.compare import compare
    from harness.progress import Progress

    with Progress() as progress:
        report = compare(request, progress)
    request.output.write(report)
    if request.explain is not None:
        print_lesson(request.explain, report, request.kernels)
    return report.exit_code
