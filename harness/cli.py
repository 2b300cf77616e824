"""The command line: finds the verb, runs it, and turns a user's mistake into one line.

A verb is a module with a docstring (its help, with an example), `add_arguments(parser)` and
`run(args) -> int` (the exit code). To add one: a line in `VERBS`. Nothing heavy is imported before
`run` needs it, so that help and mistakes are quick.

Exit codes: 0 nothing failed, 1 something failed, 2 misuse or missing environment, 3 a bug of ours
(with its traceback), 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from harness.errors import UsageError, user_mistakes

PROGRAM: Final = "python -m harness"
MISUSE: Final = 2
BUG: Final = 3
INTERRUPTED: Final = 130

# verb: (module, what it does)
VERBS: Final = {
    "compare": ("harness.request", "compare each op with a float64 reference; says which is wrong"),
    "ladder": ("harness.ladder", "repair it step by step: which fault matters, with what tokens"),
    "claims": ("harness.claims", "settle what was said of the engine and never run, with figures"),
    "generate": ("harness.generate", "run the engine as a program, with upstream's prints"),
    "bench": ("harness.bench", "time each op, a prefill and a step, beside transformers"),
    "doctor": ("harness.doctor", "what this machine has, and what each missing piece would give"),
}

# Packages that the harness needs at run time: without one, the environment is at fault, not we.
_NEEDED: Final = frozenset({"numpy", "rich", "safetensors", "torch", "transformers"})


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, as all other mistakes are."""

    def error(self, message: str) -> NoReturn:
        # "argument --op: expected one argument" reads better without its first word.
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("interrupted; no report was written", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        print(f"error: {error.name} is not installed; run make setup", file=sys.stderr)
        return MISUSE
    except user_mistakes() as error:
        print(f"error: {error}", file=sys.stderr)
        if detail := getattr(error, "detail", None):
            print(detail, file=sys.stderr)
        return MISUSE


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_help())
        return MISUSE
    verb = words[0]
    if verb in ("-h", "--help"):
        print(_help())
        return 0
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"see {PROGRAM} --help"
        raise UsageError(f"the verb must be {' or '.join(VERBS)} (got {verb!r}); {advice}")
    module = importlib.import_module(VERBS[verb][0])
    parser = _Parser(
        prog=f"{PROGRAM} {verb}",
        usage="%(prog)s [options]",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    args = parser.parse_args(words[1:])
    args.command = f"{PROGRAM} {shlex.join(words)}"
    code: int = module.run(args)
    return code


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {summary}" for verb, (_, summary) in VERBS.items())
    return (
        f"usage: {PROGRAM} VERB [options]\n\n"
        "Says which op of a hand-written CUDA Llama engine is wrong, on any machine.\n\n"
        f"{verbs}\n\n"
        f"example:\n  {PROGRAM} compare --layer 0\n\n"
        f"{PROGRAM} VERB --help tells a verb's options."
    )
