"""Prompts and forced tokens as token ids, checked against what the engine takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from harness.errors import UsageError
from reference.config import Config

SLOTS: Final = 2  # BATCH_SIZE (main.cpp:12-38, as the two below)
MAX_PROMPT_LEN: Final = 512
MAX_SEQ_LEN: Final = 2048
HARD_CODED_LENGTHS: Final = (17, 14, 13, 14)  # of the four prompts (main.cpp:583-594)

Ids = tuple[int, ...]


def parse_ids(texts: Iterable[str], option: str) -> tuple[Ids, ...]:
    """Lists of token ids from the values of a repeatable `option`.

    A value holds ids separated by commas or spaces, and lists separated by semicolons; `@FILE`
    reads a value from a file, where a line break also ends a list. Every list must hold an id, and
    every id must be in the vocabulary, or UsageError is raised.
    """
    lists = []
    for text in texts:
        if text.startswith("@"):
            # A file's line breaks end a list, but its blank lines are none.
            parts = re.sub(r"\s*\n\s*", ";", _read(text[1:], option).strip()).split(";")
        else:
            parts = text.split(";")
        lists += [_parse_list(part, option) for part in parts]
    return tuple(lists)


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{option} can not read {path}: {reason}") from error


def _parse_list(text: str, option: str) -> Ids:
    words = text.replace(",", " ").split()
    if not words:
        raise UsageError(f"{option} must hold token ids, such as 1,2,3 (got {text!r})")
    wrong = next((word for word in words if not re.fullmatch(r"-?\d+", word, re.ASCII)), None)
    if wrong is not None:
        raise UsageError(f"{option} must hold token ids separated by commas (got {wrong!r})")
    ids = tuple(int(word) for word in words)
    check_vocabulary(ids, option)
    return ids


def check_vocabulary(ids: Sequence[int], option: str) -> None:
    """Raise UsageError where an id is not in the vocabulary."""
    last = Config().vocab - 1
    for token in ids:
        if not 0 <= token <= last:
            raise UsageError(f"{option}: a token id must be 0 to {last} (got {token})")


def check_prompts(prompts: Sequence[Sequence[int]], option: str) -> None:
    """Raise UsageError where the engine has no room for one of these prompts.

    Two run at a time; more wait for a slot, as upstream's queue has them wait.
    """
    if not prompts:
        raise UsageError(f"{option} must give at least one prompt (got none)")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"{option}: prompt {number} is empty; give at least one token")
        if len(prompt) > MAX_PROMPT_LEN:
            raise UsageError(
                f"{option}: a prompt must be at most {MAX_PROMPT_LEN} tokens "
                f"(prompt {number} has {len(prompt)})"
            )


def check_length(prompts: Sequence[Sequence[int]] | None, steps: int) -> None:
    """Raise UsageError where a sequence would outgrow the engine. None: the hard-coded prompts."""
    lengths = HARD_CODED_LENGTHS[:SLOTS] if prompts is None else [len(p) for p in prompts]
    longest = max(lengths)
    if longest + steps > MAX_SEQ_LEN:
        raise UsageError(
            f"prompt and steps must be at most {MAX_SEQ_LEN} tokens together "
            f"(got {longest} + {steps}); lower --steps to {MAX_SEQ_LEN - longest}"
        )


def has_tokenizer(model: str) -> bool:
    """Whether the model folder holds a tokenizer for `encode`."""
    return any((Path(model) / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def encode(model: str, texts: Sequence[str]) -> tuple[Ids, ...]:
    """Token ids of `texts` by the tokenizer in the folder `model`, its start token included.

    Raises UsageError where the folder has no tokenizer, or a text is no prompt for the engine.
    """
    if not has_tokenizer(model):
        raise UsageError(
            f"--prompt needs a --model folder with a tokenizer (got {model}); use --prompt-ids"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--prompt can not load the tokenizer in {model}: {reason}") from error
    prompts = tuple(tuple(int(i) for i in tokenizer(text)["input_ids"]) for text in texts)
    check_prompts(prompts, "--prompt")
    for prompt in prompts:
        check_vocabulary(prompt, "--prompt")
    return prompts
