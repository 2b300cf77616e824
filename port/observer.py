"""What may watch, and steer, the engine from outside: this observer does neither.

Upstream has no such hooks; they are the only thing in `main.py` that upstream's program lacks.
Each op stands in a loop `for _ in op(name, layer):` whose body is upstream's call: an observer
decides how often the body runs (once, normally), and looks at memory before and after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from port.main import Engine

_ONCE = (None,)


class Observer:
    """Every op runs once, nothing is looked at."""

    def op(self, names: str | tuple[str, ...], layer: int | None) -> Iterable[None]:
        """One turn for each time that the op(s) named shall run; a tuple where one loop of
        upstream's computes several taps. `layer` is None outside the layers."""
        return _ONCE

    def prefill_begins(self, engine: Engine, slot: int, num_tokens: int) -> None:
        """A prompt of `num_tokens` tokens was taken off the queue for `slot`, and uploaded."""

    def prefill_ends(self, engine: Engine, slot: int) -> None: ...

    def step_begins(self, engine: Engine, active_slots: list[int]) -> None:
        """One decode step's inputs were uploaded; row r of its buffers is active_slots[r]."""

    def step_ends(self, engine: Engine, active_slots: list[int]) -> None: ...

    def token(self, slot: int, token: int) -> int:
        """The token that stands for the argmax's result (teacher forcing replaces it)."""
        return token
