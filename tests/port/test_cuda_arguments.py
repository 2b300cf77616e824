"""Arguments of a launch, laid out once, are the bytes that Kernel.pack makes."""

import ctypes
from pathlib import Path

import pytest

from kernels.errors import KernelsError
from kernels.lift import Kernel, lift, lift_text
from port.cuda_arguments import Arguments, Layout


def read(kernel: Kernel, address: int) -> list[bytes]:
    """The arguments behind kernelParams, as the driver reads them: by the kernel's own types."""
    pointers = (ctypes.c_void_p * len(kernel.parameters)).from_address(address)
    sizes = [
        8 if parameter.pointer else {"int": 4, "float": 4, "double": 8, "bool": 1}[parameter.ctype]
        for parameter in kernel.parameters
    ]
    return [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True) if at]


@pytest.mark.parametrize("name", sorted(lift().kernels))
def test_every_kernels_arguments_are_those_of_pack(name: str) -> None:
    kernel = lift().kernels[name]
    arguments = Arguments(Layout(kernel), [0] * len(kernel.parameters))
    for turn in (1, 2):  # the second fill must leave nothing of the first
        values = [
            (0x7F00_1234_5678 + 8 * i) * turn if parameter.pointer else -turn - i
            for i, parameter in enumerate(kernel.parameters)
        ]
        arguments.fill(values)
        packed = kernel.pack(values)
        assert read(kernel, arguments.address) == read(kernel, packed.address)


def test_mixed_sizes_are_aligned_as_pack_has_them() -> None:
    text = (
        "__global__ void k(bool a, double b, int c, float *d, float e) {}\n"
        "void call(bool a, double b, int c, float *d, float e) { k<<<1, 1>>>(a, b, c, d, e); }\n"
    )
    kernel = lift_text(text, Path("k.cu")).kernels["k"]
    values = (True, 0.1, -7, 0xFFFF_0000_0001, 2.5)
    arguments = Arguments(Layout(kernel), values)
    packed = kernel.pack(values)
    assert read(kernel, arguments.address) == read(kernel, packed.address)


def test_a_wrong_number_or_value_of_arguments_is_an_error_of_the_kernels_file() -> None:
    kernel = lift().kernels["residualKernel"]
    with pytest.raises(KernelsError, match=r"residualKernel takes \(__nv_bfloat16\*, .*got \(1,\)"):
        Arguments(Layout(kernel), (1,))
    with pytest.raises(KernelsError, match="residualKernel takes"):
        Arguments(Layout(kernel), (1, 2.5))
