"""The whole engine on a GPU: upstream's printed lines, and the same bits with CUDA graphs."""

from __future__ import annotations

import io
from typing import Any

import pytest
from decode_profile import profile
from gpu_bench import (
    Figures,
    Watch,
    compare_lines,
    engine_lines,
    make_engine,
    move_engine,
    repaired_kernels,
    run_engine,
)

from kernels.lift import lift
from port.cuda_device import CudaDevice
from port.cuda_graph import GraphDevice
from port.main import CHAT_PROMPTS, Engine
from port.weights import ModelFile


def test_as_it_is_the_engine_prints_upstreams_lines(weights: ModelFile, figures: Figures) -> None:
    with CudaDevice(lift()) as device:
        lines, watch = run_engine(make_engine(device, lift(), weights))
    equal, ties, wrong = compare_lines(lines, engine_lines("as_is"), watch)
    figures.note("engine lines equal, as it is", f"{equal}/{len(engine_lines('as_is'))}")
    assert (ties, wrong) == ([], [])


PAIRING, SCALING = "decode-rope-pairing", "decode-rope-scaling"


@pytest.mark.parametrize(
    ("variant", "repairs"),
    [
        ("softmax_and_rope_pairing_fixed", ("softmax-nan", PAIRING)),
        ("softmax_and_rope_scaling_fixed", ("softmax-nan", SCALING)),
        ("all_fixed", ("softmax-nan", PAIRING, SCALING)),
    ],
)
def test_with_more_repaired_it_prints_the_lines_of_upstream_so_repaired(
    weights: ModelFile, figures: Figures, variant: str, repairs: tuple[str, ...]
) -> None:
    kernels = repaired_kernels(*repairs)
    with CudaDevice(kernels) as device:
        lines, watch = run_engine(make_engine(device, kernels, weights))
    _compare(lines, variant, watch, figures)


def _compare(lines: list[list[Any]], variant: str, watch: Watch, figures: Figures) -> None:
    """Equal but after a margin within rounding; what differs is listed."""
    wanted = engine_lines(variant)
    equal, ties, wrong = compare_lines(lines, wanted, watch)
    figures.note(f"engine lines equal, {variant}", f"{equal}/{len(wanted)}")
    for number, tie in enumerate(ties, 1):
        figures.note(f"near tie {number}, {variant}", tie)
    assert wrong == []


@pytest.fixture(scope="module")
def engine(repaired: CudaDevice, weights: ModelFile) -> Engine:
    """With real numbers in it: the prefill softmax is repaired."""
    return make_engine(repaired, repaired_kernels("softmax-nan"), weights)


def test_with_its_softmax_repaired_it_prints_upstreams_lines(
    engine: Engine, figures: Figures
) -> None:
    lines, watch = run_engine(engine)
    _compare(lines, "softmax_fixed", watch, figures)


def test_with_graphs_every_logit_has_the_same_bits(
    engine: Engine, repaired: CudaDevice, figures: Figures
) -> None:
    kernels = repaired_kernels("softmax-nan")
    eager_lines, eager = run_engine(engine)
    graphs = GraphDevice(repaired)
    move_engine(engine, graphs, kernels)
    try:
        graph_lines, graph = run_engine(engine)
        replays = graphs.replays
    finally:
        graphs.synchronize()
        move_engine(engine, repaired, kernels)
    same = sum(a == b for a, b in zip(eager.logits, graph.logits, strict=True))
    figures.note("rows of logits equal with graphs", f"{same}/{len(eager.logits)}")
    figures.note("graphs started in that run", str(replays))
    assert replays > 300  # eight for each of some 60 decode steps
    assert graph_lines == eager_lines
    assert same == len(eager.logits)


def test_where_a_decode_step_spends_its_time(
    engine: Engine, repaired: CudaDevice, figures: Figures
) -> None:
    engine.reset(CHAT_PROMPTS[:2])
    engine.out = io.StringIO()
    for name, value in profile(engine, repaired, repaired_kernels("softmax-nan")).items():
        figures.note(name, value)
