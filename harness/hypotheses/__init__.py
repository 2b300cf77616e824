"""Executable explanations of a failing op."""

from harness.hypotheses import (
    attention,
    copies,
    gemm,
    mask,
    norm,
    pointwise,
    rope,
    scores,
    softmax,
    store,
)
from harness.hypotheses import operands  # last: it serves all ops that the others have registered
from harness.hypotheses.evidence import Context, Evidence
from harness.hypotheses.registry import Hypothesis, hypotheses_of, names
from harness.hypotheses.search import diagnose

__all__ = ["Context", "Evidence", "Hypothesis", "diagnose", "hypotheses_of", "names"]
