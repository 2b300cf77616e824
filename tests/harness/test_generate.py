"""generate runs the port as upstream's program runs: the same lines, in the same order."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.errors import UsageError
from harness.generate import GenerateRequest, generate

ENGINE = json.loads((Path(__file__).parents[1] / "golden" / "engine.json").read_text())["engine"]


def token_lines(request: GenerateRequest) -> list[str]:
    out = io.StringIO()
    assert generate(request, out) == 0
    assert out.getvalue().endswith("\nGoodbye!\n")
    return [line for line in out.getvalue().splitlines() if line.startswith("Output token")]


def test_every_line_of_the_upstream_program_comes_out_in_its_order() -> None:
    lines = token_lines(GenerateRequest(max_seq_len=ENGINE["max_seq_len"], device="host"))
    form = ENGINE["line"]
    golden = [form.replace("<logit>", a).replace("<id>", str(b)) for a, b in ENGINE["as_is"]]
    assert lines == golden


def test_a_limit_of_new_tokens_ends_each_prompt_and_lets_the_next_one_in() -> None:
    prompts = ((1, 2, 3), (4, 5), (6, 7))
    request = GenerateRequest(prompt_ids=prompts, max_new_tokens=2, device="host")
    assert len(token_lines(request)) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens must be 1 or more"),
        ({"max_seq_len": 4096}, "--max-seq-len must be 2 to 2048"),
        ({"max_seq_len": 17}, "above the longest prompt's 17 tokens"),
    ],
)
def test_what_can_not_be_generated_is_told(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GenerateRequest(**options)  # type: ignore[arg-type]


def test_a_prompt_needs_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "hello"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "tokenizer" in error
