"""Run the engine as a program: upstream's prompts, prints and faults.

Without options it runs the four hard-coded prompts until each reaches an end token or the longest
sequence, as upstream does; on a CPU that takes hours, so limit it.

example:
  python -m harness generate --max-new-tokens 8
  python -m harness generate --max-seq-len 48
  python -m harness generate --model ./Llama-3.2-1B-Instruct --prompt "What is 2+2?"
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from harness import options, prompt
from harness.errors import UsageError
from harness.prompt import Ids
from harness.repairs import PREFILL_EOS, apply_repairs, parse_repairs

if TYPE_CHECKING:
    from port.observer import Observer


@dataclass(frozen=True)
class GenerateRequest:
    """What `generate` is asked to do. Raises UsageError for what can not be done.

    prompt_ids: one tuple of token ids a prompt, None for the hard-coded ones. max_new_tokens: a
    sequence's end, None for no limit. max_seq_len: where upstream's MAX_SEQ_LEN would end one.
    """

    prompt_ids: tuple[Ids, ...] | None = None
    max_new_tokens: int | None = None
    max_seq_len: int = prompt.MAX_SEQ_LEN
    model: str = options.SYNTHETIC
    seed: int = 0
    device: str = "auto"
    kernels: Path | None = None
    repairs: tuple[str, ...] = ()
    graph: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(
                f"--max-new-tokens must be 1 or more (got {self.max_new_tokens}); leave it out"
            )
        if not 2 <= self.max_seq_len <= prompt.MAX_SEQ_LEN:
            raise UsageError(
                f"--max-seq-len must be 2 to {prompt.MAX_SEQ_LEN} (got {self.max_seq_len})"
            )
        lengths = (
            prompt.HARD_CODED_LENGTHS
            if self.prompt_ids is None
            else [len(ids) for ids in self.prompt_ids]
        )
        if max(lengths) >= self.max_seq_len:
            raise UsageError(
                f"--max-seq-len must be above the longest prompt's {max(lengths)} tokens "
                f"(got {self.max_seq_len})"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    group = parser.add_argument_group("what is generated")
    group.add_argument(
        "--prompt-ids",
        action="append",
        metavar="IDS",
        help="a prompt as 1,2,3; several wait for a free slot (default: the four hard-coded)",
    )
    group.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt as text; needs a --model folder with a tokenizer",
    )
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="tokens of a prompt (default: no limit)"
    )
    group.add_argument(
        "--max-seq-len",
        type=int,
        default=prompt.MAX_SEQ_LEN,
        metavar="N",
        help=f"where a sequence ends (default {prompt.MAX_SEQ_LEN})",
    )
    options.add_engine(parser)
    options.add_repair(parser)
    options.add_graph(parser)


def from_args(args: argparse.Namespace) -> GenerateRequest:
    """The request that the parsed options make."""
    if args.prompt and args.prompt_ids:
        raise UsageError("--prompt and --prompt-ids must not both be given; drop one")
    model, seed = options.model_of(args)
    if args.prompt:
        ids: tuple[Ids, ...] | None = prompt.encode(model, args.prompt)
    elif args.prompt_ids:
        ids = prompt.parse_ids(args.prompt_ids, "--prompt-ids")
        prompt.check_prompts(ids, "--prompt-ids")
    else:
        ids = None
    return GenerateRequest(
        prompt_ids=ids,
        max_new_tokens=args.max_new_tokens,
        max_seq_len=args.max_seq_len,
        model=model,
        seed=seed,
        device=args.device,
        kernels=options.kernels_of(args),
        repairs=parse_repairs(args.repair),
        graph=args.graph,
    )


def run(args: argparse.Namespace) -> int:
    """Generate, printing as upstream does. Exit code: main's own (0)."""
    return generate(from_args(args), sys.stdout)


def generate(request: GenerateRequest, out: TextIO) -> int:
    """Run the port as a program that prints to `out`; the status that upstream's main returns.

    What upstream ignores (a failed launch, a write outside a buffer) is told on standard error.
    """
    from harness.devices import open_device
    from harness.model_file import model_file
    from kernels.lift import lift
    from port.device import Incident
    from port.main import CHAT_PROMPTS, Engine
    from port.main import run as run_engine
    from reference.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(request.model, seed=request.seed, cache_bytes=0)
    kernels = apply_repairs(lift(request.kernels), request.repairs)
    device = open_device(request.device, kernels, request.graph)
    told: set[Incident] = set()

    def tell(incident: Incident) -> None:
        if incident not in told:
            told.add(incident)
            print(f"warning: {incident.message}", file=sys.stderr)

    device.on_incident = tell
    engine = Engine(
        device,
        kernels,
        model_file(checkpoint),
        prompts=request.prompt_ids or CHAT_PROMPTS,
        max_seq_len=request.max_seq_len,
        observer=_limit(request.max_new_tokens),
        out=out,
        check_eos_after_prefill=PREFILL_EOS in request.repairs,
    )
    return run_engine(engine)


def _limit(max_new_tokens: int | None) -> Observer:
    """An observer that ends a sequence after so many tokens, as an end token would."""
    from port.main import EOT_ID_TOKEN_ID, Engine, free_slot
    from port.observer import Observer

    if max_new_tokens is None:
        return Observer()
    limit = max_new_tokens

    class Limit(Observer):
        def __init__(self) -> None:
            self.left: dict[int, int] = {}

        def prefill_begins(self, engine: Engine, slot: int, num_tokens: int) -> None:
            self.left[slot] = limit

        def prefill_ends(self, engine: Engine, slot: int) -> None:
            if self.left[slot] == 0:
                free_slot(engine, slot)

        def token(self, slot: int, token: int) -> int:
            self.left[slot] -= 1
            return token if self.left[slot] else EOT_ID_TOKEN_ID

    return Limit()
