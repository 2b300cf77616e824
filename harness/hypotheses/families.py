"""All families: importing this registers every hypothesis. A new family's file is added here.

The order is that in which an op's hypotheses are tried and listed: its own family, then what any op
may have.
"""

from __future__ import annotations

import importlib

from harness.hypotheses import fits, registry

_FAMILIES = (
    *("rope", "norm", "gemm", "scores", "attention", "mask", "softmax", "pointwise", "copies"),
    *("split", "operands", "store"),  # after the others: they serve every op that has a recipe
)

for _family in _FAMILIES:
    importlib.import_module(f"harness.hypotheses.{_family}")


def names(op: str | None = None) -> tuple[str, ...]:
    """The names of all hypotheses and fits, or of one op's, each once."""
    return tuple(dict.fromkeys((*registry.names(op), *fits.every_name())))
