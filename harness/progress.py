"""Signs of life on standard error while a run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, TextIO

DELAY: Final = 2.0  # seconds without a word: most runs are over by then
INTERVAL: Final = 0.1  # seconds between two repaints of the line

_ERASE_LINE = "\r\x1b[K"


class Progress:
    """One line that says where a run is; nothing at all where nobody watches.

    Use it as a context manager, so that the line is gone before anything else is printed.
    `announce` is for what a long run costs, and speaks at once, on a terminal or not.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._start = clock()
        self._shown_at: float | None = None
        self._terminal = self._stream.isatty()

    def announce(self, text: str) -> None:
        """Say how long the run will take and how much memory it needs, before it starts."""
        self.close()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def update(self, label: str, done: int | None = None, total: int | None = None) -> None:
        """The run is at `label`, `done` of `total`. Cheap: call it as often as you like."""
        if not self._terminal:
            return
        now = self._clock()
        if now - self._start < DELAY:
            return
        if self._shown_at is not None and now - self._shown_at < INTERVAL:
            return
        self._shown_at = now
        share = "" if done is None or not total else f" {done}/{total}"
        line = f"{now - self._start:.0f} s  {label}{share}"
        self._stream.write(f"{_ERASE_LINE}{line[:78]}")
        self._stream.flush()

    def close(self) -> None:
        """Take the line away."""
        if self._shown_at is not None:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
            self._shown_at = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
