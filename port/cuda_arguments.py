"""A kernel's arguments in memory: laid out once a kernel, written once a launch or graph node."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from kernels.errors import KernelsError
from kernels.lift import Kernel

# struct's letter for each type that a kernel may take by value
_LETTERS = {
    "bool": "?",
    "char": "b",
    "unsigned char": "B",
    "short": "h",
    "unsigned short": "H",
    "int": "i",
    "unsigned": "I",
    "long": "q",
    "unsigned long": "Q",
    "float": "f",
    "double": "d",
}


class Layout:
    """Where each argument of one kernel lies, as in `Kernel.pack`."""

    def __init__(self, kernel: Kernel) -> None:
        """KernelsError if the kernel takes anything but pointers and numbers."""
        letters = ""
        offsets = []
        for parameter in kernel.parameters:
            letter = "P" if parameter.pointer else _LETTERS.get(parameter.type.base)
            if letter is None:
                raise KernelsError(
                    f"{kernel.name}: parameter {parameter.name} is of type {parameter.ctype}, "
                    "which cannot be passed; use a pointer or a number"
                )
            offsets.append(struct.calcsize(f"@{letters}0{letter}"))
            letters += letter
        self.kernel = kernel
        self.offsets = tuple(offsets)
        self.struct = struct.Struct(f"@{letters}")
        self.pointers = ctypes.c_void_p * max(len(offsets), 1)


class Arguments:
    """cuLaunchKernel's kernelParams with values in them: the same bytes as `Kernel.pack` makes.

    address: of the array of pointers to the arguments. The driver copies the arguments before a
    launch returns, so one Arguments serves any number of launches.
    """

    def __init__(self, layout: Layout, values: Sequence[int | float]) -> None:
        """KernelsError if the number of values or a value does not fit the kernel."""
        self._layout = layout
        self._storage = ctypes.create_string_buffer(max(layout.struct.size, 1))
        start = ctypes.addressof(self._storage)
        self._pointers = layout.pointers(*[start + at for at in layout.offsets])
        self.address = ctypes.addressof(self._pointers)
        self.fill(values)

    def fill(self, values: Sequence[int | float]) -> None:
        """Write other values. KernelsError if their number or a value does not fit the kernel."""
        try:
            self._layout.struct.pack_into(self._storage, 0, *values)
        except struct.error as error:
            kernel = self._layout.kernel
            takes = ", ".join(parameter.ctype for parameter in kernel.parameters)
            raise KernelsError(
                f"{kernel.name} takes ({takes}) (got {tuple(values)}): {error}"
            ) from None
