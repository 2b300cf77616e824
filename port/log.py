"""A launch and copy log: a device that writes down what is asked of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kernels.lift import Launch
from port.device import Device, HostOrDevice, Incident, MemcpyKind, Operation, Pointer


@dataclass(frozen=True)
class Entry:
    """One call: `what` is a kernel's name, "gemm_ex", or a memcpy kind; `bytes` for copies."""

    what: str
    detail: str
    bytes: int = 0


@dataclass
class Log:
    """What one device was asked, in order."""

    entries: list[Entry] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        return Counter(entry.what for entry in self.entries)

    def copied_bytes(self, kind: MemcpyKind) -> int:
        return sum(entry.bytes for entry in self.entries if entry.what == kind.name.lower())


class LoggedDevice:
    """Passes every call on to `device` and writes it down in `log`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.log = Log()
        self.name = device.name

    @property
    def on_incident(self) -> Callable[[Incident], None]:
        return self.device.on_incident

    @on_incident.setter
    def on_incident(self, reaction: Callable[[Incident], None]) -> None:
        self.device.on_incident = reaction

    def describe(self) -> list[str]:
        return self.device.describe()

    def malloc(self, size: int, name: str = "") -> Pointer:
        pointer = self.device.malloc(size, name)
        self.log.entries.append(Entry("malloc", f"{name} at {pointer:#x}", size))
        return pointer

    def free(self, pointer: Pointer) -> None:
        self.log.entries.append(Entry("free", f"{pointer:#x}"))
        self.device.free(pointer)

    def memcpy(self, dst: HostOrDevice, src: HostOrDevice, count: int, kind: MemcpyKind) -> None:
        sides = ["host" if isinstance(side, np.ndarray) else f"{side:#x}" for side in (dst, src)]
        self.log.entries.append(Entry(kind.name.lower(), f"{sides[0]} <- {sides[1]}", count))
        self.device.memcpy(dst, src, count, kind)

    def launch(self, launch: Launch) -> None:
        arguments = ", ".join(str(argument) for argument in launch.arguments)
        self.log.entries.append(
            Entry(launch.kernel, f"<<<{launch.grid}, {launch.block}>>>({arguments})")
        )
        self.device.launch(launch)

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
        status = self.device.gemm_ex(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
        detail = f"{transa.name}{transb.name} m={m} n={n} k={k} alpha={alpha:g} status={status}"
        self.log.entries.append(Entry("gemm_ex", detail))
        return status

    def synchronize(self) -> None:
        self.device.synchronize()
