"""The explanation table: each planted fault beside all that explains it on the same input.

From the repository's root, `python -m tests.harness.test_hypotheses_table` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.hypotheses import names
from tests.harness import (
    test_hypotheses_attention,
    test_hypotheses_gemm,
    test_hypotheses_rope,
    test_hypotheses_small,
)
from tests.harness.test_hypotheses import Row, explained

FAULTS = (
    *test_hypotheses_rope.FAULTS,
    *test_hypotheses_gemm.FAULTS,
    *test_hypotheses_attention.FAULTS,
    *test_hypotheses_small.FAULTS,
)


def explanation_table() -> Iterator[Row]:
    """Every planted fault, and all that explains it."""
    return (explained(fault) for fault in FAULTS)


def test_every_hypothesis_has_a_planted_fault() -> None:
    planted = {name for fault in FAULTS for name in fault.name.split(" + ")}
    assert set(names()) - planted == set()


def main() -> None:
    seconds = 0.0
    for row in explanation_table():
        fault, seconds = row.fault, seconds + row.seconds
        others = ", ".join(name for name in row.found if name != fault.name)
        mark = "  " if fault.name in row.found else "! "
        what = f"{fault.name}, {fault.what}" if fault.what else fault.name
        print(f"{mark}{fault.op:14}{what:62}{row.seconds:5.2f} s  {others}", flush=True)
    print(f"{len(FAULTS)} faults, {seconds:.1f} s")


if __name__ == "__main__":
    main()
