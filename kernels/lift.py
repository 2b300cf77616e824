"""Takes kernels, constants and launches out of a tiny-vllm-like kernels.cu, ours or a user's alike.

    file = lift()                                    # the project's own kernels/kernels.cu
    file.call("rmsNorm", x, out, weight, 17)         # Launch("rmsNormKernel", (17, 1, 1), ...)
    file.device_text                                 # what NVRTC or the CPU's compiler gets

Includes are not followed and host code is not compiled: host calls are interpreted (host.py), and
`device_text` is the file with everything else blanked out, so that its lines stay the user's.
To ask for one more host call, add it to HOST_CALLS.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kernels.declarations import Function, Item, Parameter, Survey, survey
from kernels.errors import KernelsError
from kernels.expression import KNOWN_NAMES, Node, names_in
from kernels.host import (
    Statement,
    StatementParser,
    bind,
    conditions_in,
    function,
    local_names,
    nodes_in,
    run,
)
from kernels.tokens import Token, expand, read
from kernels.values import Pointer, Scope, convert

__all__ = [
    "HOST_CALLS",
    "HostCall",
    "Kernel",
    "KernelsFile",
    "Launch",
    "PackedArguments",
    "Parameter",
    "Refusal",
    "lift",
    "lift_text",
]

# The eleven host calls of engine.md §6 and what each takes: p a pointer, i a whole number.
HOST_CALLS = {
    "embeddingGather": "pppi",
    "rmsNorm": "pppi",
    "rope": "pii",
    "causalMask": "pi",
    "softmax": "pi",
    "residualAdd": "ppi",
    "silu": "ppi",
    "embeddingGatherDecode": "pipp",
    "ropeDecode": "pii",
    "softmaxDecode": "pi",
    "pagedAttention": "iipppppp",
}

# Names that a kernels file may use and that NVRTC does not bring. On the CPU simt.hpp has them.
_PRELUDE = """\
#if defined(__CUDACC_RTC__)
#include <cuda_bf16.h>
#undef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#undef NAN
#define NAN __int_as_float(0x7fffffff)
#undef HUGE_VALF
#define HUGE_VALF __int_as_float(0x7f800000)
#undef HUGE_VAL
#define HUGE_VAL __longlong_as_double(0x7ff0000000000000LL)
#undef M_PI
#define M_PI 3.14159265358979323846
#undef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#undef FLT_MIN
#define FLT_MIN 1.175494351e-38f
#undef FLT_EPSILON
#define FLT_EPSILON 1.192092896e-07f
#undef DBL_MAX
#define DBL_MAX 1.7976931348623157e+308
#undef INT_MAX
#define INT_MAX 2147483647
#undef INT_MIN
#define INT_MIN (-2147483647 - 1)
#undef UINT_MAX
#define UINT_MAX 4294967295u
inline __device__ double pow(double x, float y) { return pow(x, (double)y); }
inline __device__ double pow(float x, double y) { return pow((double)x, y); }
namespace std {
template <class T> inline __device__ constexpr T max(T a, T b) { return a < b ? b : a; }
template <class T> inline __device__ constexpr T min(T a, T b) { return b < a ? b : a; }
inline __device__ float exp(float x) { return ::expf(x); }
inline __device__ double exp(double x) { return ::exp(x); }
inline __device__ float log(float x) { return ::logf(x); }
inline __device__ double log(double x) { return ::log(x); }
inline __device__ float sqrt(float x) { return ::sqrtf(x); }
inline __device__ double sqrt(double x) { return ::sqrt(x); }
inline __device__ float cos(float x) { return ::cosf(x); }
inline __device__ double cos(double x) { return ::cos(x); }
inline __device__ float sin(float x) { return ::sinf(x); }
inline __device__ double sin(double x) { return ::sin(x); }
inline __device__ float fabs(float x) { return ::fabsf(x); }
inline __device__ double fabs(double x) { return ::fabs(x); }
inline __device__ float pow(float x, float y) { return ::powf(x, y); }
inline __device__ double pow(double x, double y) { return ::pow(x, y); }
inline __device__ double pow(double x, float y) { return ::pow(x, (double)y); }
inline __device__ double pow(float x, double y) { return ::pow((double)x, y); }
}
#else
#include "simt.hpp"
#endif
"""
_FIXED_WIDTH = re.compile(r"\bu?int(8|16|32|64)_t\b")


@dataclass(frozen=True)
class PackedArguments:
    """cuLaunchKernel's kernelParams: `pointers[i]` is the address of argument i.

    `storage` holds the arguments themselves; keep this object alive until the launch has returned.
    """

    pointers: ctypes.Array[ctypes.c_void_p]
    storage: tuple[Any, ...]

    @property
    def address(self) -> int:
        return ctypes.addressof(self.pointers)


_SCALARS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "char": ctypes.c_byte,
    "unsigned char": ctypes.c_ubyte,
    "short": ctypes.c_short,
    "unsigned short": ctypes.c_ushort,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "long": ctypes.c_int64,
    "unsigned long": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function; `line` is that of its name, `text` its source as written."""

    name: str
    parameters: tuple[Parameter, ...]
    line: int
    text: str

    def pack(self, arguments: Sequence[int | float]) -> PackedArguments:
        """`arguments` as cuLaunchKernel takes them. KernelsError on a wrong count or type."""
        if len(arguments) != len(self.parameters):
            raise KernelsError(
                f"{self.name} takes {len(self.parameters)} arguments (got {len(arguments)})"
            )
        storage: list[Any] = []
        for parameter, value in zip(self.parameters, arguments, strict=True):
            if parameter.pointer:
                storage.append(ctypes.c_void_p(int(value)))
                continue
            ctype = _SCALARS.get(parameter.type.base)
            if ctype is None:
                raise KernelsError(
                    f"{self.name}: parameter {parameter.name} is of type {parameter.ctype}, "
                    "which cannot be passed; use a pointer or a number"
                )
            storage.append(
                ctype(value if parameter.type.base in ("float", "double") else int(value))
            )
        pointers = (ctypes.c_void_p * max(len(storage), 1))(*map(ctypes.addressof, storage))
        return PackedArguments(pointers, tuple(storage))


@dataclass(frozen=True)
class Launch:
    """One `kernel<<<grid, block, shared>>>(arguments)`; pointers are ints, `shared` is in bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[int | float, ...]
    shared: int = 0


@dataclass(frozen=True)
class Refusal:
    """A host call that launched nothing; `notice` is what it printed, as printed."""

    notice: str


@dataclass(frozen=True)
class HostCall:
    """A host function that launches a kernel.

    kernel, grid, block, arguments and guards are source texts of its (first) launch, for display;
    `evaluate` runs the function. `globals` maps each file-scope variable that it hands to a kernel
    to that kernel parameter's name: their values are not known here.
    """

    name: str
    parameters: tuple[Parameter, ...]
    kernel: str
    grid: str
    block: str
    guards: tuple[str, ...]
    arguments: tuple[str, ...]
    line: int
    globals: Mapping[str, str]
    _file: _Interpreter = field(repr=False, compare=False)

    def evaluate(
        self,
        *values: int | float,
        constants: Mapping[str, int | float] | None = None,
        globals: Mapping[str, int] | None = None,
    ) -> Launch | Refusal:
        """What the call does for these arguments (pointers as ints).

        `constants` replaces the file's own. `globals` gives addresses of file-scope variables, by
        their own name, or by a part of the kernel parameter's or the variable's ("cos", "sin").
        KernelsError if the call cannot be understood or launches more than one kernel.
        """
        return self._file.evaluate(self, values, constants, globals or {})


@dataclass(frozen=True)
class KernelsFile:
    """A kernels file, taken apart. `text` has \\n line ends; `sha256` is that of the file's bytes.

    `kernels` holds the kernels that the host calls launch, and `device_text` what these need; each
    kernel in it is `extern "C"`.
    """

    path: Path
    text: str
    sha256: str
    constants: Mapping[str, int | float]
    kernels: Mapping[str, Kernel]
    host_calls: Mapping[str, HostCall]
    device_text: str

    def call(
        self, name: str, *values: int | float, globals: Mapping[str, int] | None = None
    ) -> Launch | Refusal:
        """What host call `name` launches for `values`; see HostCall.evaluate."""
        if name not in self.host_calls:
            raise KernelsError(f"{self.path} has no host call {name}")
        return self.host_calls[name].evaluate(*values, globals=globals)


def own_path() -> Path:
    return Path(__file__).with_name("kernels.cu")


def lift(path: Path | None = None) -> KernelsFile:
    """The kernels file at `path` (None: the project's own).

    KernelsError, with file:line where there is one, if it is missing or unreadable, lacks one of
    the eleven host calls or its kernel, or holds something there that is not understood.
    """
    path = own_path() if path is None else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KernelsError(f"cannot read {path}: {error.strerror or error}") from None
    return lift_text(data, path, HOST_CALLS)


def lift_text(
    data: bytes | str, path: Path, required: Mapping[str, str] | None = None
) -> KernelsFile:
    """As `lift`, from a file's contents. Without `required`, every kernel and host call is kept."""
    raw = data.encode() if isinstance(data, str) else data
    if b"\0" in raw:
        raise KernelsError(f"{path} is not a text file")
    text = raw.decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")
    found = survey(read(str(path), text))
    interpreter = _Interpreter(found)
    calls = _host_calls(found, interpreter, required)
    names = _launched(found, calls) if required else set(found.kernels)
    kernels = {
        name: Kernel(
            name,
            item.parameters(found),
            item.line,
            text[item.start : item.end],
        )
        for name, item in found.kernels.items()
        if name in names
    }
    return KernelsFile(
        path,
        text,
        hashlib.sha256(raw).hexdigest(),
        interpreter.constants,
        kernels,
        calls,
        _device_text(found, kernels, path),
    )


# --- host calls -----------------------------------------------------------------------------------


class _Interpreter:
    """Runs the host functions of one file."""

    def __init__(self, found: Survey) -> None:
        self.found = found
        self.name = found.source.name
        self.constants = found.constants
        self._bodies: dict[str, Statement] = {}
        self.functions = {
            name: function(
                [(p.type, p.name) for p in item.parameters(found)],
                lambda name=name: self.body(name),  # type: ignore[misc]
                name,
            )
            for name, item in found.functions.items()
            if not item.template
        }

    def body(self, name: str) -> Statement:
        if name not in self._bodies:
            item = self.found.functions[name]
            words = expand(item.body, self.found.source.macros, self.name)
            parser = StatementParser(words, self.name, self.found.aliases)
            self._bodies[name] = parser.body()
        return self._bodies[name]

    def scope(self, constants: Mapping[str, int | float] | None = None) -> Scope:
        return Scope(
            self.name,
            self.constants if constants is None else constants,
            functions=self.functions,
            outer=self.found.explain,
        )

    def evaluate(
        self,
        call: HostCall,
        values: Sequence[int | float],
        constants: Mapping[str, int | float] | None,
        known: Mapping[str, int],
    ) -> Launch | Refusal:
        if len(values) != len(call.parameters):
            raise KernelsError(
                f"{self.name}:{call.line}: {call.name} takes {len(call.parameters)} values "
                f"(got {len(values)})"
            )
        scope = self.scope(constants)
        at = self.found.functions[call.name].name_token
        explain = scope.outer

        def outer(name: str) -> Any:
            if name in self.found.variables:
                size = self.found.variables[name].element_size
                return Pointer(_address_of(name, call, known, scope, at), size)
            return explain(name) if explain else None

        scope.outer = outer
        bind(scope, [(p.type, p.name) for p in call.parameters], values, at)
        run(self.body(call.name), scope)
        if not scope.launches:
            return Refusal("".join(scope.printed))
        if len(scope.launches) > 1:
            raise KernelsError(
                f"{self.name}:{scope.launches[1].line}: {call.name} launches a second kernel; "
                "one host call must launch one kernel"
            )
        launched = scope.launches[0]
        kernel = self.found.kernels.get(launched.kernel)
        if kernel is None:
            raise _no_kernel(self.name, launched.line, call.name, launched.kernel)
        parameters = kernel.parameters(self.found)
        if len(parameters) != len(launched.arguments):
            raise KernelsError(
                f"{self.name}:{launched.line}: {launched.kernel} takes {len(parameters)} arguments "
                f"(got {len(launched.arguments)})"
            )
        arguments = tuple(
            int(made) if isinstance(made, int) else float(made)
            for made in (
                convert(value, parameter.type, at, scope)
                for parameter, value in zip(parameters, launched.arguments, strict=True)
            )
        )
        return Launch(launched.kernel, launched.grid, launched.block, arguments, launched.shared)


def _address_of(
    name: str, call: HostCall, known: Mapping[str, int], scope: Scope, at: Token
) -> int:
    if name in known:
        return known[name]
    for label in (call.globals.get(name, ""), name):
        fits = [key for key in known if key.lower() in label.lower()]
        if len(fits) == 1:
            return known[fits[0]]
    raise scope.error(at, f"{call.name} uses the variable {name}, whose address is not known")


def _no_kernel(name: str, line: int, call: str, kernel: str) -> KernelsError:
    return KernelsError(
        f"{name}:{line}: {call} launches {kernel}, which is no plain __global__ function here"
    )


def _host_calls(
    found: Survey, interpreter: _Interpreter, required: Mapping[str, str] | None
) -> dict[str, HostCall]:
    calls: dict[str, HostCall] = {}
    for name in required or ():
        found.explain(name)
    lacking = [name for name in required or () if name not in found.functions]
    if lacking:
        raise KernelsError(
            f"{found.source.name} lacks the host call{'s' * (len(lacking) > 1)} "
            f"{', '.join(lacking)}; define each as `void {lacking[0]}(...)` in this file"
        )
    launching = [n for n, f in found.functions.items() if any(t.text == "<<<" for t in f.body)]
    for name in required or launching:
        item = found.functions[name]
        parameters = item.parameters(found)
        if required:
            _check_signature(found, item, parameters, required[name])
        calls[name] = _host_call(found, interpreter, item, parameters)
    return calls


def _check_signature(
    found: Survey, item: Function, parameters: Sequence[Parameter], wanted: str
) -> None:
    got = "".join("p" if p.pointer else "i" for p in parameters)
    if got != wanted or any(not p.pointer and p.type.base not in _SCALARS for p in parameters):
        spelled = {"p": "pointer", "i": "int"}
        raise found.source.error(
            item.name_token,
            f"{item.name} must take ({', '.join(spelled[w] for w in wanted)}) "
            f"(got ({', '.join(p.ctype for p in parameters)}))",
        )


def _host_call(
    found: Survey, interpreter: _Interpreter, item: Function, parameters: tuple[Parameter, ...]
) -> HostCall:
    body = interpreter.body(item.name)
    launches = [n for node in nodes_in(body) for n in _launch_nodes(node)]
    source = found.source
    if not launches:  # it may go through a helper; evaluate() will tell
        reached = _launched(found, [item.name])
        if not reached:
            raise source.error(item.name_token, f"{item.name} launches no kernel")
        return HostCall(
            item.name, parameters, min(reached), "", "", (), (), item.line, {}, interpreter
        )
    taken: dict[str, str] = {}
    local = local_names(body) | {p.name for p in parameters}
    for node in launches:
        kernel, _, arguments = node.parts
        if kernel not in found.kernels:
            raise _no_kernel(source.name, node.token.line, item.name, kernel)
        formal = found.kernels[kernel].parameters(found)
        for parameter, argument in zip(formal, arguments, strict=False):
            for name, token in names_in(argument):
                if name in local or name in found.constants or name in KNOWN_NAMES:
                    continue
                if name in found.variables:
                    taken[name] = parameter.name
                else:
                    found.explain(name)
                    raise source.error(token, f"{name} is not defined in this file")
    kernel, shape, arguments = launches[0].parts
    return HostCall(
        item.name,
        parameters,
        kernel,
        _spelled(shape[0]),
        _spelled(shape[1]),
        tuple(_spelled(node) for node in conditions_in(body)),
        tuple(_spelled(node) for node in arguments),
        item.line,
        taken,
        interpreter,
    )


def _launch_nodes(node: Any) -> list[Node]:
    if isinstance(node, (tuple, list)):
        return [found for part in node for found in _launch_nodes(part)]
    if not isinstance(node, Node):
        return []
    own = [node] if node.kind == "launch" else []
    return own + [found for part in node.parts for found in _launch_nodes(part)]


def _spelled(node: Node) -> str:
    """An expression as text, for display."""
    parts = node.parts
    if node.kind == "value":
        return repr(parts[0]) if isinstance(parts[0], str) else f"{parts[0]:g}"
    if node.kind in ("name", "sizeof_name"):
        return str(parts[0])
    if node.kind == "binary":
        return f"{_spelled(parts[1])} {parts[0]} {_spelled(parts[2])}"
    if node.kind == "unary":
        return f"{parts[0]}{_spelled(parts[1])}"
    if node.kind == "cond":
        return " ".join((_spelled(parts[0]), "?", _spelled(parts[1]), ":", _spelled(parts[2])))
    if node.kind == "call":
        return f"{parts[0]}({', '.join(map(_spelled, parts[1]))})"
    if node.kind == "member":
        return f"{_spelled(parts[0])}.{parts[1]}"
    if node.kind == "cast":
        return f"({parts[0].base}{'*' * parts[0].stars}){_spelled(parts[1])}"
    return node.token.text


# --- device text ----------------------------------------------------------------------------------


def _words(tokens: Iterable[Token], found: Survey) -> set[str]:
    """Names in `tokens`, and those in the bodies of the macros they use."""
    seen: set[str] = set()
    todo = [t.text for t in tokens if t.kind == "name"]
    while todo:
        word = todo.pop()
        if word not in seen:
            seen.add(word)
            macro = found.source.macros.get(word)
            todo += [t.text for t in macro.body if t.kind == "name"] if macro else []
    return seen


def _launched(found: Survey, calls: Iterable[str]) -> set[str]:
    """Kernels that host functions `calls`, and the host functions they call, mention."""
    seen: set[str] = set()
    todo = list(calls)
    kernels: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        words = _words(found.functions[name].body, found)
        kernels |= words & set(found.kernels)
        todo += [w for w in words if w in found.functions]
    return kernels


def _device_text(found: Survey, kernels: Mapping[str, Kernel], path: Path) -> str:
    keep: list[Item] = []
    todo: list[Item] = [f for f in found.items if f.name in kernels and f.kind == "kernel"]
    while todo:
        item = todo.pop()
        if item in keep:
            continue
        keep.append(item)
        words = _words(item.tokens, found)
        todo += [
            i for i in found.items if i.kind in ("device", "type", "constant") and i.names & words
        ]
    text = found.source.text
    kept = bytearray(len(text))
    for item in keep:
        kept[item.start : item.end] = b"\1" * (item.end - item.start)
    for start, end in found.source.defines:
        kept[start:end] = b"\1" * (end - start)
    for start, end in found.source.other_lines:
        kept[start:end] = bytes(end - start)
    starts = {}
    for token, following in pairwise(found.source.tokens):
        if token.text in found.namespaces and following.text == "::":  # namespaces are taken away
            kept[token.start : following.end] = bytes(following.end - token.start)
    for item in keep:
        if item.kind == "kernel":
            # extern "C", so that the kernel's name in the object is its name in the file
            for token in item.linkage:
                kept[token.start : token.end] = bytes(token.end - token.start)
            starts[item.start] = 'extern "C" '
    out: list[str] = []
    for i, char in enumerate(text):
        if i in starts:
            out.append(starts[i])
        out.append(char if kept[i] or char == "\n" else " ")
    body = "\n".join(line.rstrip() for line in "".join(out).split("\n"))
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    extra = ""
    if _FIXED_WIDTH.search(body):
        extra += "#include <cuda/std/cstdint>\nusing namespace cuda::std;\n"
    if "__half" in body:
        extra += "#include <cuda_fp16.h>\n"
    prelude = _PRELUDE.replace("#include <cuda_bf16.h>\n", "#include <cuda_bf16.h>\n" + extra, 1)
    return f'{prelude}#line 1 "{escaped}"\n{body}'
