"""The host calls of upstream's `kernels.cuh`: what `main.py` calls to run a kernel.

Grid, block and guards are not written here: they are lifted from the kernels file, so that a
user's file launches as it says itself.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any, TextIO, TypeAlias

import numpy as np

from kernels.declarations import Survey, survey
from kernels.lift import KernelsFile, Launch, Refusal
from kernels.tokens import expand, read
from port.device import Device, MemcpyKind, Pointer

_F = np.float32


# A call: its name, then the values that upstream passes. Flat: a decode step looks 162 of them up.
_Call: TypeAlias = "tuple[Any, ...]"

MOST_KNOWN = 2**16  # calls remembered; 2,048 tokens make about 8,000 different ones


class HostCalls:
    """The eleven calls on one device, and the RoPE tables that one of them needs."""

    def __init__(self, kernels: KernelsFile, device: Device, out: TextIO | None = None) -> None:
        self._kernels = kernels
        self._device = device
        self._out = out if out is not None else sys.stdout
        self._globals: dict[str, int] = {}
        self._known: dict[_Call, Launch] = {}
        self._alike: dict[tuple[Any, ...], Launch] = {}
        self._places: dict[str, dict[int, tuple[int, int]]] = {}

    def with_kernels(self, kernels: KernelsFile, device: Device) -> HostCalls:
        """The same calls and tables, launching the kernels of another file on `device`."""
        other = HostCalls(kernels, device, self._out)
        other._globals = self._globals
        return other

    def _call(self, call: _Call) -> None:
        launch = self._known.get(call)
        if launch is None:
            launch = self._look_into(call)
            if launch is None:
                return
        self._device.launch(launch)

    def _look_into(self, call: _Call) -> Launch | None:
        """What the kernels file launches for a call not seen before; None where it refuses.

        Interpreting a host function takes longer than ten launches, and every decode step has
        positions that are new; so what only passes through is put into a launch made before.
        """
        name, *values = call
        places = self._places.get(name)
        if places is None:
            places = self._places[name] = handed_on(self._kernels, name)
        alike = (name, *(None if at in places else value for at, value in enumerate(values)))
        made = self._alike.get(alike)
        if made is not None and all(0 <= values[at] < end for at, (_, end) in places.items()):
            arguments = list(made.arguments)
            for at, (argument, _) in places.items():
                arguments[argument] = int(values[at])
            made = replace(made, arguments=tuple(arguments))
        else:
            answer = self._kernels.call(name, *values, globals=self._globals)
            if isinstance(answer, Refusal):
                # Upstream prints (without a newline) and carries on without the kernel.
                self._out.write(answer.notice)
                return None
            made = self._alike[alike] = answer
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[call] = made
        return made

    def init_rope_frequencies(
        self,
        head_dim: int,
        max_seq_len: int,
        theta: float,
        factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        original_context: int,
    ) -> None:
        """kernels.cu:96-152. Computes the tables on the host and uploads all three arrays."""
        self._known.clear()
        self._alike.clear()
        inv_freq = rope_frequencies(
            head_dim, theta, factor, low_freq_factor, high_freq_factor, original_context
        )
        cos, sin = rope_tables(inv_freq, max_seq_len)
        for name, array in (("inv_freq", inv_freq), ("cos", cos), ("sin", sin)):
            pointer = self._device.malloc(array.nbytes, f"rope {name}")
            self._device.memcpy(pointer, array, array.nbytes, MemcpyKind.HOST_TO_DEVICE)
            self._globals[name] = pointer

    def embedding_gather(self, tokens: Pointer, out: Pointer, table: Pointer, n: int) -> None:
        self._call(("embeddingGather", tokens, out, table, n))

    def rms_norm(self, x: Pointer, out: Pointer, weight: Pointer, n: int) -> None:
        self._call(("rmsNorm", x, out, weight, n))

    def rope(self, x: Pointer, n: int, dim: int) -> None:
        self._call(("rope", x, n, dim))

    def causal_mask(self, scores: Pointer, n: int) -> None:
        self._call(("causalMask", scores, n))

    def softmax(self, scores: Pointer, n: int) -> None:
        self._call(("softmax", scores, n))

    def residual_add(self, x: Pointer, y: Pointer, n: int) -> None:
        self._call(("residualAdd", x, y, n))

    def silu(self, a: Pointer, b: Pointer, n: int) -> None:
        self._call(("silu", a, b, n))

    def embedding_gather_decode(self, last: Pointer, m: int, out: Pointer, table: Pointer) -> None:
        self._call(("embeddingGatherDecode", last, m, out, table))

    def rope_decode(self, x: Pointer, pos: int, dim: int) -> None:
        self._call(("ropeDecode", x, pos, dim))

    def softmax_decode(self, scores: Pointer, length: int) -> None:
        self._call(("softmaxDecode", scores, length))

    def paged_attention(
        self,
        layer: int,
        m: int,
        q: Pointer,
        kv_cache: Pointer,
        block_table: Pointer,
        seq_lens: Pointer,
        active_slots: Pointer,
        out: Pointer,
    ) -> None:
        self._call(
            ("pagedAttention", layer, m, q, kv_cache, block_table, seq_lens, active_slots, out)
        )


def handed_on(kernels: KernelsFile, name: str) -> dict[int, tuple[int, int]]:
    """What host call `name` does nothing with but pass to its one launch, pointers and ints.

    Index among its parameters -> index among the kernel's arguments, and what it must be below.
    """
    call = kernels.host_calls[name]
    found = _surveyed(str(kernels.path), kernels.text)
    body = expand(found.functions[name].body, found.source.macros, found.source.name)
    words = [token.text for token in body]
    if words.count("<<<") != 1:
        return {}
    takes = kernels.kernels[call.kernel].parameters
    places: dict[int, tuple[int, int]] = {}
    for index, parameter in enumerate(call.parameters):
        if words.count(parameter.name) == call.arguments.count(parameter.name) == 1:
            argument = call.arguments.index(parameter.name)
            if parameter.pointer and takes[argument].pointer:
                places[index] = argument, 2**64
            elif parameter.ctype == takes[argument].ctype == "int":
                places[index] = argument, 2**31
    return places


@lru_cache(maxsize=4)
def _surveyed(path: str, text: str) -> Survey:
    return survey(read(path, text))


def _c_float_function(name: str, arguments: int) -> ctypes._NamedFuncPointer:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    function = getattr(library, name)
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * arguments
    return function


def rope_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> np.ndarray:
    """Llama-3 scaled inverse frequencies, float32 (head_dim / 2,), in upstream's float32 steps.

    The power is the C library's powf: NumPy's float32 power differs in 7 of the 32 entries.
    """
    powf = _c_float_function("powf", 2)
    low_wavelength = _F(original_context) / _F(low_freq_factor)
    high_wavelength = _F(original_context) / _F(high_freq_factor)
    inv_freq = np.empty(head_dim // 2, np.float32)  # (32,)
    for i in range(head_dim // 2):
        frequency = _F(1.0) / _F(powf(theta, _F(2 * i) / _F(head_dim)))
        # pi and the division are double, the result is stored as a float.
        wavelength = _F(2.0 * math.pi / float(frequency))
        if wavelength > low_wavelength:
            inv_freq[i] = frequency / _F(factor)
        elif wavelength >= high_wavelength:
            smooth = (_F(original_context) / wavelength - _F(low_freq_factor)) / (
                _F(high_freq_factor) - _F(low_freq_factor)
            )
            inv_freq[i] = (_F(1.0) - smooth) * frequency / _F(factor) + smooth * frequency
        else:
            inv_freq[i] = frequency
    return inv_freq


def rope_tables(inv_freq: np.ndarray, max_seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin tables, float32 (max_seq_len, head_dim); entries 2i and 2i+1 are the same.

    By the C library's cosf and sinf: NumPy's float32 ones differ in the last bit here and there.
    """
    cosf, sinf = _c_float_function("cosf", 1), _c_float_function("sinf", 1)
    angles = (np.arange(max_seq_len, dtype=np.float32)[:, None] * inv_freq).ravel().tolist()
    shape = (max_seq_len, len(inv_freq))
    cos = np.fromiter(map(cosf, angles), np.float32, len(angles)).reshape(shape)
    sin = np.fromiter(map(sinf, angles), np.float32, len(angles)).reshape(shape)
    return np.repeat(cos, 2, axis=1), np.repeat(sin, 2, axis=1)  # (max_seq_len, 64) each
