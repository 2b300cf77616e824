"""RoPE's angles as a picture; the only file that needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.claims import ClaimsReport


def check_available() -> None:
    """Raise UsageError unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib (got none); pip install 'tiny-vllm-diff[plot]', or drop it"
        )


def draw_angles(report: ClaimsReport, path: Path) -> None:
    """Write a .png: frequencies of both phases by index, and how far their angles lie apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = report.angles
    index = [row.index for row in rows]
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    above.semilogy(index, [row.llama3 for row in rows], "k:", label="Llama 3")
    above.semilogy(index, [row.prefill_frequency for row in rows], "o", ms=5, label="prefill")
    above.semilogy(index, [row.decode_frequency for row in rows], "x", ms=6, label="decode")
    above.set_ylabel("radians a position")
    above.set_title("What the RoPE kernels turn by, as measured")
    above.legend()
    below.semilogy(index, [row.difference for row in rows], "x", color="C1", label="difference")
    below.semilogy(index, [row.allowed for row in rows], "k:", label="rounding allows")
    below.set_ylabel(f"angle apart at position {report.position}")
    below.set_xlabel("frequency index")
    below.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot can not write {path}: {error.strerror}") from error
