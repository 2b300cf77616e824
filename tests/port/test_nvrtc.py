"""Our kernels compile for every generation of GPU that NVRTC knows. Needs NVRTC, but no GPU."""

import sys
from pathlib import Path

import pytest

from kernels.errors import KernelsError
from kernels.lift import HOST_CALLS, KernelsFile, lift, lift_text
from port.cuda_nvrtc import compile_kernels, header_folder
from port.device import DeviceError

ARCHITECTURES = (75, 80, 90, 100, 120)  # Turing, Ampere, Hopper, Blackwell (two)


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    """Linux has wheels of NVRTC, so that a missing one is a failure there, and nowhere else."""
    try:
        header_folder()
        compile_kernels(lift(), 90)
    except DeviceError as error:
        if sys.platform == "linux":
            raise
        pytest.skip(f"not run: {error}")


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_VLLM_DIFF_CACHE", str(tmp_path))


def changed(old: str, new: str) -> KernelsFile:
    """Our file with one piece of text replaced, as a user's file elsewhere."""
    text = lift().text
    assert old in text
    return lift_text(text.replace(old, new, 1), Path("/home/me/my kernels.cu"), HOST_CALLS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_compile_for_each_architecture(architecture: int) -> None:
    kernels = lift()
    cubin = compile_kernels(kernels, architecture)
    assert cubin[:4] == b"\x7fELF"
    for name in kernels.kernels:
        assert b"\0.text." + name.encode() + b"\0" in cubin


def test_a_compile_error_names_the_users_line_and_keeps_the_log() -> None:
    kernels = changed("d[threadIdx.x] = 1.0f;", "d[threadIdx.x] = uno;")
    line = kernels.text[: kernels.text.index("= uno;")].count("\n") + 1
    with pytest.raises(KernelsError) as caught:
        compile_kernels(kernels, 90)
    where = f"/home/me/my kernels.cu:{line}: "
    assert str(caught.value) == f'{where}identifier "uno" is undefined'
    assert caught.value.detail is not None
    assert f"/home/me/my kernels.cu({line}): error" in caught.value.detail
    assert "d[threadIdx.x] = uno;" in caught.value.detail


def test_fixed_width_integers_need_no_further_package() -> None:
    kernels = changed("float token = ", "uint32_t one = 1; int64_t two = one; float token = two + ")
    assert compile_kernels(kernels, 90)


def test_an_architecture_that_nvrtc_does_not_know_is_a_clear_error() -> None:
    with pytest.raises(DeviceError, match=r"must be one that NVRTC knows.*\(got sm_20\)"):
        compile_kernels(lift(), 20)


def test_a_second_compilation_reads_the_cache(tmp_path: Path) -> None:
    kernels = lift()
    compile_kernels(kernels, 90)
    (stored,) = tmp_path.iterdir()
    stored.write_bytes(b"from the cache")
    assert compile_kernels(kernels, 90) == b"from the cache"
    assert compile_kernels(changed("1.0f", "1.5f"), 90) != b"from the cache"


def test_missing_headers_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("port.cuda_nvrtc._header_folders", lambda: iter([Path("/nowhere")]))
    with pytest.raises(DeviceError, match=r"cuda_bf16\.h must be there.*tiny-vllm-diff\[cuda\]"):
        header_folder()
