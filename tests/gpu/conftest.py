"""Tests that need an NVIDIA GPU; the one command for a machine that has one:

    python -m pytest -m gpu tests/gpu -q

It ends with a table of figures. Without a GPU each test counts as not run, with the reason. With a
GPU nothing is skipped: what is missing then (NVRTC, nvmath-python) fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_bench import CachedFile, Figures, repaired_kernels

from harness.model_file import model_file
from kernels.lift import lift
from port.cuda_device import CudaDevice, why_no_gpu
from port.weights import ModelFile
from reference.checkpoint import open_checkpoint

FIGURES = Figures()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    reason = why_no_gpu() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"not run, no GPU: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FIGURES.rows:
        return
    terminalreporter.section("figures of this GPU")
    for line in FIGURES.lines():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figures() -> Figures:
    """What the table at the end shows."""
    return FIGURES


@pytest.fixture(scope="session")
def cuda() -> Iterator[CudaDevice]:
    """One GPU with our kernels as they are, for tests that leave no incident behind."""
    with CudaDevice(lift()) as device:
        yield device


@pytest.fixture(scope="session")
def repaired() -> Iterator[CudaDevice]:
    """The same GPU with the prefill softmax repaired: otherwise all activations are NaN."""
    with CudaDevice(repaired_kernels("softmax-nan")) as device:
        yield device


@pytest.fixture(scope="session")
def race_free() -> Iterator[CudaDevice]:
    """The same GPU with decode's attention repaired: otherwise its results are a matter of luck."""
    with CudaDevice(repaired_kernels("attention-race")) as device:
        yield device


@pytest.fixture(scope="session")
def weights() -> ModelFile:
    """All 16 layers of the synthetic checkpoint, seed 0; made once."""
    return CachedFile(model_file(open_checkpoint("synthetic")))
