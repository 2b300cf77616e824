"""What the race detector found, in words: two accesses to the same bytes that nothing orders."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.places import Place


@dataclass(frozen=True)
class Access:
    """One side of a race. kind: "reads", "writes" or "updates atomically"."""

    kind: str
    place: Place | None
    block: tuple[int, int, int]
    thread: tuple[int, int, int]


@dataclass(frozen=True)
class RaceReport:
    """Two accesses of one launch to the same bytes, at least one a plain or atomic write, without
    an order between them.

    array: a shared array's name, or that of a device allocation. offset: of the bytes in it.
    element: the shared array's element, None for device memory. first: the access that ran first
    under this schedule. count: how often these two lines met so in the launch. parted: a barrier
    stands between the two lines, so that they meet the other way round, through a loop's next turn.
    """

    kernel: str
    array: str
    shared: bool
    offset: int
    element: int | None
    first: Access
    second: Access
    count: int
    parted: bool = False

    @property
    def within_block(self) -> bool:
        """Whether it was one block's own threads that raced."""
        return self.first.block == self.second.block

    @property
    def line(self) -> int | None:
        """The kernels file's line of the second access, if it is there."""
        place = self.second.place
        return place.line if place is not None and place.file is None else None

    @property
    def sentence(self) -> str:
        """What happened."""
        first, second = self.first, self.second
        where = f"{self.array}[{self.element}]" if self.element is not None else self.array
        space = "shared" if self.shared else "device"
        if self.element is None:
            where += f" at byte {self.offset:,}"
        return (
            f"{self.kernel} races on {space} memory {where}: {self._who(first)} {first.kind} it"
            f"{_at(first.place)}, {self._who(second)} {second.kind} it{_at(second.place)}, "
            "and nothing orders the two."
        )

    @property
    def remedy(self) -> str:
        """Why it is a race and what to do about it."""
        first, second = self.first.place, self.second.place
        if not self.within_block:
            return (
                f"nothing orders two blocks of one launch, and they share {self.array}; give each "
                "its own part, use atomics, or split the kernel in two."
            )
        if first is None or second is None:
            where = "between the two accesses"
        elif first == second:
            where = f"between what one thread and what another does at {first}"
        else:
            early, late = sorted((first, second), key=lambda place: place.line)
            where = f"between {early} and {late}"
            if self.parted:
                where = f"after {late}, before the loop comes round to {early}"
        return f"no barrier orders the two accesses to {self.array}: put a __syncthreads() {where}."

    def _who(self, access: Access) -> str:
        x, y, z = access.thread
        who = f"thread {x}" if y == z == 0 else f"thread ({x}, {y}, {z})"
        if self.within_block:
            return who
        return f"{who} of block {access.block}"


def _at(place: Place | None) -> str:
    return f" at {place}" if place is not None else ""
