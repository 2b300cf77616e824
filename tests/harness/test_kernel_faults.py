"""Faults planted in the kernels are found through the whole harness, and nothing else is blamed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from kernel_faults import KERNEL_FAULTS, KernelFault
from plant import plant_in_kernels

from harness.compare import compare
from harness.progress import Progress
from harness.request import CompareRequest

# What upstream's own kernels are blamed for.
UPSTREAM = {("prefill", "softmax"), ("decode", "q_rope"), ("decode", "k_rope")}


@pytest.mark.parametrize("fault", KERNEL_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_kernel_fault_is_blamed_and_nothing_else(
    fault: KernelFault, tmp_path: Path
) -> None:
    kernels = plant_in_kernels(tmp_path, *fault.edits)
    # Everything but the GEMMs, which no kernel computes.
    request = CompareRequest(
        op="^(?!.*_proj$|scores|attn_v|embed|final_norm|logits|argmax)", kernels=kernels
    )
    report = compare(request, Progress(io.StringIO()))
    found = {(culprit.phase, culprit.op) for culprit in report.culprits}
    assert fault.blamed <= found
    assert found <= fault.blamed | UPSTREAM
