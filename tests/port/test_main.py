"""The port as a program: loading, prefill, the decode loop, and what it prints."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from harness.model_file import model_file
from kernels.lift import lift
from port.host_device import HostDevice
from port.log import LoggedDevice
from port.main import (
    CHAT_PROMPTS,
    NUM_BLOCKS,
    Engine,
    argmax,
    decode_step,
    free_slot,
    load_weights,
    prefill,
    run,
)
from port.weights import SafetensorsFile, WeightsError
from reference.checkpoint import open_checkpoint

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "engine.json").read_text())


@pytest.fixture(scope="module")
def device() -> LoggedDevice:
    return LoggedDevice(HostDevice(lift()))


@pytest.fixture(scope="module")
def engine(device: LoggedDevice) -> Engine:
    """One layer: control flow needs no more."""
    file = model_file(open_checkpoint("synthetic", layers=1))
    return Engine(device, lift(), file, out=io.StringIO())


def test_the_prompts_are_the_golden_ones() -> None:
    assert [list(prompt) for prompt in CHAT_PROMPTS] == GOLDEN["prompts"]


def test_prefill_fills_pages_from_the_end_of_the_pool(engine: Engine) -> None:
    engine.reset([CHAT_PROMPTS[0]])
    prefill(engine, 0)
    assert engine.block_table[0, 0, :3].tolist() == [65535, 65534, -1]
    assert len(engine.free_blocks) == NUM_BLOCKS - 2
    assert engine.current_prompt_len == [17, 0]
    assert engine.is_slot_free == [False, True]
    assert len(engine.generated_tokens[0]) == 1


def test_faulty_softmax_gives_nan_logits_and_token_0(engine: Engine) -> None:
    engine.reset([CHAT_PROMPTS[0]])
    out = io.StringIO()
    engine.out = out
    prefill(engine, 0)
    # One layer: the last row is right, NaN would reach it in the second layer only.
    assert out.getvalue().startswith("Output token: ")
    assert np.isnan((engine.embed_proj_cpu[0].astype(np.uint32) << 16).view(np.float32)).all()


def test_a_step_runs_upstreams_calls_in_upstreams_numbers(
    engine: Engine, device: LoggedDevice
) -> None:
    engine.reset(CHAT_PROMPTS[:2])
    prefill(engine, 0)
    prefill(engine, 1)
    device.log.entries.clear()
    assert decode_step(engine)
    counts = device.log.counts()
    assert counts == Counter(
        {
            "embeddingGatherKernelDecode": 1,
            "rmsNormKernel": 3,
            "ropeKernelDecode": 4,
            "pagedAttentionKernel": 1,
            "residualKernel": 2,
            "siluKernel": 1,
            "gemm_ex": 8,
            "host_to_device": 4,  # last tokens, slots, lengths; the table once a layer
            "device_to_device": 4,  # a K row and a V row a slot
            "device_to_host": 1,
        }
    )


def test_a_freed_slot_gives_its_blocks_back_in_table_order(engine: Engine) -> None:
    engine.reset([CHAT_PROMPTS[0]])
    prefill(engine, 0)
    free_slot(engine, 0)
    assert (engine.block_table == -1).all()
    assert engine.free_blocks[-2:] == [65535, 65534]
    assert sorted(engine.free_blocks) == list(range(NUM_BLOCKS))


def test_the_loop_ends_when_nothing_is_left(engine: Engine) -> None:
    engine.reset([])
    engine.out = out = io.StringIO()
    assert run(engine) == 0
    assert out.getvalue().startswith("\n")


def test_argmax_moves_on_strictly_greater_only() -> None:
    def bits(*logits: float) -> np.ndarray:
        return (np.array(logits, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    assert argmax(bits(-3, -1, -1, -2)) == (-1.0, 1)
    assert argmax(bits(2, 2, 1))[1] == 0
    assert argmax(bits(1, np.nan, 2)) == (2.0, 2)
    assert argmax(bits(np.nan, 1, 2))[1] == 0
    assert np.isnan(argmax(bits(np.nan, np.nan))[0])


@pytest.mark.parametrize("seed", range(200))
def test_argmax_is_what_walking_the_row_finds(seed: int) -> None:
    """Rows of few values, so that ties, both zeros, infinities and NaN of both signs meet."""
    rng = np.random.default_rng(seed)
    some = rng.choice([0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FFF, 0xFFC0, 0x7F81], 4)
    some = np.append(some, rng.integers(0, 2**16, 2))
    row = rng.choice(some, 9).astype(np.uint16)
    logits = (row.astype(np.uint32) << 16).view(np.float32).tolist()
    greatest, index = logits[0], 0
    for at, logit in enumerate(logits):
        if logit > greatest:
            greatest, index = logit, at
    got = argmax(row)
    assert got[1] == index
    assert got[0] == greatest or (np.isnan(got[0]) and np.isnan(greatest))


def test_the_loader_maps_every_tensor_to_its_bytes(tmp_path: Path, device: LoggedDevice) -> None:
    import torch
    from safetensors.torch import save_file

    names = list(open_checkpoint("synthetic", layers=1).header())
    tensors = {
        name: torch.full((8,), float(index + 1), dtype=torch.bfloat16)
        for index, name in enumerate(names)
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = load_weights(device, SafetensorsFile(tmp_path))

    def first(pointer: int) -> float:
        from port.device import MemcpyKind

        out = np.empty(8, np.uint16)
        device.memcpy(out, pointer, 16, MemcpyKind.DEVICE_TO_HOST)
        return float((out.astype(np.uint32) << 16).view(np.float32)[0])

    layer = weights.layers[0]
    prefix = "model.layers.0."
    for pointer, name in (
        (weights.embed_tokens, "model.embed_tokens.weight"),
        (weights.norm, "model.norm.weight"),
        (layer.input_layernorm, prefix + "input_layernorm.weight"),
        (layer.post_attention_layernorm, prefix + "post_attention_layernorm.weight"),
        (layer.q_proj, prefix + "self_attn.q_proj.weight"),
        (layer.k_proj, prefix + "self_attn.k_proj.weight"),
        (layer.v_proj, prefix + "self_attn.v_proj.weight"),
        (layer.o_proj, prefix + "self_attn.o_proj.weight"),
        (layer.gate_proj, prefix + "mlp.gate_proj.weight"),
        (layer.up_proj, prefix + "mlp.up_proj.weight"),
        (layer.down_proj, prefix + "mlp.down_proj.weight"),
    ):
        assert first(pointer) == names.index(name) + 1


def test_a_missing_tensor_and_a_broken_file_are_told(tmp_path: Path, device: LoggedDevice) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="embed_tokens"):
        load_weights(device, SafetensorsFile(tmp_path))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x05\0\0\0\0\0\0\0nojson")
    with pytest.raises(WeightsError, match="must be a safetensors file"):
        SafetensorsFile(broken)
