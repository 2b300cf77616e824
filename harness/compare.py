"""The differential test, from the request to the report: read this first.

    weights -> port op -> probe -> reference op -> verdict -> diagnosis -> report

1. The reference scheduler says which prefills and decode steps there will be (control.py).
2. The judges walk them layer by layer; each tap of a wanted layer becomes a case: the op's inputs
   as the ideal has them, and the real result (walk.py).
3. The port's own control flow runs on the device, and the probe lets only the ops of these cases
   run, each on its case's inputs (isolated.py, probe.py). Or it runs freely (propagated.py).
4. Each observation is judged by its op's rounding bound (assess.py, verdict.py, bounds.py).
"""

from __future__ import annotations

import time

from harness.assess import Row
from harness.isolated import Isolated
from harness.progress import Progress
from harness.propagated import Propagated
from harness.races import told_once
from harness.request import CompareRequest
from harness.result import Report, Result, Tokens
from harness.session import Session
from harness.taps import CONTROL, EXECUTION_ORDER, PREFILL
from reference.checkpoint import Checkpoint


def compare(
    request: CompareRequest, progress: Progress, checkpoint: Checkpoint | None = None
) -> Report:
    """Carry out the request. Raises the classes of harness.errors for a user's mistake.

    checkpoint: an open one, instead of the request's model and seed.
    """
    started = time.perf_counter()
    session = Session(request, progress, checkpoint)
    tokens: Tokens | None = None
    rows: list[Row]
    if request.mode == "isolated":
        rows = Isolated(session).rows()
    else:
        rows, tokens = Propagated(session).rows()
    selected = [row for row in rows if row.result.op in CONTROL or request.selects(row.result.op)]
    selected.sort(key=lambda row: _execution_order(row.result))
    return Report.build(
        command=request.command,
        device=session.engine.device.name,
        model=session.model_record(),
        kernels=session.kernels_record(),
        mode=request.mode,
        repairs=request.repairs,
        results=[row.result for row in selected],
        races=told_once(found for row in selected for found in row.races),
        strays=[stray for row in selected for stray in row.strays],
        tokens=tokens,
        seconds=time.perf_counter() - started,
    )


def _execution_order(result: Result) -> tuple[int, int, int, int, int]:
    """Phase, step, layer, op: embed before the layers, the rest of what is around them after."""
    layer = result.layer
    if layer is None:
        layer = -1 if result.op == "embed" else 10_000
    return (
        0 if result.phase == PREFILL else 1,
        -1 if result.step is None else result.step,
        layer,
        EXECUTION_ORDER[result.phase][result.op],
        0 if result.input == "model" else 1,
    )
