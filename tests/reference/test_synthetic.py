"""The recipe of the synthetic checkpoint: published digests, and that a part is the whole's."""

import hashlib
import zlib

import numpy as np
import pytest
import torch

from reference.config import EMBED, Config
from reference.synthetic import CHUNK, spread, synthetic_tensor, synthetic_values

SHAPES = Config().shapes()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("model.layers.0.input_layernorm.weight", "bcec161b84277f30"),
        ("model.layers.0.self_attn.q_proj.weight", "9a43a2c498583216"),
        ("model.layers.0.self_attn.k_proj.weight", "9073041b77b747c1"),
        ("model.layers.0.mlp.down_proj.weight", "58a7143a80b41844"),
        ("model.layers.1.self_attn.q_proj.weight", "0a68d0c500959771"),
        ("model.norm.weight", "910ab15b933a23f1"),
    ],
)
def test_tensors_have_the_published_digests(name: str, want: str):
    tensor = synthetic_tensor(0, name, SHAPES[name], *spread(name))
    assert tensor.shape == SHAPES[name]
    assert tensor.dtype == torch.bfloat16
    assert digest(tensor) == want


def test_rows_of_the_embedding_have_the_published_digest():
    rows = synthetic_tensor(0, EMBED, SHAPES[EMBED], *spread(EMBED), rows=(128000, 128016))
    assert rows.shape == (16, 2048)
    assert digest(rows) == "bf72daa693d721d9"


def test_every_tensor_of_the_model_has_a_spread_and_no_other_has():
    assert len(SHAPES) == 2 + 16 * 9
    assert sum(np.prod(shape) for shape in SHAPES.values()) == 1_235_814_400
    for name in SHAPES:
        spread(name)
    with pytest.raises(KeyError):
        spread("model.layers.0.self_attn.q_proj.bias")


@pytest.mark.parametrize(
    ("std", "mean"),
    [(0.3, 1.5), (32768 / np.sqrt(3), 0.5)],  # the second: whole numbers, one in 512 of them a tie
)
def test_values_are_the_formula_in_float32(std: float, mean: float):
    words = np.random.Philox(key=[3, zlib.crc32(b"any")], counter=[0, 0, 0, 0]).random_raw(25_000)
    values = words.astype("<u8").view("<u2").astype(np.float32) - np.float32(32767.5)
    values = values * np.float32(std * np.sqrt(3) / 32768) + np.float32(mean)
    want = torch.from_numpy(values).to(torch.bfloat16)  # one rounding, for these are float32
    got = torch.from_numpy(synthetic_values(3, "any", 100_000, std, mean).view(np.int16))
    assert equal(got.view(torch.bfloat16), want)


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 19, 97, CHUNK, CHUNK + 1, 2 * CHUNK + 19])
def test_a_shorter_array_begins_as_a_longer_one(count: int):
    long = synthetic_values(0, "prefix", 3 * CHUNK, 1.0)
    np.testing.assert_array_equal(synthetic_values(0, "prefix", count, 1.0), long[:count])


@pytest.mark.parametrize("start", [0, 16, 48, CHUNK - 16, CHUNK + 32])
def test_a_part_is_that_part_of_the_whole(start: int):
    whole = synthetic_values(5, "part", 2 * CHUNK, 0.1, 0.5)
    part = synthetic_values(5, "part", CHUNK // 2 + 7, 0.1, 0.5, start=start)
    np.testing.assert_array_equal(part, whole[start : start + len(part)])


def test_rows_are_those_rows_of_the_whole():
    whole = synthetic_tensor(0, "rows", (97, 48), 1.0)
    rows = synthetic_tensor(0, "rows", (97, 48), 1.0, rows=(19, 96))
    assert equal(rows, whole[19:96])


def test_a_start_inside_a_counter_is_refused():
    with pytest.raises(ValueError, match="must be a multiple of 16"):
        synthetic_values(0, "any", 16, 1.0, start=8)


def test_seeds_names_and_spreads_give_other_values():
    base = synthetic_values(0, "a", 4096, 1.0)
    for other in [
        synthetic_values(1, "a", 4096, 1.0),
        synthetic_values(0, "b", 4096, 1.0),
        synthetic_values(0, "a", 4096, 1.1),
        synthetic_values(0, "a", 4096, 1.0, 0.1),
    ]:
        assert (base != other).mean() > 0.5


def test_mean_and_deviation_are_as_asked():
    tensor = synthetic_tensor(0, "spread", (1000, 1000), 0.05, 0.5).double()
    assert tensor.mean().item() == pytest.approx(0.5, abs=1e-3)
    assert tensor.std().item() == pytest.approx(0.05, rel=1e-2)
