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
from dataclasses import dataclass, field

from harness import options, prompt
from harness.errors import UsageError
from harness.prompt import Ids


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
    options: argparse.Namespace = field(default_factory=argparse.Namespace, compare=False)

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
