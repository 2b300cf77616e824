"""A kernel's arguments in memory, laid out once and filled again for every launch."""

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


class Arguments:
    """cuLaunchKernel's kernelParams for one kernel: the same bytes as `Kernel.pack` makes.

    address: of the array of pointers to the arguments. The driver copies the arguments before a
    launch returns, so one Arguments serves every launch of its kernel.
    """

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
        layout = struct.Struct(f"@{letters}")
        self._kernel = kernel
        self._pack_into = layout.pack_into
        self._storage = ctypes.create_string_buffer(max(layout.size, 1))
        start = ctypes.addressof(self._storage)
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(start + at for at in offsets))
        self.address = ctypes.addressof(self._pointers)

    def fill(self, values: Sequence[int | float]) -> None:
        """Write the values. KernelsError if their number or a value does not fit the kernel."""
        try:
            self._pack_into(self._storage, 0, *values)
        except struct.error as error:
            takes = ", ".join(parameter.ctype for parameter in self._kernel.parameters)
            raise KernelsError(
                f"{self._kernel.name} takes ({takes}) (got {tuple(values)}): {error}"
            ) from None
