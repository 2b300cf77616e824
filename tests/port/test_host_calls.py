"""The RoPE tables, and what the host calls launch."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from kernels.lift import HOST_CALLS, Launch, lift, lift_text
from port.device import Incident
from port.host_calls import HostCalls, handed_on, rope_frequencies, rope_tables

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA3 = (64, 500000.0, 32.0, 1.0, 4.0, 8192)


class Recorder:
    """A device that only writes down what it is asked to launch."""

    name = "recorder"

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.on_incident = list[Incident]().append

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def device() -> Recorder:
    return Recorder()


@pytest.fixture
def calls(device: Recorder, out: io.StringIO) -> HostCalls:
    calls = HostCalls(lift(), device, out)  # type: ignore[arg-type]
    calls._globals.update(inv_freq=16, cos=32, sin=48)
    return calls


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def test_rope_tables_have_the_bits_of_the_upstream_program() -> None:
    golden = json.loads((GOLDEN / "digests.json").read_text())["tables"]
    inv_freq = rope_frequencies(*LLAMA3)
    cos, sin = rope_tables(inv_freq, 2048)
    assert cos.shape == sin.shape == tuple(golden["shape"])
    assert sha256(inv_freq) == golden["inv_freq_sha256"]
    assert sha256(cos) == golden["cos_sha256"]
    assert sha256(sin) == golden["sin_sha256"]


def test_low_frequencies_are_divided_high_ones_kept_and_three_blended() -> None:
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    ratio = plain / rope_frequencies(*LLAMA3)
    assert np.allclose(ratio[:15], 1, rtol=1e-6)
    assert ((ratio[15:18] > 1.01) & (ratio[15:18] < 31.9)).all()
    assert np.allclose(ratio[18:], 32, rtol=1e-6)


def test_calls_launch_upstreams_grids_and_blocks(calls: HostCalls, device: Recorder) -> None:
    calls.embedding_gather(1, 2, 3, 5)
    calls.rms_norm(1, 2, 3, 5)
    calls.rope(1, 5, 2048)
    calls.rope(1, 5, 512)
    calls.causal_mask(1, 5)
    calls.softmax(1, 5)
    calls.residual_add(1, 2, 5)
    calls.silu(1, 2, 5)
    calls.embedding_gather_decode(1, 2, 3, 4)
    calls.rope_decode(1, 7, 2048)
    calls.softmax_decode(1, 33)
    calls.paged_attention(3, 2, 1, 2, 3, 4, 5, 6)
    shapes = [(launch.kernel, launch.grid, launch.block) for launch in device.launches]
    assert shapes == [
        ("embeddingGatherKernel", (5, 1, 1), (1024, 1, 1)),
        ("rmsNormKernel", (5, 1, 1), (1024, 1, 1)),
        ("ropeKernel_llama3", (5, 1, 1), (1024, 1, 1)),
        ("ropeKernel_llama3", (5, 1, 1), (256, 1, 1)),
        ("causalMaskKernel", (160, 1, 1), (5, 1, 1)),
        ("softmaxKernel", (160, 1, 1), (5, 1, 1)),
        ("residualKernel", (5, 1, 1), (1024, 1, 1)),
        ("siluKernel", (5, 1, 1), (1024, 1, 1)),
        ("embeddingGatherKernelDecode", (2, 1, 1), (1024, 1, 1)),
        ("ropeKernelDecode", (1, 1, 1), (1024, 1, 1)),
        ("softmaxKernelDecode", (32, 1, 1), (33, 1, 1)),
        ("pagedAttentionKernel", (2, 32, 1), (64, 1, 1)),
    ]
    assert device.launches[2].arguments == (1, 5, 2048, 64, 32, 48)  # the tables' addresses


@pytest.mark.parametrize("n", [1024, 1025])
def test_more_than_1024_threads_are_refused_with_a_notice_and_nothing_runs(
    calls: HostCalls, device: Recorder, out: io.StringIO, n: int
) -> None:
    for call in (calls.causal_mask, calls.softmax, calls.softmax_decode):
        call(1, n)
    calls.rope(1, 3, 2 * n)
    calls.rope_decode(1, 3, 2 * n)
    refused = n > 1024
    assert len(device.launches) == (0 if refused else 5)
    assert bool(out.getvalue()) == refused
    assert "\n" not in out.getvalue()


def test_what_a_call_only_hands_on_is_known_for_upstreams_eleven() -> None:
    names = {
        name: [lift().host_calls[name].parameters[place].name for place in handed_on(lift(), name)]
        for name in HOST_CALLS
    }
    pointers_only = {name for name, handed in names.items() if "dim" in handed or "n" in handed}
    assert pointers_only == set()  # shapes come of these
    assert names["ropeDecode"] == ["input", "position"]
    assert "layer" in names["pagedAttention"]


@pytest.mark.parametrize(
    "edit",
    [
        ("", ""),  # ours
        ("<<<1, threads>>>", "<<<1 + position / 16, threads>>>"),
        ("<<<1, threads>>>", "<<<1, threads, position>>>"),
        ("int threads = dim / 2;", "int threads = dim / 2; if (position > 20) threads = 32;"),
        ("int threads = dim / 2;", "position += 1; int threads = dim / 2;"),
        ("(input, position, dim);\n}", "(input + position, position, dim);\n}"),
        ("(input, position, dim);\n}", "(input, position % 7, dim);\n}"),
        (
            "    ropeKernelDecode<<<1, threads>>>(input, position, dim);",
            "    if (dim > 512) { ropeKernelDecode<<<1, threads>>>(input, 3, dim); return; }\n"
            "    ropeKernelDecode<<<1, threads>>>(input, position, dim);",
        ),
    ],
)
def test_a_call_like_another_launches_what_the_file_says_for_it(
    device: Recorder, out: io.StringIO, edit: tuple[str, str]
) -> None:
    assert edit[0] in lift().text
    file = lift_text(lift().text.replace(*edit), lift().path, HOST_CALLS)
    calls = HostCalls(file, device, out)  # type: ignore[arg-type]
    for position in (3, 3, 20, 21, 40, 2047):
        for x, dim in ((4096, 2048), (8192, 2048), (4096, 512)):
            calls.rope_decode(x, position, dim)
            assert device.launches[-1] == file.call("ropeDecode", x, position, dim)


def test_a_call_like_a_refused_one_is_refused_again(
    calls: HostCalls, device: Recorder, out: io.StringIO
) -> None:
    for x in (1, 2, 2):
        calls.softmax(x, 1025)
    assert device.launches == []
    assert out.getvalue().count("softmax") == 3
