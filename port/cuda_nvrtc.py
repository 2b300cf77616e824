"""From the text of a kernels file to machine code for one GPU, by NVRTC; needs no GPU.

NVRTC's defaults are nvcc's: products and sums may be fused, no fast math. The result is a cubin for
exactly one architecture, because PTX of a newer NVRTC would not run on an older driver.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernels.compiler import cache_folder
from kernels.errors import KernelsError
from kernels.lift import KernelsFile
from port.device import DeviceError

EXTRA = "pip install 'tiny-vllm-diff[cuda]'"

_OPTIONS = ("--std=c++17", "--disable-warnings")
_HEADER = "cuda_bf16.h"

# For files that use int32_t and the like: saves a dependency on libcu++, which is 100 times larger.
_CSTDINT = b"""\
#pragma once
namespace cuda { namespace std {
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
} }
"""
_ERROR = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?:catastrophic )?error[^:]*: (?P<text>.+)$")


def compile_kernels(kernels: KernelsFile, architecture: int) -> bytes:
    """The cubin of `kernels` for `architecture` (90 for compute capability 9.0), cached by content.

    Raises KernelsError where the text does not compile (`detail`: NVRTC's log, in the user's own
    lines), DeviceError where NVRTC, its headers or its support for the architecture is missing.
    """
    nvrtc = _nvrtc()
    supported = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    if architecture not in supported:
        raise DeviceError(
            f"the GPU's architecture must be one that NVRTC knows, sm_{min(supported)} to "
            f"sm_{max(supported)} (got sm_{architecture}); use another NVRTC or --device host"
        )
    include = header_folder()
    cached = _cache_file(kernels, architecture, include, nvrtc)
    try:
        return cached.read_bytes()
    except OSError:
        cubin = _compile(nvrtc, kernels, architecture, include)
        _store(cached, cubin)
        return cubin


def header_folder() -> Path:
    """The folder with cuda_bf16.h: of NVIDIA's wheels, or of a toolkit. DeviceError if none."""
    for folder in _header_folders():
        if (folder / _HEADER).is_file():
            return folder
    raise DeviceError(
        f"CUDA's header {_HEADER} must be there to compile kernels (got no wheel "
        f"nvidia-cuda-runtime and no toolkit under CUDA_HOME or /usr/local/cuda); {EXTRA}"
    )


def _header_folders() -> Iterator[Path]:
    wheels = importlib.util.find_spec("nvidia")
    for root in (wheels.submodule_search_locations if wheels else None) or ():
        yield Path(root) / "cu13" / "include"
        yield Path(root) / "cuda_runtime" / "include"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    yield Path("/usr/local/cuda/include")


def _nvrtc() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries have to say about each other
            from cuda.bindings import nvrtc
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # no bindings; no library
        raise DeviceError(
            f"NVRTC must be installed to compile kernels for a GPU (got: {one_line(error)}); "
            f"{EXTRA}"
        ) from None
    return nvrtc


def one_line(error: BaseException) -> str:
    """What an error of somebody else's says, for a message of ours."""
    return " ".join(str(error).split()) or type(error).__name__


def _checked(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    """The values after an NVRTC status, or DeviceError; its one place but for _compile's."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if len(values) == 1 else values


def _compile(nvrtc: Any, kernels: KernelsFile, architecture: int, include: Path) -> bytes:
    options = [
        option.encode()
        for option in (
            f"--gpu-architecture=sm_{architecture}",
            f"--include-path={include}",
            *_OPTIONS,
        )
    ]
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            kernels.device_text.encode(),
            os.fsencode(kernels.path),
            1,
            [_CSTDINT],
            [b"cuda/std/cstdint"],
        ),
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise _compile_error(kernels, log.rstrip(b"\0 \n").decode(errors="replace"))
        _checked(nvrtc, (status,))
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def _compile_error(kernels: KernelsFile, log: str) -> KernelsError:
    for line in log.splitlines():
        found = _ERROR.match(line)
        if found:
            where = f"{found['file']}:{found['line']}"
            return KernelsError(f"{where}: {found['text']}", log)
    first = log.splitlines()[0] if log else "no message"
    return KernelsError(f"{kernels.path}: NVRTC does not compile it: {first}", log)


# --- cache ----------------------------------------------------------------------------------------


def _cache_file(kernels: KernelsFile, architecture: int, include: Path, nvrtc: Any) -> Path:
    content = hashlib.sha256()
    header = (include / _HEADER).stat()
    for part in (
        _checked(nvrtc, nvrtc.nvrtcVersion()),
        _OPTIONS,
        (str(include), header.st_size, header.st_mtime_ns),
        kernels.device_text,
    ):
        content.update(repr(part).encode())
    return cache_folder() / f"sm_{architecture}-{content.hexdigest()[:32]}.cubin"


def _store(file: Path, data: bytes) -> None:
    """Put `data` there in one step; a cache that cannot be written is none."""
    try:
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(name, file)
    except OSError:
        pass
