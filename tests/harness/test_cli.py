"""The command line: verbs, options, mistakes in one line, exit codes, files whole or not at all."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from harness import prompt
from harness.cli import main
from harness.errors import UsageError, user_mistakes
from harness.progress import Progress
from harness.report.output import Output
from harness.request import CompareRequest
from harness.result import Kernels, Model, Report, Result
from harness.taps import OPS

ROOT = Path(__file__).parents[2]


def a_report(verdict: str = "exact", command: str = "python -m harness compare") -> Report:
    return Report.build(
        command=command,
        device="host",
        model=Model("synthetic", 0, None, 16),
        kernels=Kernels("kernels/kernels.cu", "00" * 32),
        mode="isolated",
        results=[Result("prefill", None, None, 0, "mask", "model", verdict)],
        seconds=0.5,
    )


@pytest.fixture
def compare_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CompareRequest]]:
    """Puts a comparison in place that gives `result` (or raises it); returns what it was asked."""

    def put(result: Report | BaseException) -> list[CompareRequest]:
        asked: list[CompareRequest] = []

        def compare(request: CompareRequest, progress: Progress) -> Report:
            asked.append(request)
            if isinstance(result, BaseException):
                raise result
            return replace(result, command=request.command)

        module = ModuleType("harness.compare")
        module.compare = compare  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "harness.compare", module)
        return asked

    return put


@pytest.fixture
def asked(compare_with: Callable[..., list[CompareRequest]]) -> list[CompareRequest]:
    return compare_with(a_report())


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that the command line answers to a mistake."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


# Help and verbs


def test_help_lists_the_verbs_and_an_example(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "compare" in out
    assert "doctor" in out
    assert "example:\n  python -m harness compare --layer 0" in out


def test_no_verb_is_no_success(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["compare", "doctor"])
def test_help_of_a_verb_is_its_docstring_with_an_example(
    verb: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  python -m harness {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["compare", "--help"], ["--help"], ["compare", "--layer", "99"]])
def test_help_and_mistakes_import_nothing_heavy(words: list[str]):
    code = (
        "import sys, harness.cli as c\n"
        "try: c.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["compere"], "did you mean compare?"),
        (["xyz"], "(got 'xyz'); see python -m harness --help"),
        (["compare", "--sede", "1"], "unrecognized arguments: --sede 1; see python -m harness"),
        (["compare", "--lay", "1"], "unrecognized arguments: --lay 1"),
        (["compare", "--op"], "--op expected one argument; see python -m harness compare --help"),
        (["compare", "-v", "-q"], "-q not allowed with argument -v"),
        (["compare", "--racing"], "unrecognized arguments: --racing"),
    ],
)
def test_mistakes_in_the_words_are_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
):
    assert expected in mistake(capsys, *words)


# Options of compare


def test_defaults(asked: list[CompareRequest]):
    assert main(["compare"]) == 0
    (request,) = asked
    assert request == CompareRequest(command="python -m harness compare")
    assert request.layers == (0,)
    assert request.phases == ("prefill", "decode")
    assert request.selects("mask")


@pytest.mark.parametrize(
    ("text", "layers", "whole"),
    [
        ("0", (0,), False),
        ("15", (15,), False),
        ("2-4", (2, 3, 4), False),
        ("7-7", (7,), False),
        ("all", tuple(range(16)), True),
    ],
)
def test_layer(asked: list[CompareRequest], text: str, layers: tuple[int, ...], whole: bool):
    main(["compare", "--layer", text])
    assert (asked[0].layers, asked[0].all_layers) == (layers, whole)


def test_every_option_reaches_the_request(asked: list[CompareRequest], tmp_path: Path):
    kernels = tmp_path / "my.cu"
    kernels.touch()
    words = ["--layer", "1", "--phase", "decode", "--steps", "3", "--op", "rope$", "--strict"]
    words += ["--mode", "propagated", "--device", "host", "--seed", "7", "--no-battery"]
    words += ["--prompt-ids", "1,2", "--prompt-ids", "3 4", "--decode-ids", "5;6,7", "--fail-fast"]
    words += ["--kernels", str(kernels), "-v"]
    main(["compare", *words])
    assert asked == [
        CompareRequest(
            layers=(1,),
            phase="decode",
            steps=3,
            op="rope$",
            mode="propagated",
            device="host",
            seed=7,
            prompt_ids=((1, 2), (3, 4)),
            decode_ids=((5,), (6, 7)),
            kernels=kernels,
            battery=False,
            strict=True,
            fail_fast=True,
            output=Output(verbosity=1),
            command=f"python -m harness compare {shlex.join(words)}",
        )
    ]
    assert [op for op in OPS if asked[0].selects(op)] == ["q_rope", "k_rope"]


@pytest.mark.parametrize(
    "request_",
    [
        CompareRequest(),
        CompareRequest(layers=(2, 3, 4), phase="decode", steps=3, op="a b|rope", strict=True),
        CompareRequest(layers=tuple(range(16)), all_layers=True, mode="propagated", seed=3),
        CompareRequest(
            prompt_ids=((1, 2), (3,)), decode_ids=((4,),), battery=False, fail_fast=True
        ),
        CompareRequest(device="host", kernels=Path("pyproject.toml")),
    ],
)
def test_a_request_made_in_code_knows_its_command(
    asked: list[CompareRequest], request_: CompareRequest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    main(shlex.split(request_.command)[3:])
    assert asked == [request_]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1,2,3", ((1, 2, 3),)),
        ("1 2  3", ((1, 2, 3),)),
        ("1, 2;3", ((1, 2), (3,))),
        ("0;128255", ((0,), (128255,))),
    ],
)
def test_prompt_ids_may_be_written_in_several_ways(
    asked: list[CompareRequest], text: str, ids: tuple, tmp_path: Path
):
    main(["compare", "--prompt-ids", text])
    file = tmp_path / "ids.txt"
    file.write_text("\n" + text.replace(";", "\n\n") + "\n", encoding="utf-8")
    main(["compare", "--prompt-ids", f"@{file}"])
    assert [r.prompt_ids for r in asked] == [ids, ids]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--layer x", "--layer must be N, A-B or all (got 'x')"),
        ("--layer=-1", "--layer must be N, A-B or all (got '-1')"),
        ("--layer 16", "--layer must be 0 to 15 (got 16)"),
        ("--layer 3-16", "--layer must be 0 to 15 (got 3-16)"),
        ("--layer 4-2", "A not above B (got 4-2)"),
        ("--phase middle", "--phase must be prefill, decode or both (got 'middle')"),
        ("--mode x", "--mode must be isolated or propagated (got 'x')"),
        ("--device gpu", "--device must be auto, host or cuda (got 'gpu')"),
        ("--format xml", "--format must be text or json (got 'xml')"),
        ("--steps 0", "--steps must be 1 or more (got 0)"),
        ("--steps x", "--steps"),
        ("--seed -1", "--seed must be a whole number"),
        ("--op sofmax", "did you mean 'softmax'?"),
        ("--op (", "--op must be a regular expression (got '(': "),
        ("--op 0000", "the ops are embed, attn_norm"),
        ("--op attention$ --phase prefill", "attention is no op of prefill"),
        ("--op softmax --phase decode", "softmax is no op of decode"),
        ("--prompt-ids 1,x", "--prompt-ids must hold token ids separated by commas (got 'x')"),
        ("--prompt-ids 1;;2", "--prompt-ids must hold token ids, such as 1,2,3 (got '')"),
        ("--prompt-ids=", "--prompt-ids must hold token ids"),
        ("--prompt-ids 128256", "a token id must be 0 to 128255 (got 128256)"),
        ("--prompt-ids=-1", "a token id must be 0 to 128255 (got -1)"),
        ("--decode-ids 128256", "--decode-ids: a token id must be 0 to 128255"),
        ("--prompt-ids 1;2;3 --decode-ids 1;2;3", "one list a slot, at most 2 (got 3)"),
        ("--prompt-ids 1 --decode-ids 1;2", "--decode-ids must give one list a slot, at most 1"),
        ("--steps 2032", "must be at most 2048 tokens together (got 17 + 2032)"),
        ("--prompt-ids @nowhere", "--prompt-ids can not read nowhere: No such file"),
        ("--prompt hi", "--prompt needs a --model folder with a tokenizer (got synthetic)"),
        ("--model nowhere", "--model must be synthetic or a path (got 'nowhere'"),
        ("--kernels nowhere.cu", "--kernels must name a file (got 'nowhere.cu'"),
        ("-o nowhere/report.txt", "-o can not write nowhere/report.txt: No such file"),
        ("-o .", "-o must name a file (got the folder .)"),
    ],
)
def test_a_value_that_can_not_be_is_one_line_before_any_work(
    words: str, expected: str, asked: list[CompareRequest], capsys: pytest.CaptureFixture[str]
):
    assert expected in mistake(capsys, "compare", *words.split(" "))
    assert asked == []


def test_more_prompts_than_slots_wait_in_the_queue(asked: list[CompareRequest]):
    main(["compare", "--prompt-ids", "1;2;3", "--decode-ids", "4;5"])
    assert asked[0].prompt_ids == ((1,), (2,), (3,))
    assert asked[0].decode_ids == ((4,), (5,))


def test_a_prompt_may_have_512_tokens_and_no_more(
    asked: list[CompareRequest], capsys: pytest.CaptureFixture[str]
):
    main(["compare", "--prompt-ids", "1 " * 512, "--steps", "1536"])
    assert len(asked[0].prompt_ids[0]) == 512  # type: ignore[index]
    capsys.readouterr()
    line = mistake(capsys, "compare", "--prompt-ids", "1 " * 513)
    assert "a prompt must be at most 512 tokens (prompt 0 has 513)" in line
    line = mistake(capsys, "compare", "--prompt-ids", "1 " * 512, "--steps", "1537")
    assert "lower --steps to 1536" in line


def test_steps_do_not_count_where_there_is_no_decode(asked: list[CompareRequest]):
    assert main(["compare", "--phase", "prefill", "--steps", "9999"]) == 0


def test_seed_means_nothing_to_a_checkpoint(
    asked: list[CompareRequest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    main(["compare", "--model", str(tmp_path)])
    assert asked[0].model == str(tmp_path)
    capsys.readouterr()
    line = mistake(capsys, "compare", "--model", str(tmp_path), "--seed", "0")
    assert "--seed applies to synthetic weights only" in line


def test_layers_are_checked_against_the_checkpoint():
    assert CompareRequest(layers=(0, 1)).check_layers(2) == (0, 1)
    assert CompareRequest(layers=tuple(range(16)), all_layers=True).check_layers(3) == (0, 1, 2)
    with pytest.raises(UsageError, match=r"--layer must be 0 to 1 for this checkpoint \(got 2\)"):
        CompareRequest(layers=(1, 2)).check_layers(2)


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "nothing"},
        {"steps": 0},
        {"prompt_ids": ((),)},
        {"prompt_ids": ((1,) * 513,)},
        {"prompt_ids": ((1,),), "prompt": ("hi",)},
        {"decode_ids": ((128256,),)},
    ],
)
def test_a_request_checks_itself(changes: dict):
    with pytest.raises(UsageError):
        CompareRequest(**changes)


def test_limits_are_the_engines():
    from port import main as engine

    assert prompt.SLOTS == engine.BATCH_SIZE
    assert prompt.MAX_PROMPT_LEN == engine.MAX_PROMPT_LEN
    assert prompt.MAX_SEQ_LEN == engine.MAX_SEQ_LEN
    golden = json.loads((ROOT / "tests/golden/engine.json").read_text(encoding="utf-8"))
    lengths = tuple(len(p) for p in golden["prompts"])
    assert lengths == prompt.HARD_CODED_LENGTHS


def test_a_prompt_as_text_goes_through_the_folders_tokenizer(
    asked: list[CompareRequest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "hello": 1, "world": 2, "?": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    model = ["--model", str(tmp_path)]
    assert main(["compare", *model, "--prompt", "hello world", "--prompt", "world"]) == 0
    assert asked[0].prompt_ids == ((0, 1, 2), (0, 2))
    assert asked[0].prompt is None
    capsys.readouterr()
    assert "must not be empty" in mistake(capsys, "compare", *model, "--prompt", " ")
    line = mistake(capsys, "compare", *model, "--prompt", "hello " * 512)
    assert "prompt 0 has 513" in line
    line = mistake(capsys, "compare", *model, "--prompt", "hello", "--prompt-ids", "1")
    assert "must not both be given" in line
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    line = mistake(capsys, "compare", *model, "--prompt", "hello")
    assert "--prompt can not load the tokenizer" in line


# Exit codes


@pytest.mark.parametrize(("verdict", "code"), [("exact", 0), ("equivalent", 0), ("diverged", 1)])
def test_exit_code_is_the_reports(compare_with: Callable, verdict: str, code: int):
    compare_with(a_report(verdict))
    assert main(["compare"]) == code


def test_interrupt_is_130_and_leaves_no_report(
    compare_with: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    compare_with(KeyboardInterrupt())
    assert main(["compare", "-o", str(tmp_path / "r.txt")]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "interrupted; no report was written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_bug_keeps_its_traceback(compare_with: Callable):
    compare_with(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["compare"])


def test_a_bug_is_not_taken_for_an_op_that_failed():
    code = (
        "import runpy, sys, types\n"
        "sys.modules['harness.compare'] = types.ModuleType('harness.compare')\n"
        "sys.argv = ['harness', 'compare']\n"
        "runpy.run_module('harness', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert "ImportError" in done.stderr


def test_every_packages_own_mistakes_are_one_line(
    compare_with: Callable, capsys: pytest.CaptureFixture[str]
):
    from kernels.errors import KernelsError
    from port.device import DeviceError
    from port.weights import WeightsError
    from reference.checkpoint import CheckpointError

    assert set(user_mistakes()) == {
        UsageError,
        KernelsError,
        DeviceError,
        WeightsError,
        CheckpointError,
    }
    for kind in user_mistakes():
        compare_with(kind("it must be A (got B); do C"))
        assert mistake(capsys, "compare") == "it must be A (got B); do C"


def test_detail_of_a_mistake_stands_below_its_line(
    compare_with: Callable, capsys: pytest.CaptureFixture[str]
):
    from kernels.errors import KernelsError

    compare_with(KernelsError("my.cu does not compile", "my.cu:3: error: x\nmy.cu:4: error: y"))
    assert main(["compare"]) == 2
    assert capsys.readouterr().err == (
        "error: my.cu does not compile\nmy.cu:3: error: x\nmy.cu:4: error: y\n"
    )


def test_a_missing_package_is_the_environments_fault_and_a_missing_module_ours(
    compare_with: Callable, capsys: pytest.CaptureFixture[str]
):
    compare_with(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert mistake(capsys, "compare") == "torch is not installed; run make setup"
    compare_with(ModuleNotFoundError("No module named 'harness.x'", name="harness.x"))
    with pytest.raises(ModuleNotFoundError):
        main(["compare"])


# Where the report goes


def test_report_goes_to_standard_output(asked: list, capsys: pytest.CaptureFixture[str]):
    main(["compare"])
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "python -m harness compare"
    assert out.splitlines()[-1].startswith("1 check: 1 exact")
    main(["compare", "--format", "json", "-o", "-"])
    data = json.loads(capsys.readouterr().out)
    assert data["command"] == "python -m harness compare --format json -o -"


@pytest.mark.parametrize("form", ["text", "json"])
def test_report_in_a_file_is_whole_and_replaces_the_old_one(
    compare_with: Callable, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
):
    compare_with(a_report("diverged"))
    path = tmp_path / "report"
    path.write_text("old " * 9999, encoding="utf-8")
    assert main(["compare", "--format", form, "-o", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("#1 prefill mask, layer 0: diverged")
    assert out.splitlines()[-1] == f"Wrote {path}"
    text = path.read_text(encoding="utf-8")
    assert "old" not in text
    assert json.loads(text)["exit_code"] == 1 if form == "json" else "1 diverged" in text
    assert list(tmp_path.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_checking_a_path_leaves_no_trace(tmp_path: Path):
    Output(path=tmp_path / "report.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_written_to_and_never_replaced(
    compare_with: Callable, capsys: pytest.CaptureFixture[str]
):
    compare_with(a_report())
    assert main(["compare", "-o", os.devnull]) == 0
    assert not Path(os.devnull).is_file()


def test_a_link_stays_a_link(compare_with: Callable, tmp_path: Path):
    compare_with(a_report())
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "report")
    assert main(["compare", "-o", str(link)]) == 0
    assert link.is_symlink()
    assert "1 exact" in (tmp_path / "there" / "report").read_text(encoding="utf-8")


def test_a_full_disk_is_one_line_and_leaves_nothing(
    asked: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    path = tmp_path / "r.txt"
    assert "No space left on device" in mistake(capsys, "compare", "-o", str(path))
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error():
    code = (
        "import os, sys\n"
        "from harness.report.output import write_stdout\n"
        "write_stdout('x' * 2_000_000)\n"
        "sys.stderr.write('went on')"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b"went on"
    child.stderr.close()
    assert child.wait() == 0


def test_an_ascii_terminal_gets_ascii(compare_with: Callable, monkeypatch: pytest.MonkeyPatch):
    compare_with(a_report("diverged"))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["compare"]) == 1
    stream.flush()
    assert b"#1 prefill mask" in stream.buffer.getvalue()  # type: ignore[attr-defined]


# Progress


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def progress_on(terminal: bool, times: list[float]) -> str:
    screen = Screen(terminal)
    ticks = iter([0.0, *times])
    with Progress(screen, lambda: next(ticks)) as progress:
        for n, _ in enumerate(times):
            progress.update("prefill", n, 9)
    return screen.getvalue()


def test_progress_waits_two_seconds_and_then_goes_away():
    assert progress_on(True, [0.5, 1.9]) == ""
    shown = progress_on(True, [1.9, 2.1, 2.15, 3.0])
    assert "2 s  prefill 1/9" in shown
    assert "3 s  prefill 3/9" in shown
    assert "2/9" not in shown  # too soon after the one before
    assert shown.endswith("\r\x1b[K")


def test_progress_is_silent_where_nobody_watches_but_an_announcement_is_not():
    assert progress_on(False, [5.0, 9.0]) == ""
    screen = Screen(False)
    Progress(screen).announce("about 3 min and 6 GB")
    assert screen.getvalue() == "about 3 min and 6 GB\n"
