"""Executable explanations of a failing op."""

from harness.hypotheses.evidence import Context, Evidence
from harness.hypotheses.families import names
from harness.hypotheses.search import diagnose

__all__ = ["Context", "Evidence", "diagnose", "names"]
