"""The options that verbs share, and the values they take.

A value that can not be is an `argparse.ArgumentTypeError` here, which the parser shows with the
option's name, or a UsageError where it takes more than the text to tell.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from harness.errors import UsageError
from harness.repairs import REPAIRS
from harness.report.output import FORMATS, Output
from reference.config import Config

SYNTHETIC: Final = "synthetic"
DEVICES: Final = ("auto", "host", "cuda")
MAX_SEED: Final = 2**64 - 1  # a word of Philox's key


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of the engine and those of the report."""
    add_engine(parser)
    add_output(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--model, --seed, --device and --kernels."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        default=SYNTHETIC,
        metavar=f"{SYNTHETIC}|PATH",
        help="a Hugging Face folder or .safetensors file (default: made-up weights)",
    )
    group.add_argument(
        "--seed", type=seed, metavar="N", help="of the synthetic weights (default 0)"
    )
    group.add_argument(
        "--device",
        type=one_of(DEVICES),
        default="auto",
        metavar="|".join(DEVICES),
        help="where the engine runs; host is the CPU (default: cuda if there is a GPU)",
    )
    group.add_argument("--kernels", metavar="FILE", help="another kernels.cu to run")


def add_repair(parser: argparse.ArgumentParser) -> None:
    """--repair, for verbs that can run with repairs."""
    parser.add_argument(
        "--repair",
        action="append",
        default=[],
        metavar="LIST",
        help=f"run with repairs, written a,b: {', '.join(REPAIRS)}",
    )


def add_graph(parser: argparse.ArgumentParser) -> None:
    """--graph."""
    parser.add_argument(
        "--graph", action="store_true", help="let CUDA graphs replay the decode step (GPU only)"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """--format, -o, -v and -q."""
    group = parser.add_argument_group("report")
    group.add_argument(
        "--format",
        type=one_of(FORMATS),
        default="text",
        metavar="|".join(FORMATS),
        help="(default text)",
    )
    group.add_argument("-o", dest="output", metavar="FILE", help="write the report to a file")
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument(
        "-v", dest="verbosity", action="store_const", const=1, help="every result and every figure"
    )
    loudness.add_argument(
        "-q", dest="verbosity", action="store_const", const=-1, help="culprits and counts only"
    )
    parser.set_defaults(verbosity=0)


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """A type whose value is one of `words`."""

    def word(text: str) -> str:
        if text not in words:
            listed = f"{', '.join(words[:-1])} or {words[-1]}"
            raise argparse.ArgumentTypeError(f"must be {listed} (got {text!r})")
        return text

    return word


def layers(text: str) -> tuple[tuple[int, ...], bool]:
    """The layers of `N`, `A-B` or `all`, and whether it was `all`."""
    count = Config().layers
    if text == "all":
        return tuple(range(count)), True
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be N, A-B or all (got {text!r})")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if max(first, last) >= count:
        raise argparse.ArgumentTypeError(f"must be 0 to {count - 1} (got {text})")
    if last < first:
        raise argparse.ArgumentTypeError(f"must be A-B with A not above B (got {text})")
    return tuple(range(first, last + 1)), False


def seed(text: str) -> int:
    """A seed: 0 to MAX_SEED."""
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 to 2^64 - 1 (got {text!r})")
    return int(text)


def model_of(args: argparse.Namespace) -> tuple[str, int]:
    """--model and --seed. UsageError if the path is not there, or a seed means nothing to it."""
    if args.model == SYNTHETIC:
        return args.model, args.seed or 0
    if not Path(args.model).exists():
        raise UsageError(
            f"--model must be {SYNTHETIC} or a path (got {args.model!r}, which is not there)"
        )
    if args.seed is not None:
        raise UsageError("--seed applies to synthetic weights only; drop it or --model")
    return args.model, 0


def kernels_of(args: argparse.Namespace) -> Path | None:
    """--kernels. UsageError if it is no file."""
    if args.kernels is None:
        return None
    path = Path(args.kernels)
    if not path.is_file():
        raise UsageError(f"--kernels must name a file (got {args.kernels!r}, which is none)")
    return path


def output_of(args: argparse.Namespace) -> Output:
    """--format, -o, -v and -q; `-o -` is standard output."""
    path = None if args.output in (None, "-") else Path(args.output)
    if args.output == "":
        raise UsageError("-o must name a file (got '')")
    return Output(args.format, path, args.verbosity)
