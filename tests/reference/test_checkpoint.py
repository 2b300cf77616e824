"""Checkpoints: what save_pretrained wrote reads back, and every broken file says what is wrong.

The broken files are real in size and sparse on disk: each differs from a good one in one point.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_folders import SavedModel, llama_config

from reference.checkpoint import Cache, CheckpointError, open_checkpoint
from reference.config import EMBED, FINAL_NORM, Config

HEAD = "lm_head.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Header = dict[str, Any]


def one_line(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert re.search(r" must .*\(got.*\); ", text), text
    return text


def refused(path: Path | str, **options: int) -> str:
    """The one line that opening `path` fails with."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path, **options)
    return one_line(error)


def good_header(layers: int = 1) -> Header:
    return open_checkpoint("synthetic", layers=layers).header()


def pack(header: Header) -> None:
    """Lay the data out anew, by shape, in the header's order."""
    at = 0
    for value in header.values():
        size = {"BF16": 2, "F32": 4, "F16": 2}[value["dtype"]]
        for width in value["shape"]:
            size *= width
        value["data_offsets"] = [at, at + size]
        at += size


def write(file: Path, header: Header | bytes, data: int | None = None) -> Path:
    """A safetensors file of zeros (sparse) with this header; `data` bytes long, or as it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data is None:
        assert isinstance(header, dict)
        data = max((v["data_offsets"][1] for v in header.values() if "dtype" in v), default=0)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + data)
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.bfloat16 and torch.equal(
        a.view(torch.int16), b.view(torch.int16)
    )


# ---- what reads back ----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["whole", "sharded", "file"])
def test_saved_models_read_back_bit_for_bit(saved_model: SavedModel, form: str):
    path = {
        "whole": saved_model.whole,
        "sharded": saved_model.sharded,
        "file": saved_model.whole / "model.safetensors",
    }[form]
    checkpoint = open_checkpoint(path)
    assert checkpoint.kind == "safetensors"
    assert checkpoint.path == path
    assert checkpoint.layers == 2
    assert set(checkpoint.header()) == set(saved_model.source.header())
    for name in checkpoint.header():
        assert equal(checkpoint.tensor(name), saved_model.source.tensor(name)), name
    rows = checkpoint.rows(EMBED, [128255, 0, 5, 5])
    assert equal(rows, saved_model.source.tensor(EMBED)[[128255, 0, 5, 5]])


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_headers_count_the_data_as_one_file(saved_model: SavedModel, form: str):
    header = open_checkpoint(getattr(saved_model, form)).header()
    at = 0
    for value in header.values():
        start, end = value["data_offsets"]
        assert start == at
        at = end
    assert at == 2 * sum(tensor.numel() for tensor in map(saved_model.source.tensor, header))


def test_the_header_of_one_file_is_its_own(saved_model: SavedModel):
    with (saved_model.whole / "model.safetensors").open("rb") as stream:
        own = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    del own["__metadata__"]
    assert open_checkpoint(saved_model.whole).header() == own


def test_the_saved_folder_really_is_sharded(saved_model: SavedModel):
    assert len(list(saved_model.sharded.glob("*.safetensors"))) > 1
    assert not (saved_model.sharded / "model.safetensors").exists()


def test_files_are_read_when_asked_for(file: Path):
    checkpoint = open_checkpoint(write(file, good_header(layers=16)))  # 2.5 GB of zeros
    assert checkpoint.layers == 16
    assert checkpoint.rows(EMBED, [3]).shape == (1, 2048)
    assert checkpoint.tensor("model.layers.15.mlp.down_proj.weight").shape == (2048, 8192)


def test_metadata_and_old_rotary_buffers_are_passed_over(file: Path):
    header = good_header()
    header["model.layers.0.self_attn.rotary_emb.inv_freq"] = {"dtype": "F32", "shape": [32]}
    pack(header)
    header["__metadata__"] = {"format": "pt"}
    assert open_checkpoint(write(file, header)).layers == 1


def test_a_head_equal_to_the_embedding_is_accepted(file: Path):
    header = good_header() | {HEAD: {"dtype": "BF16", "shape": [128256, 2048]}}
    pack(header)
    assert open_checkpoint(write(file, header)).layers == 1


# ---- synthetic ----------------------------------------------------------------------------


def test_synthetic_rows_are_rows_of_the_tensor():
    checkpoint = open_checkpoint("synthetic", seed=3, layers=1)
    rows = checkpoint.rows(EMBED, torch.tensor([9, 128255, 0, 9]))
    assert equal(rows, checkpoint.tensor(EMBED)[[9, 128255, 0, 9]])
    assert (checkpoint.kind, checkpoint.seed, checkpoint.layers) == ("synthetic", 3, 1)


def test_synthetic_header_is_one_files_in_upstreams_order():
    header = open_checkpoint("synthetic", layers=2).header()
    names = list(header)
    assert names[0] == EMBED
    assert names[-1] == FINAL_NORM
    assert len(names) == 2 + 2 * 9
    assert header[EMBED] == {
        "dtype": "BF16",
        "shape": [128256, 2048],
        "data_offsets": [0, 128256 * 2048 * 2],
    }
    before = dict(header)
    pack(before)
    assert before == header


@pytest.mark.parametrize("index", [-1, 128256])
def test_a_synthetic_row_outside_the_table_is_refused(index: int):
    with pytest.raises(IndexError, match="must be 0 to 128255"):
        open_checkpoint("synthetic").rows(EMBED, [index])


@pytest.mark.parametrize("layers", [0, 17, -1])
def test_synthetic_has_1_to_16_layers(layers: int):
    assert "layers must be 1 to 16" in refused("synthetic", layers=layers)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_is_64_bits(seed: int):
    assert "seed must be 0 to 2^64 - 1" in refused("synthetic", seed=seed)


# ---- the cache ----------------------------------------------------------------------------


def test_the_cache_forgets_what_was_used_longest_ago():
    cache, made = Cache(limit=100), []

    def get(name: str, size: int = 40) -> None:
        def make() -> torch.Tensor:
            made.append(name)
            return torch.zeros(size, dtype=torch.int8)

        assert cache.get(name, make).nbytes == size

    for name in ["a", "b", "a", "c", "a", "b"]:
        get(name)  # c pushes b out, b then c
    assert made == ["a", "b", "c", "b"]
    get("great", 101)  # greater than the cache: passes through, nothing is forgotten
    get("a")
    get("b")
    assert made == ["a", "b", "c", "b", "great"]


def test_a_tensor_is_made_once_for_those_who_share_a_checkpoint():
    checkpoint = open_checkpoint("synthetic", layers=1)
    assert checkpoint.tensor(Q_PROJ) is checkpoint.tensor(Q_PROJ)
    alone = open_checkpoint("synthetic", layers=1, cache_bytes=0)
    assert alone.tensor(Q_PROJ) is not alone.tensor(Q_PROJ)


# ---- broken files -------------------------------------------------------------------------


def test_no_such_file(tmp_path: Path):
    text = refused(tmp_path / "nowhere")
    assert "nowhere" in text
    assert "does not exist" in text


@pytest.mark.parametrize("name", ["x" * 5000, "null\0character"])
def test_impossible_paths(name: str):
    assert "does not exist" in refused(name)


def test_a_folder_without_a_model(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert "must hold model.safetensors or model.safetensors.index.json" in refused(tmp_path)


@pytest.mark.parametrize("text", [b"", b"abc", b"1234567"])
def test_too_short_to_be_a_safetensors_file(file: Path, text: bytes):
    file.write_bytes(text)
    assert f"got {len(text)} bytes" in refused(file)


@pytest.mark.parametrize("text", [b"GGUF\3\0\0\0" + b"x" * 100, b"PK\3\4" + b"z" * 100])
def test_other_formats(file: Path, text: bytes):
    file.write_bytes(text)
    assert "cut off or not a safetensors file" in refused(file)


def test_header_length_past_the_end(file: Path):
    text = json.dumps(good_header()).encode()
    file.write_bytes((len(text) + 1).to_bytes(8, "little") + text)
    assert f"must end within its {len(text) + 8} bytes (got {len(text) + 1})" in refused(file)


def test_a_header_too_long_to_be_one(file: Path):
    with file.open("wb") as stream:
        stream.write((200_000_000).to_bytes(8, "little"))
        stream.truncate(300_000_000)
    assert "must take 100000000 bytes at most (got 200000000)" in refused(file)


@pytest.mark.parametrize(
    "text",
    [b"{", b'{"a": }', b"\xff\xfe{}", b"", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_broken_json(file: Path, text: bytes):
    assert "must be JSON" in refused(write(file, text, 0))


@pytest.mark.parametrize("text", [b"[]", b"1", b"null", b'"text"'])
def test_json_that_is_no_header(file: Path, text: bytes):
    assert "must be a JSON object" in refused(write(file, text, 0))


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        {},
        {"dtype": "BF16", "shape": [2048]},
        {"dtype": 1, "shape": [2048], "data_offsets": [0, 4096]},
        {"dtype": "BF16", "shape": 2048, "data_offsets": [0, 4096]},
        {"dtype": "BF16", "shape": ["2048"], "data_offsets": [0, 4096]},
        {"dtype": "BF16", "shape": [2048.0], "data_offsets": [0, 4096]},
        {"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [-2048], "data_offsets": [0, 4096]},
        {"dtype": "BF16", "shape": [2048], "data_offsets": [0]},
        {"dtype": "BF16", "shape": [2048], "data_offsets": [-4096, 0]},
        {"dtype": "BF16", "shape": [2048], "data_offsets": [0, float("nan")]},
    ],
)
def test_an_entry_of_another_form(file: Path, value: object):
    text = refused(write(file, json.dumps({FINAL_NORM: value}).encode(), 4096))
    assert f"{FINAL_NORM} in the header of" in text
    assert "must have dtype, shape and data_offsets" in text


def test_a_name_that_would_break_the_line(file: Path):
    assert r"'two\nlines'" in refused(write(file, json.dumps({"two\nlines": {}}).encode(), 0))


def shift(name: str, start: int, end: int) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        offsets = header[name]["data_offsets"]
        offsets[0] += start
        offsets[1] += end

    return change


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (shift(FINAL_NORM, 4096, 4096), "must lie within its"),
        (shift(FINAL_NORM, 0, 2), "must lie within its"),
        (shift(FINAL_NORM, -2, -2), "must not overlap model.layers.0.self_attn.v_proj.weight"),
        (shift(Q_PROJ, -4096, -4096), "must not overlap model.layers.0.self_attn.o_proj.weight"),
        (shift(Q_PROJ, 2, 0), "must begin where model.layers.0.self_attn.o_proj.weight ends"),
        (shift(EMBED, 2, 0), "must begin where the header ends, at 0"),
        (shift(FINAL_NORM, 0, -4098), "must ascend"),
        (shift(FINAL_NORM, 0, -2), "must span 4096 bytes for BF16 [2048]"),
    ],
)
def test_offsets_out_of_range_or_overlapping(
    file: Path, change: Callable[[Header], None], want: str
):
    header = good_header()
    data = header[FINAL_NORM]["data_offsets"][1]
    change(header)
    assert want in refused(write(file, header, data))


@pytest.mark.parametrize("lost", [1, 4096, 10_000_000])
def test_truncated_data(file: Path, lost: int):
    header = good_header()
    data = header[FINAL_NORM]["data_offsets"][1]
    assert "the file is cut off" in refused(write(file, header, data - lost))


def test_data_after_the_last_tensor(file: Path):
    header = good_header()
    data = header[FINAL_NORM]["data_offsets"][1]
    assert f"(got {data + 2} bytes)" in refused(write(file, header, data + 2))


# ---- other models -------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(Config(layers=1).shapes()))
def test_a_missing_tensor(file: Path, name: str):
    header = good_header(layers=1)
    del header[name]
    pack(header)
    assert f"{name} must be BF16 of shape" in (text := refused(write(file, header)))
    assert "got no such tensor" in text


def test_a_missing_layer(file: Path):
    header = {k: v for k, v in good_header(layers=3).items() if ".layers.1." not in k}
    pack(header)
    text = refused(write(file, header))
    assert text.startswith("model.layers.1.input_layernorm.weight must be")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EMBED, [32000, 2048]),
        (Q_PROJ, [2048, 4096]),
        (Q_PROJ, [2048 * 2048]),
        ("model.layers.0.mlp.down_proj.weight", [8192, 2048]),
        (FINAL_NORM, [2048, 1]),
    ],
)
def test_a_tensor_of_another_shape(file: Path, name: str, shape: list[int]):
    header = good_header()
    header[name]["shape"] = shape
    pack(header)
    text = refused(write(file, header))
    assert text.startswith(f"{name} must be BF16 of shape {list(Config().shapes()[name])}")
    assert f"(got shape {shape})" in text


@pytest.mark.parametrize("dtype", ["F16", "F32"])
@pytest.mark.parametrize("name", [EMBED, Q_PROJ, FINAL_NORM])
def test_a_tensor_that_is_not_bf16(file: Path, name: str, dtype: str):
    header = good_header()
    header[name]["dtype"] = dtype
    pack(header)
    text = refused(write(file, header))
    assert text.startswith(f"{name} must be BF16 of shape")
    assert f"(got {dtype})" in text


@pytest.mark.parametrize("indices", [[], [0, 16], [99999999999]])
def test_a_number_of_layers_that_the_engine_has_not(file: Path, indices: list[int]):
    good = good_header(layers=1)
    layer = [name for name in good if ".layers.0." in name]
    header: Header = {EMBED: good[EMBED], FINAL_NORM: good[FINAL_NORM]}
    for i in indices:
        header |= {name.replace(".0.", f".{i}."): dict(good[name]) for name in layer}
    pack(header)
    got = 17 if indices == [0, 16] else 0
    assert f"number of layers must be 1 to 16 (got {got}," in refused(write(file, header))


def test_a_tensor_too_many(file: Path):
    bias = "model.layers.0.self_attn.q_proj.bias"
    header = good_header() | {bias: {"dtype": "BF16", "shape": [2048]}}
    pack(header)
    assert f"(got {bias} too)" in refused(write(file, header))


def test_a_head_of_its_own(file: Path):
    header = good_header() | {HEAD: {"dtype": "BF16", "shape": [128256, 2048]}}
    pack(header)
    write(file, header)
    row = 77_777
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        stream.seek(8 + length + header[HEAD]["data_offsets"][0] + row * 4096 + 100)
        stream.write(b"\1")
    text = refused(file)
    assert text.startswith(f"{HEAD} must equal {EMBED}")
    assert f"row {row}" in text


# ---- folders ------------------------------------------------------------------------------


def config_json(**changes: Any) -> str:
    config = llama_config(num_hidden_layers=1).to_dict()
    for name, value in changes.items():
        if value is None:
            del config[name]
        else:
            config[name] = value
    return json.dumps(config)


OLD_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "model.safetensors", good_header(layers=1))
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": None, "rope_scaling": OLD_ROPE, "rope_theta": 500000.0},
        {"rope_parameters": None, "rope_scaling": OLD_ROPE, "rope_theta": 500000},
        {"head_dim": None},
        {"num_hidden_layers": None},
    ],
)
def test_both_spellings_of_a_right_config_are_accepted(folder: Path, changes: dict[str, Any]):
    (folder / "config.json").write_text(config_json(**changes))
    assert open_checkpoint(folder).layers == 1


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"model_type": "mistral"}, "model_type in"),
        ({"hidden_size": 3072}, "hidden_size in"),
        ({"intermediate_size": 8193}, "intermediate_size in"),
        ({"num_attention_heads": 24}, "num_attention_heads in"),
        ({"num_key_value_heads": 32}, "num_key_value_heads in"),
        ({"head_dim": 128}, "head_dim in"),
        ({"vocab_size": 32000}, "vocab_size in"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps in"),
        ({"rms_norm_eps": None}, "rms_norm_eps in"),
        ({"hidden_act": "gelu"}, "hidden_act in"),
        ({"rope_parameters": None}, "rope_theta in"),
        ({"rope_parameters": {**OLD_ROPE, "rope_theta": 10000.0}}, "rope_theta in"),
        ({"rope_parameters": None, "rope_theta": 500000.0}, "rope_type in"),
        (
            {"rope_parameters": {**OLD_ROPE, "rope_theta": 500000.0, "factor": 8.0}},
            "factor in",
        ),
        (
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear"}},
            "rope_type in",
        ),
        (
            {
                "rope_parameters": None,
                "rope_theta": 5e5,
                "rope_scaling": {**OLD_ROPE, "original_max_position_embeddings": 4096},
            },
            "original_max_position_embeddings in",
        ),
        ({"rope_parameters": [1]}, "rope_parameters in"),
        ({"num_hidden_layers": 16}, "num_hidden_layers in"),
    ],
)
def test_a_config_of_another_model(folder: Path, changes: dict[str, Any], want: str):
    (folder / "config.json").write_text(config_json(**changes))
    assert refused(folder).startswith(want)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_config(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    assert "config.json must" in refused(folder)


def index(folder: Path, text: str) -> Path:
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{", "must be a JSON file"),
        ("[]", "must hold a JSON object"),
        ("{}", "must name each tensor's file (got None)"),
        ('{"weight_map": {}}', "must name each tensor's file"),
        ('{"weight_map": {"a": 1}}', "must name each tensor's file"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "got no file 'gone.safetensors'"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "got no file '../model.safetensors'"),
    ],
)
def test_a_broken_index(tmp_path: Path, text: str, want: str):
    assert want in refused(index(tmp_path, text))


def test_a_tensor_in_two_shards(tmp_path: Path):
    for name in ("a.safetensors", "b.safetensors"):
        write(tmp_path / name, good_header())
    text = json.dumps({"weight_map": {EMBED: "a.safetensors", FINAL_NORM: "b.safetensors"}})
    assert f"{EMBED} must be in one file" in refused(index(tmp_path, text))


def test_a_shard_that_is_broken_is_named(tmp_path: Path):
    write(tmp_path / "a.safetensors", good_header())
    (tmp_path / "b.safetensors").write_bytes(b"short")
    text = json.dumps({"weight_map": {EMBED: "a.safetensors", FINAL_NORM: "b.safetensors"}})
    assert "b.safetensors must be a safetensors file" in refused(index(tmp_path, text))
