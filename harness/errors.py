"""Mistakes of the user, which the command line shows as one line, and how to recognise them.

A user's mistake is an exception of one of the classes of `user_mistakes`; its `str` is one clear
line: what, why, what to do. Its optional attribute `detail` (a compiler's messages, say) is shown
below that line. Any other exception is a bug of ours and keeps its traceback.
To add a class: one entry in `_ELSEWHERE`.
"""

from __future__ import annotations

import sys

# Error classes that live beside what raises them. Their modules may import torch.
_ELSEWHERE = (
    ("kernels.errors", "KernelsError"),
    ("port.device", "DeviceError"),
    ("port.weights", "WeightsError"),
    ("reference.checkpoint", "CheckpointError"),
)


class UsageError(Exception):
    """The command line, or an option's value, can not be carried out as given."""


def user_mistakes() -> tuple[type[Exception], ...]:
    """The classes that mean a user's mistake, for an `except` clause.

    Python evaluates that clause only once an exception is on its way, and a class whose module
    was never imported can not have been raised, so nothing is imported here.
    """
    found = [
        getattr(sys.modules[module], name)
        for module, name in _ELSEWHERE
        # A module whose import failed half-way may not have defined its class yet.
        if hasattr(sys.modules.get(module), name)
    ]
    return (UsageError, *found)
