"""The doctor: what it finds, what it says of missing and broken pieces, its exit code."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from harness import doctor
from harness.cli import main
from harness.doctor import Piece, as_text, can_compare, look


def piece(name: str, model: str = "synthetic") -> Piece:
    return next(p for p in look(model) if p.name == name)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it had never been installed."""

    def remove(name: str) -> None:
        version = metadata.version

        def lacking(distribution: str) -> str:
            if distribution == name:
                raise metadata.PackageNotFoundError(name)
            return version(distribution)

        monkeypatch.setattr(metadata, "version", lacking)

    return remove


def test_this_machine_can_compare(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "This machine has"
    assert "PyTorch" in out
    assert out.splitlines()[-1].startswith("compare can run here, on the CPU")


def test_json_holds_every_piece(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["schema", "compare_on_cpu", "pieces", "exit_code"]
    assert (data["compare_on_cpu"], data["exit_code"]) == (True, 0)
    for entry in data["pieces"]:
        assert list(entry) == ["name", "found", "needed", "gives", "remedy"]
        assert entry["gives"]
        assert entry["found"] or entry["remedy"]
    assert {p["name"] for p in data["pieces"] if p["needed"]} == {
        *("Python", "PyTorch", "NumPy", "safetensors", "rich", "C++ compiler", "compile cache")
    }


def test_a_missing_package_that_is_needed_fails(
    without: Callable, capsys: pytest.CaptureFixture[str]
):
    without("torch")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "NEEDED: the reference; GEMM" in out
    assert "run make setup" in out
    assert out.splitlines()[-1] == "compare can not run here before what is NEEDED is there."


def test_a_missing_package_that_is_optional_does_not_fail(
    without: Callable, capsys: pytest.CaptureFixture[str]
):
    without("transformers")
    assert main(["doctor"]) == 0
    lacks = capsys.readouterr().out.partition("It lacks")[2]
    assert "transformers" in lacks


def test_a_package_that_can_not_be_imported_is_missing_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
):
    real = importlib.import_module

    def broken(name: str, package: str | None = None) -> ModuleType:
        if name == "safetensors":
            raise ImportError("libfoo.so:\n  cannot open")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    found = piece("safetensors")
    assert found.found is None
    assert "can not be imported (libfoo.so: cannot open); run make setup" in found.remedy


def test_no_compiler_fails_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    assert main(["doctor"]) == 1
    assert "no program 'no-such-compiler'" in capsys.readouterr().out
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compiler = piece("C++ compiler")
    assert compiler.found is None
    assert "install g++" in compiler.remedy


def test_a_compiler_that_does_not_run_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "false")
    assert "false does not run" in piece("C++ compiler").remedy


def test_tokenizer_is_looked_for_in_the_models_folder(tmp_path: Path):
    assert piece("tokenizer").found is None
    assert "made-up weights have none" in piece("tokenizer").remedy
    assert piece("tokenizer", str(tmp_path)).found is None
    (tmp_path / "tokenizer.json").touch()
    assert piece("tokenizer", str(tmp_path)).found == str(tmp_path)


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


def driver_of(names: list[str], init: Status = Status.CUDA_SUCCESS) -> ModuleType:
    """Stands in for cuda.bindings on a machine with these GPUs."""
    ok = Status.CUDA_SUCCESS
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(  # type: ignore[attr-defined]
        cuInit=lambda flags: (init,),
        cuDriverGetVersion=lambda: (ok, 13020),
        cuDeviceGetCount=lambda: (ok, len(names)),
        cuDeviceGet=lambda ordinal: (ok, ordinal),
        cuDeviceGetName=lambda size, device: (ok, names[device].encode().ljust(size, b"\0")),
        cuDeviceTotalMem=lambda device: (ok, 139 * 2**30),
    )
    return bindings


@pytest.mark.parametrize(
    ("bindings", "found", "remedy"),
    [
        (driver_of(["NVIDIA H200"]), "NVIDIA H200, 139 GiB (CUDA 13.2)", "driver"),
        (driver_of(["A", "B"]), "A, 139 GiB; B, 139 GiB (CUDA 13.2)", "driver"),
        (driver_of([]), None, "the driver sees no GPU"),
        (driver_of([], Status.CUDA_ERROR_NO_DEVICE), None, "the driver says CUDA_ERROR_NO_DEVICE"),
        (None, None, "import of cuda.bindings halted"),
    ],
)
def test_gpus_are_named_or_their_absence_explained(
    monkeypatch: pytest.MonkeyPatch, bindings: ModuleType | None, found: str | None, remedy: str
):
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    gpu = piece("NVIDIA GPU")
    assert gpu.found == found
    assert remedy in gpu.remedy


def test_a_library_that_lacks_its_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    def no_library(flags: int) -> tuple:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    bindings = driver_of([])
    monkeypatch.setattr(bindings.driver, "cuInit", no_library)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert piece("NVIDIA GPU").remedy == "no driver was found; install the driver, 580 or newer"


def test_text_says_what_is_missing_and_how_to_get_it():
    pieces = [
        Piece("A", "1.0", True, "a thing", "get A"),
        Piece("B", None, False, "a better thing", "get B"),
    ]
    assert can_compare(pieces)
    text = as_text(pieces)
    assert text.splitlines()[:6] == [
        "This machine has",
        "  A  1.0",
        "",
        "It lacks",
        "  B  a better thing",
        "     get B",
    ]
    assert not can_compare([*pieces, Piece("C", None, True, "", "get C")])


def test_doctor_needs_no_gpu_package_and_no_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("cuda", "cuda.bindings", "cuda.pathfinder", "nvmath"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["doctor"]) == 0
    assert "--device cuda" in capsys.readouterr().out


def test_missing_pieces_share_one_way_to_say_so():
    assert all(p.remedy for p in look() if p.found is None)
    assert doctor.can_compare([])
