"""An NVIDIA GPU as a device: the CUDA driver, kernels through NVRTC, GEMM by cuBLAS.

Everything runs on the default stream and in upstream's order. What the CUDA runtime does for
upstream, the driver does here: same copies, same launches, same cublasGemmEx. Every status is
looked at in `check` and `_went_wrong`; upstream looks at none.

A kernel's own fault (an address outside all memory, say) shows only at a later call, and the GPU
then refuses everything else from this process: it is reported as an incident and, where that does
not stop the program, as a DeviceError. CUDA_LAUNCH_BLOCKING=1 in the environment makes the launch
itself report it.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from kernels.lift import KernelsFile, Launch
from port.cuda_arguments import Arguments, Layout
from port.cuda_nvrtc import EXTRA, compile_kernels, one_line
from port.device import (
    DeviceError,
    HostOrDevice,
    Incident,
    MemcpyKind,
    Operation,
    Pointer,
    gemm_fault,
    raise_incident,
)

POISON = 0xFF  # a bf16, float or int of such bytes is NaN, NaN or -1
GIB = 2**30

CUBLAS_STATUS_SUCCESS = 0
CUBLAS_STATUS_INVALID_VALUE = 7
CUBLAS_STATUS_NOT_SUPPORTED = 15
CUDA_R_16BF = 14
CUBLAS_COMPUTE_32F = 68
CUBLAS_GEMM_DEFAULT = -1

# Launches, GEMMs and pointers whose checks and packing are remembered, of each at most so many: the
# live ones of a decode step are some 40, 113 and 70, those of a prefill 100, 1,137 and 40.
MOST_REMEMBERED = 8192
MOST_KEPT = 2**20  # bytes of the array uploaded last, which is kept

_D2D, _H2D = MemcpyKind.DEVICE_TO_DEVICE, MemcpyKind.HOST_TO_DEVICE

# Statuses after which the context answers nothing else (CUDA's manual: "the process must be
# terminated and relaunched").
_FATAL = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
_OUT_OF_MEMORY = 2

# transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc
GemmArguments: TypeAlias = (
    "tuple[Operation, Operation, int, int, int, float, int, int, int, int, float, int, int]"
)


@dataclass(frozen=True)
class Function:
    """One kernel on the GPU. handle: CUfunction. line: of its definition in the kernels file."""

    handle: Any
    line: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch as cuLaunchKernel takes it. `launch` keeps its id from being used again."""

    launch: Launch
    taken: tuple[Any, ...]
    arguments: Arguments  # behind the address in `taken`


class CudaDevice:
    """A GPU behind the interface of `port.device.Device`; close it, or use it in a `with`.

    kernels: compiled for this GPU when the device is made. ordinal: which GPU.
    Raises DeviceError where there is no driver, GPU, NVRTC or cuBLAS, KernelsError where the
    kernels do not compile.
    """

    name = "cuda"

    def __init__(self, kernels: KernelsFile, ordinal: int = 0) -> None:
        self.on_incident: Callable[[Incident], None] = raise_incident
        self.kernels = kernels
        self.driver = _open_driver()
        self._owned = _Owned(self.driver)
        # Runs at close, when the device is forgotten, or at exit: whichever comes first.
        self._release = weakref.finalize(self, self._owned.release)
        self._sizes: dict[Pointer, int] = {}
        self._starts: list[Pointer] = []  # sorted
        # Where the allocation looked up last is, and where that of each pointer seen before ends: a
        # decode step copies from two buffers to 64 places in the cache.
        self._ends: dict[Pointer, int] = {}
        self._last = (0, 0)
        self._uploaded: np.ndarray | None = None  # the array uploaded last
        self._uploaded_from = 0  # its address, once asked for
        self._launches: dict[int, _Ready] = {}  # by the id of the Launch
        # what cublasGemmEx takes after the handle, for each call that was looked at
        self._gemms: dict[GemmArguments, tuple[int, ...]] = {}
        self._scalars: dict[float, ctypes.c_float] = {}
        self._functions: dict[str, Function] = {}
        self.last_kernel = "no kernel"
        self._lost: str | None = None

        try:
            self._open(ordinal)
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back all memory, the cuBLAS handle and the GPU. Closing twice is fine."""
        self._release()
        self.context = None
        self._sizes.clear()
        self._starts.clear()
        self._functions.clear()
        self._launches.clear()
        self._forget_places()
        self._lost = self._lost or "the device is closed"

    def own(self, release: Callable[[Any], Any], what: Any) -> None:
        """`release(what)` at close, unless `give_back` comes first; the last owned goes first."""
        self._owned.things.append((release, what))

    def give_back(self, release: Callable[[Any], Any], what: Any) -> None:
        """`release(what)` now, if it was not called yet."""
        if (release, what) in self._owned.things:
            self._owned.things.remove((release, what))
            release(what)

    # --- opening --------------------------------------------------------------------------------

    def _open(self, ordinal: int) -> None:
        device = self._open_gpu(ordinal)
        self._owned.device = device
        self.context = self.check(self.driver.cuDevicePrimaryCtxRetain(device), "open the GPU")
        self._owned.context = self.context
        self.check(self.driver.cuCtxSetCurrent(self.context), "use the GPU")
        self._gpu = device
        self.major = self._attribute("COMPUTE_CAPABILITY_MAJOR")
        self.minor = self._attribute("COMPUTE_CAPABILITY_MINOR")

        cubin = compile_kernels(self.kernels, self.major * 10 + self.minor)
        self._module = self.check(self.driver.cuModuleLoadData(cubin), "load the kernels")
        self.own(self.driver.cuModuleUnload, self._module)

        self.cublas = _open_cublas()
        self.handle = self.new_cublas_handle()
        self.own(self.cublas.destroy, self.handle)

        self._stream = self.driver.CUstream(0)  # the default stream, as upstream
        self._launch = self.driver.cuLaunchKernel  # bound once: a decode step makes 360 calls
        self._copy = self.driver.cuMemcpyDtoD
        self._gemm = self.cublas.gemm_ex
        self._cublas_error = self.cublas.cuBLASError

    def _open_gpu(self, ordinal: int) -> Any:
        count = self.check(self.driver.cuDeviceGetCount(), "count the GPUs")
        if not 0 <= ordinal < count:
            raise DeviceError(
                f"--device cuda needs an NVIDIA GPU (got {count}, asked for number {ordinal}); "
                "use --device host"
            )
        return self.check(self.driver.cuDeviceGet(ordinal), "find the GPU")

    def new_cublas_handle(self) -> int:
        """A cublasHandle_t with the defaults, on the default stream; the caller destroys it."""
        try:
            handle: int = self.cublas.create()
        except Exception as error:
            # no library (a RuntimeError of its own), or a status: upstream's one check (557-563)
            raise DeviceError(
                f"cuBLAS must work to run the engine (got: {one_line(error)}); {EXTRA}"
            ) from None
        return handle

    def _attribute(self, name: str) -> int:
        key = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        value: int = self.check(self.driver.cuDeviceGetAttribute(key, self._gpu), f"read {name}")
        return value

    def describe(self) -> list[str]:
        """main.cpp:40-62: six lines, whole numbers."""
        name = self.check(self.driver.cuDeviceGetName(256, self._gpu), "read the GPU's name")
        memory = self.check(self.driver.cuDeviceTotalMem(self._gpu), "read the GPU's memory")
        shared = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK")
        return [
            f"Device: {name.split(bytes(1))[0].decode()}, "
            f"compute capability {self.major}.{self.minor}",
            f"Memory: {memory // GIB} GiB",
            f"Multiprocessors: {self._attribute('MULTIPROCESSOR_COUNT')}",
            f"L2 cache: {self._attribute('L2_CACHE_SIZE') // 2**20} MiB",
            f"Shared memory a block: {shared // 1024} KiB",
            f"Threads a block: {self._attribute('MAX_THREADS_PER_BLOCK')}",
        ]

    # --- statuses -------------------------------------------------------------------------------

    def check(self, result: tuple[Any, ...], doing: str) -> Any:
        """The values after a driver's status. DeviceError unless it is CUDA_SUCCESS."""
        status, *values = result
        if status:
            raise DeviceError(f"the GPU could not {doing}: {self._explain(status)}")
        return values[0] if len(values) == 1 else values

    def _explain(self, status: Any) -> str:
        code, text = self.driver.cuGetErrorString(status)
        name = getattr(status, "name", str(int(status)))
        return name if code or not text else f"{text.decode()} ({name})"

    def _went_wrong(self, status: Any, kind: str, what: str, line: int | None = None) -> None:
        """What upstream would ignore is an incident; after some statuses nothing can go on."""
        why = self._explain(status)
        if int(status) in _FATAL:
            self._lost = f"the GPU stopped: {why}, in {self.last_kernel} or a kernel before it"
            self.on_incident(Incident("launch", self._lost, line))
            raise DeviceError(f"{self._lost}; start again (CUDA_LAUNCH_BLOCKING=1 tells which)")
        if self._lost:
            raise DeviceError(self._lost)
        self.on_incident(Incident(kind, f"{what}: {why}", line))

    # --- memory ---------------------------------------------------------------------------------

    def malloc(self, size: int, name: str = "") -> Pointer:
        if size <= 0:
            raise DeviceError(f"allocation size must be positive (got {size}); ask for 1 or more")
        if self._lost:
            raise DeviceError(self._lost)
        status, made = self.driver.cuMemAlloc(size)
        if status and int(status) == _OUT_OF_MEMORY:
            free, total = self.check(self.driver.cuMemGetInfo(), "read its free memory")
            held = sum(self._sizes.values())
            raise DeviceError(
                f"GPU memory must hold {size / GIB:.2f} GiB more for {name or 'a buffer'} (got "
                f"{free / GIB:.2f} GiB free of {total / GIB:.2f}, {held / GIB:.2f} used here); "
                "close other programs on this GPU or use --device host"
            )
        pointer = int(self.check((status, made), f"allocate {size} bytes"))
        self._owned.memory.add(pointer)
        # The whole of it: 2 GiB take about a millisecond.
        self.check(self.driver.cuMemsetD8(pointer, POISON, size), "poison memory")
        self._sizes[pointer] = size
        self._starts = sorted(self._sizes)
        return pointer

    def _forget_places(self) -> None:
        self._gemms.clear()
        self._ends.clear()
        self._last = (0, 0)

    def free(self, pointer: Pointer) -> None:
        del self._sizes[pointer]
        self._starts = sorted(self._sizes)
        self._forget_places()
        self._owned.memory.discard(pointer)
        (status,) = self.driver.cuMemFree(pointer)
        if status:
            self._went_wrong(status, "memcpy", f"cudaFree of {pointer:#x}")

    def holds(self, pointer: Pointer, count: int) -> bool:
        """Whether `count` bytes from `pointer` lie in one allocation."""
        start, end = self._last
        if start <= pointer < end:
            return pointer + count <= end
        known = self._ends.get(pointer)
        return pointer + count <= (self._end_of(pointer) if known is None else known)

    def _end_of(self, pointer: Pointer) -> int:
        """Where the allocation ends in which `pointer` lies; remembered. -2^64: in none."""
        index = bisect_right(self._starts, pointer) - 1
        start = self._starts[index] if index >= 0 else 0
        end = start + self._sizes[start] if index >= 0 else 0
        if not start <= pointer < end:
            return -(2**64)
        if len(self._ends) >= MOST_REMEMBERED:
            self._ends.clear()
        self._ends[pointer] = end
        self._last = start, end
        return end

    def memcpy(self, dst: HostOrDevice, src: HostOrDevice, count: int, kind: MemcpyKind) -> None:
        if kind is _D2D:
            to, source = _pointer(dst), _pointer(src)
            if not self.holds(to, count) or not self.holds(source, count):
                self._outside(source if self.holds(to, count) else to, count)
                return
            (status,) = self._copy(to, source, count)
        elif kind is _H2D:
            to, host = _pointer(dst), self._host_side(src, count)
            if not self.holds(to, count):
                self._outside(to, count)
                return
            (status,) = self.driver.cuMemcpyHtoD(to, host, count)
        else:
            source, array = _pointer(src), host_array(dst, count)
            if not array.flags.writeable:
                raise TypeError("the host side must be writeable")
            if not self.holds(source, count):
                self._outside(source, count)
                return
            (status,) = self.driver.cuMemcpyDtoH(array, source, count)
        if status:
            self._went_wrong(status, "memcpy", f"cudaMemcpy of {count} bytes")

    def _host_side(self, src: HostOrDevice, count: int) -> np.ndarray | int:
        """`src`, looked at, or its address if it was the last one too: one table goes up often."""
        if src is self._uploaded and self._uploaded.nbytes >= count:
            if not self._uploaded_from:
                self._uploaded_from = self._uploaded.ctypes.data
            return self._uploaded_from
        array = host_array(src, count)
        if array.nbytes <= MOST_KEPT:
            self._uploaded, self._uploaded_from = array, 0
        return array

    def _outside(self, pointer: Pointer, count: int) -> None:
        self.on_incident(
            Incident(
                "memcpy", f"cudaMemcpy of {count} bytes at {pointer:#x}: not inside one allocation"
            )
        )

    # --- work -----------------------------------------------------------------------------------

    def function(self, kernel: str) -> Function:
        """The kernel by its name in the kernels file. KernelsError if it takes odd arguments."""
        known = self._functions.get(kernel)
        if known is None:
            source = self.kernels.kernels[kernel]
            handle = self.check(
                self.driver.cuModuleGetFunction(self._module, kernel.encode()), f"find {kernel}"
            )
            known = Function(handle, source.line, Layout(source))
            self._functions[kernel] = known
        return known

    def launch(self, launch: Launch) -> None:
        ready = self._launches.get(id(launch))
        if ready is None:
            ready = self._make_ready(launch)
        (status,) = self._launch(*ready.taken)
        self.last_kernel = launch.kernel
        if status:
            shape = f"<<<{launch.grid}, {launch.block}>>>"
            line = self.function(launch.kernel).line
            self._went_wrong(status, "launch", f"{launch.kernel}{shape}", line)

    def _make_ready(self, launch: Launch) -> _Ready:
        function = self.function(launch.kernel)
        arguments = Arguments(function.layout, launch.arguments)
        shape = (*launch.grid, *launch.block, launch.shared)
        ready = _Ready(
            launch, (function.handle, *shape, self._stream, arguments.address, 0), arguments
        )
        if len(self._launches) >= MOST_REMEMBERED:
            self._launches.clear()
        self._launches[id(launch)] = ready
        return ready

    def gemm_ex(
        self,
        transa: Operation,
        transb: Operation,
        m: int,
        n: int,
        k: int,
        alpha: float,
        a: Pointer,
        lda: int,
        b: Pointer,
        ldb: int,
        beta: float,
        c: Pointer,
        ldc: int,
    ) -> int:
        call = (transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
        return self.gemm_with(self.handle, call)

    def gemm_with(self, handle: int, call: GemmArguments) -> int:
        """The same through another cuBLAS handle."""
        taken = self._gemms.get(call) or self._taken(call)
        if taken is None:
            return CUBLAS_STATUS_INVALID_VALUE
        try:
            self._gemm(handle, *taken)
        except self._cublas_error as error:
            return self._gemm_failed(error, call)
        return CUBLAS_STATUS_SUCCESS

    def _taken(self, call: GemmArguments) -> tuple[int, ...] | None:
        """What cublasGemmEx takes for this call, or None and an incident."""
        transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc = call
        fault = gemm_fault(self.holds, transa, transb, m, n, k, a, lda, b, ldb, c, ldc)
        if fault:
            self.on_incident(Incident("gemm", fault))
            return None
        if len(self._gemms) >= MOST_REMEMBERED:
            self._gemms.clear()
        taken = self._gemms[call] = (
            int(transa), int(transb), m, n, k, self._scalar(alpha),
            a, CUDA_R_16BF, lda, b, CUDA_R_16BF, ldb, self._scalar(beta),
            c, CUDA_R_16BF, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
        return taken

    def _gemm_failed(self, error: Any, call: GemmArguments) -> int:
        """The status, where the device can go on; else DeviceError."""
        _, _, m, n, k, _, _, lda, _, ldb, _, _, ldc = call
        status = int(error.status)
        what = f"cublasGemmEx m={m} n={n} k={k} lda={lda} ldb={ldb} ldc={ldc}"
        self.synchronize()  # a context that was lost before shows itself here
        if status not in (CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED):
            raise DeviceError(
                f"cuBLAS failed at {what}: {one_line(error)} (bf16 needs compute capability "
                f"8.0, this GPU has {self.major}.{self.minor})"
            ) from None
        self.on_incident(Incident("gemm", f"{what}: {one_line(error)}"))
        return status

    def _scalar(self, value: float) -> int:
        """The address of a float that stays where it is: cuBLAS takes alpha and beta so."""
        known = self._scalars.get(value)
        if known is None:
            known = self._scalars[value] = ctypes.c_float(value)
        return ctypes.addressof(known)

    def synchronize(self) -> None:
        (status,) = self.driver.cuCtxSynchronize()
        if status:
            self._went_wrong(status, "launch", "cudaDeviceSynchronize")


class _Owned:
    """What a device must give back. Statuses are not looked at: nothing can be done about them."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.device: Any = None
        self.context: Any = None
        self.memory: set[Pointer] = set()
        self.things: list[tuple[Callable[[Any], Any], Any]] = []

    def release(self) -> None:
        if self.context is None:
            return
        self.driver.cuCtxSetCurrent(self.context)
        self.driver.cuCtxSynchronize()
        for release, what in reversed(self.things):
            try:
                release(what)
            except Exception:  # cuBLAS's own error class, after the context was lost
                continue
        for pointer in self.memory:
            self.driver.cuMemFree(pointer)
        self.driver.cuDevicePrimaryCtxRelease(self.device)
        self.context = None
        self.things.clear()
        self.memory.clear()


def _pointer(side: HostOrDevice) -> Pointer:
    if type(side) is not int and isinstance(side, np.ndarray):
        raise TypeError("the device side must be a pointer, not an array")
    return side


def host_array(side: HostOrDevice, count: int) -> np.ndarray:
    """The host side of a copy, an array of at least `count` bytes. TypeError for anything else."""
    if not isinstance(side, np.ndarray) or side.nbytes < count:
        raise TypeError(f"the host side must be an array of >= {count} bytes")
    if not side.flags.c_contiguous:
        raise TypeError("the host side must be contiguous")
    return side


def why_no_gpu() -> str | None:
    """None where a GPU answers; else one line that says what is missing. Starts nothing on it."""
    try:
        driver = _open_driver()
    except DeviceError as error:
        return str(error)
    status, count = driver.cuDeviceGetCount()
    return None if not status and count else "--device cuda needs an NVIDIA GPU (got none)"


def _open_driver() -> Any:
    """cuda.bindings' driver, initialised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries have to say about each other
            from cuda.bindings import driver
    except ImportError:
        raise DeviceError(
            f"--device cuda needs the package cuda-python (got none); {EXTRA}"
        ) from None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # its way to say that there is no libcuda
        raise DeviceError(
            "--device cuda needs an NVIDIA driver (got none on this machine); use --device host"
        ) from None
    if status:
        name = getattr(status, "name", str(int(status)))
        raise DeviceError(
            f"--device cuda needs a working NVIDIA driver and GPU (got {name}); use --device host"
        )
    return driver


def _open_cublas() -> Any:
    """nvmath's cuBLAS bindings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries have to say about each other
            from nvmath.bindings import cublas
    except ImportError:
        raise DeviceError(
            f"cuBLAS must be reachable through nvmath-python (got none); {EXTRA}"
        ) from None
    return cublas
