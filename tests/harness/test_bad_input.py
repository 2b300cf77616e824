"""Bad input, through the command line: one clear line on standard error, exit code 2, no file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from harness.cli import main
from kernels.lift import own_path
from reference.checkpoint import open_checkpoint


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that the command prints before it ends with 2."""
    assert main(["compare", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith("error: ")
    assert not any("Traceback" in line for line in lines)
    return "\n".join(lines)


def safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "BF16", shape: tuple[int, ...] = (8,), offsets: tuple[int, int] = (0, 16)):  # type: ignore[no-untyped-def]
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--model", "/no/such/folder"], "not there"),
        (["--layer", "16"], "0 to 15"),
        (["--layer", "x"], "must be N, A-B or all"),
        (["--op", "sofmax"], "softmax"),
        (["--op", "("], "regular expression"),
        (["--repair", "softmax-nam"], "softmax-nan"),
        (["--prompt", "hello"], "tokenizer"),
        (["--prompt-ids", ""], "token ids"),
        (["--prompt-ids", "1,128256"], "128255"),
        (["--prompt-ids", ",".join(["1"] * 513)], "512"),
        (["--steps", "2040"], "2048"),
        (["--device", "cuda"], "driver"),
        (["--device", "tpu"], "auto, host or cuda"),
        (["--seed", "-1"], "0 to 2^64 - 1"),
        (["--kernels", "/no/such.cu"], "must name a file"),
        (["-o", "/no/such/folder/report.json"], "can not write"),
        (["--frobnicate"], "--frobnicate"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_bad_option_is_one_line(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, *words)
    assert error.count("\n") == 0
    assert part in error


def test_files_that_are_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    cases: list[tuple[bytes, str]] = [
        (b"hello", "safetensors"),
        (struct.pack("<Q", 10**12) + b"{}", "header"),
        (struct.pack("<Q", 9) + b"{not json", "JSON"),
    ]
    for data, part in cases:
        path.write_bytes(data)
        error = error_of(capsys, "--model", str(path))
        assert error.count("\n") == 0
        assert part in error


@pytest.mark.parametrize(
    ("header", "data", "part"),
    [
        ({"a": entry(offsets=(0, 400))}, b"\0" * 16, "a"),
        ({"a": entry(), "b": entry(offsets=(8, 24))}, b"\0" * 24, "b"),
        ({"model.norm.weight": entry("BF16", (2048,), (0, 4096))}, b"\0" * 4096, "layers"),
    ],
    ids=["truncated", "overlapping", "no layer"],
)
def test_models_that_are_not_this_one(
    header: object, data: bytes, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = safetensors(tmp_path / "model.safetensors", header, data)
    error = error_of(capsys, "--model", str(path))
    assert error.count("\n") == 0
    assert part in error


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"dtype": "F16"}, "BF16"), ({"shape": [2048, 512]}, "shape")],
    ids=["not BF16", "wrong shape"],
)
def test_a_tensor_that_is_not_as_it_must_be_is_named(
    changes: dict[str, object],
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    header = dict(open_checkpoint("synthetic", layers=1).header())
    name = "model.layers.0.self_attn.k_proj.weight"
    header[name] = {**header[name], **changes}
    path = safetensors(tmp_path / "model.safetensors", header)
    with path.open("r+b") as file:  # the data: a hole of zeros that takes no room
        file.truncate(path.stat().st_size + max(e["data_offsets"][1] for e in header.values()))
    error = error_of(capsys, "--model", str(path))
    assert error.count("\n") == 0
    assert name in error
    assert part in error


def test_a_kernel_file_that_does_not_compile_shows_the_users_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = own_path().read_text()
    target = "    int column = threadIdx.x;\n"
    line = text[: text.index(target)].count("\n") + 1
    path = tmp_path / "mine.cu"
    path.write_text(text.replace(target, "    int column = thread.x;\n"))
    error = error_of(capsys, "--kernels", str(path))
    assert f"{path}:{line}" in error.splitlines()[0]
    assert "thread" in error  # the compiler's own words, below


def test_a_kernel_file_that_lacks_a_kernel_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.cu"
    path.write_text(own_path().read_text().replace("void silu(", "void silu_renamed("))
    error = error_of(capsys, "--kernels", str(path))
    assert error.count("\n") == 0
    assert "silu" in error


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_VLLM_DIFF_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    error = error_of(capsys)
    assert error.count("\n") == 0
    assert "compiler" in error


def test_ctrl_c_leaves_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.compare.compare", interrupted)
    report = tmp_path / "report.json"
    assert main(["compare", "--format", "json", "-o", str(report)]) == 130
    assert not report.exists()
    assert capsys.readouterr().out == ""
