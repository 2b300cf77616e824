"""A checkpoint of Llama-3.2-1B's shape: synthetic, a Hugging Face folder or a .safetensors file.

`open_checkpoint` checks everything that can be wrong with a file before a tensor is read (upstream
checks nothing: main.cpp:79-147), and says what is wrong in one line. Tensors are read when asked
for: files are memory-mapped, and a comparison of layer 0 touches layer 0. To add a kind of
checkpoint: a subclass of Checkpoint here, with its header.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference.config import EMBED, Config
from reference.synthetic import spread, synthetic_tensor, synthetic_values

CACHE_BYTES = 1 << 30  # the embedding (0.5 GiB) and four layers
HEAD = "lm_head.weight"
_PREFIX = "model.layers."
_HEADER_LIMIT = 100_000_000  # as the safetensors library has it
_RETRY = "copy or download it again"


class CheckpointError(Exception):
    """A mistake of the user's checkpoint; str() is one line that says what, why and what to do."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, as a safetensors header says it: bytes from the data's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    file: Path | None = None  # None: synthetic

    def as_json(self) -> dict[str, Any]:
        """{dtype, shape, data_offsets}, as in a safetensors header."""
        offsets = [self.start, self.end]
        return {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": offsets}


class Cache:
    """The tensors used last, up to a number of bytes (one greater than that is not kept)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._tensors: OrderedDict[str, Tensor] = OrderedDict()

    def get(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The tensor `name`, made by `make` if it is not held."""
        if name in self._tensors:
            self._tensors.move_to_end(name)
            return self._tensors[name]
        tensor = make()
        if tensor.nbytes <= self._limit:
            self._tensors[name] = tensor
            self._bytes += tensor.nbytes
            while self._bytes > self._limit:
                self._bytes -= self._tensors.popitem(last=False)[1].nbytes
        return tensor


class Checkpoint:
    """What port and reference read their bfloat16 tensors from, by Hugging Face's names."""

    kind: str  # "synthetic" or "safetensors"
    seed: int | None = None
    path: Path | None = None

    def __init__(self, entries: dict[str, Entry], config: Config, cache_bytes: int) -> None:
        self.config = config
        self._entries = entries
        self._cache = Cache(cache_bytes)

    @property
    def layers(self) -> int:
        """Number of layers, 1 to 16."""
        return self.config.layers

    def header(self) -> dict[str, dict[str, Any]]:
        """{name: {dtype, shape, data_offsets}} in order of the data, as if all were one file."""
        return {name: entry.as_json() for name, entry in self._entries.items()}

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, bfloat16, not to be written to. KeyError if the model has none such."""
        return self._cache.get(name, lambda: self._read(self._entries[name], name))

    def rows(self, name: str, indices: Sequence[int] | Tensor) -> Tensor:
        """Rows `indices` of a matrix, in that order: bfloat16 (len(indices), width)."""
        return self.tensor(name)[torch.as_tensor(indices)]

    def _read(self, entry: Entry, name: str) -> Tensor:
        raise NotImplementedError


class Synthetic(Checkpoint):
    """Made from a seed by the recipe of synthetic.py; only what is asked for is made."""

    kind = "synthetic"

    def __init__(self, seed: int, layers: int, cache_bytes: int = CACHE_BYTES) -> None:
        config = Config(layers=layers)
        entries, at = {}, 0
        for name, shape in config.shapes().items():
            end = at + 2 * prod(shape)
            entries[name] = Entry("BF16", shape, at, end)
            at = end
        super().__init__(entries, config, cache_bytes)
        self.seed: int = seed

    def _read(self, entry: Entry, name: str) -> Tensor:
        return synthetic_tensor(self.seed, name, entry.shape, *spread(name))

    def rows(self, name: str, indices: Sequence[int] | Tensor) -> Tensor:
        rows, width = self._entries[name].shape
        out = torch.empty(len(indices), width, dtype=torch.bfloat16)
        std, mean = spread(name)
        for at, index in enumerate(torch.as_tensor(indices).tolist()):
            if not 0 <= index < rows:
                raise IndexError(f"row of {name} must be 0 to {rows - 1} (got {index})")
            values = synthetic_values(self.seed, name, width, std, mean, start=index * width)
            out[at] = torch.from_numpy(values.view("int16")).view(torch.bfloat16)
        return out


class Safetensors(Checkpoint):
    """One safetensors file or a folder's shards: memory-mapped, pages read when touched."""

    kind = "safetensors"

    def __init__(self, path: Path, entries: dict[str, Entry], config: Config, size: int) -> None:
        super().__init__(entries, config, size)
        self.path: Path = path
        self._files: dict[Path | None, Any] = {}
        for file in {entry.file for entry in entries.values()}:
            try:
                self._files[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file} must be a readable safetensors file (got: {error}); {_RETRY}"
                ) from None

    def _read(self, entry: Entry, name: str) -> Tensor:
        tensor: Tensor = self._files[entry.file].get_tensor(name)
        return tensor


def open_checkpoint(
    spec: str | Path, seed: int = 0, layers: int = 16, cache_bytes: int = CACHE_BYTES
) -> Checkpoint:
    """Open "synthetic" (made from `seed`, with `layers` layers) or a path, checked.

    A path is a .safetensors file, or a Hugging Face folder with model.safetensors or with
    model.safetensors.index.json and its shards; the folder's config.json is checked too if there is
    one. The number of layers is then the file's own. The output head is tied to the embedding: an
    `lm_head.weight` in the file must be bit for bit the embedding, and is not used. Tensors of
    other names are refused (a bias would change the result), but for old rotary_emb.inv_freq.

    At most `cache_bytes` bytes of tensors are held. Raises CheckpointError.
    """
    if str(spec) == "synthetic":
        if not 1 <= layers <= 16:
            raise CheckpointError(
                f"layers must be 1 to 16 (got {layers}); name a number in that range"
            )
        if not 0 <= seed < 2**64:
            raise CheckpointError(
                f"seed must be 0 to 2^64 - 1 (got {seed}); name one in that range"
            )
        return Synthetic(seed, layers, cache_bytes)
    path = Path(spec)
    files = _files_of(path)
    config_file = path / "config.json"
    told = None
    if path.is_dir() and config_file.exists():
        told = _check_config(config_file)  # first: a width says more than the shape of a tensor
    entries = _read_entries(files)
    count = _count_layers(entries)
    if told not in (None, count):
        raise CheckpointError(
            f"num_hidden_layers in {config_file} must be {count}, as the tensors have it "
            f"(got {told}); correct it if the checkpoint was cut, or {_RETRY}"
        )
    config = Config(layers=count)
    _check_tensors(entries, config)
    checkpoint = Safetensors(path, entries, config, cache_bytes)
    if HEAD in entries:
        _check_tied(checkpoint)
    return checkpoint


# ---- files --------------------------------------------------------------------------------


def _files_of(path: Path) -> list[Path]:
    """The safetensors files of a path, in the order in which their data is counted."""
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name too long, or with a null character
        exists = False
    if not exists:
        raise CheckpointError(
            f"model must be 'synthetic' or an existing path (got {path}, which does not exist); "
            "name a Hugging Face folder or a .safetensors file"
        )
    if path.is_file():
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(
            f"{path} must hold model.safetensors or model.safetensors.index.json (got neither); "
            "name the folder that holds them, or a .safetensors file"
        )
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise CheckpointError(
                f"{path} must hold every shard of its index (got no file {name!r}); {_RETRY}"
            )
    return [path / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    """The shard of each tensor, as model.safetensors.index.json tells it."""
    found = _read_json(index).get("weight_map")
    if isinstance(found, dict) and found and all(type(v) is str for v in found.values()):
        return found
    raise CheckpointError(
        f"weight_map of {index} must name each tensor's file (got {str(found)[:100]}); {_RETRY}"
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} must be a JSON file (got: {error}); {_RETRY}") from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file} must hold a JSON object (got {type(value).__name__}); {_RETRY}"
        )
    return value


# ---- headers ------------------------------------------------------------------------------


def _read_entries(files: list[Path]) -> dict[str, Entry]:
    """Entries of all files in the order of the data, counted on from file to file."""
    entries: dict[str, Entry] = {}
    base = 0
    for file in files:
        own = _read_header(file)
        for name, entry in own.items():
            if name in entries:
                raise CheckpointError(
                    f"{name} must be in one file (got {entries[name].file} and {file}); remove one"
                )
            entries[name] = replace(entry, start=entry.start + base, end=entry.end + base)
        base += max((entry.end for entry in own.values()), default=0)
    return entries


def _read_header(file: Path) -> dict[str, Entry]:
    """The checked header of one file, in the order of the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length_bytes = stream.read(8)
            if len(length_bytes) < 8:
                raise CheckpointError(
                    f"{file} must be a safetensors file (got {size} bytes, too few for a header); "
                    "name another"
                )
            length = int.from_bytes(length_bytes, "little")
            if length > size - 8:
                raise CheckpointError(
                    f"header of {file} must end within its {size} bytes (got {length}); "
                    f"it is cut off or not a safetensors file: {_RETRY}"
                )
            if length > _HEADER_LIMIT:
                raise CheckpointError(
                    f"header of {file} must take {_HEADER_LIMIT} bytes at most (got {length}); "
                    "the file is not a safetensors file: name another"
                )
            text = stream.read(length)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f"{file} must be readable (got: {reason}); check its rights"
        ) from None
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"header of {file} must be JSON (got: {error}); it is no safetensors file, or {_RETRY}"
        ) from None
    if not isinstance(header, dict):
        kind = type(header).__name__
        raise CheckpointError(f"header of {file} must be a JSON object (got {kind}); {_RETRY}")
    header.pop("__metadata__", None)
    for name in header:
        if not name.isprintable():
            raise CheckpointError(
                f"tensor names in {file} must be printable (got {name[:100]!r}); {_RETRY}"
            )
    entries = [(name, _entry(file, name, value)) for name, value in header.items()]
    entries.sort(key=lambda item: (item[1].start, item[1].end))
    _check_offsets(file, entries, size - 8 - length)
    return dict(entries)


def _entry(file: Path, name: str, value: object) -> Entry:
    """One value of the header, its form checked but not yet its meaning."""
    if isinstance(value, dict):
        with suppress(KeyError, TypeError, ValueError):
            dtype, shape, (start, end) = (
                value["dtype"],
                tuple(value["shape"]),
                value["data_offsets"],
            )
            numbers = (*shape, start, end)
            if isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers):
                return Entry(dtype, shape, start, end, file)
    raise CheckpointError(
        f"{name} in the header of {file} must have dtype, shape and data_offsets "
        f"(got {str(value)[:100]}); {_RETRY}"
    )


def _check_offsets(file: Path, entries: list[tuple[str, Entry]], data: int) -> None:
    """Offsets in order, in range, without overlaps or holes, and as long as the shape says."""
    at, before = 0, "the header"
    for name, entry in entries:
        where = f"offsets of {name} in {file}"
        span = f"[{entry.start}, {entry.end}]"
        if entry.end < entry.start:
            raise CheckpointError(f"{where} must ascend (got {span}); {_RETRY}")
        if entry.end > data:
            raise CheckpointError(
                f"{where} must lie within its {data} bytes of data (got {span}); "
                f"the file is cut off or its header is wrong: {_RETRY}"
            )
        if entry.start < at:
            raise CheckpointError(
                f"{where} must not overlap {before}, which ends at {at} (got {span}); {_RETRY}"
            )
        if entry.start > at:
            raise CheckpointError(
                f"{where} must begin where {before} ends, at {at} (got {span}); {_RETRY}"
            )
        if entry.dtype == "BF16" and entry.end - entry.start != 2 * prod(entry.shape):
            raise CheckpointError(
                f"{where} must span {2 * prod(entry.shape)} bytes for BF16 {list(entry.shape)} "
                f"(got {entry.end - entry.start}); {_RETRY}"
            )
        at, before = entry.end, name
    if at != data:
        raise CheckpointError(
            f"data of {file} must end with its last tensor, at {at} (got {data} bytes); {_RETRY}"
        )


# ---- the model ----------------------------------------------------------------------------


def _count_layers(entries: dict[str, Entry]) -> int:
    """Number of layers by the greatest index found; 1 to 16."""
    found = {
        int(index)
        for name in entries
        if name.startswith(_PREFIX) and (index := name.split(".")[2]).isdecimal() and len(index) < 9
    }
    layers = max(found, default=-1) + 1
    if not 1 <= layers <= 16:
        raise CheckpointError(
            f"number of layers must be 1 to 16 (got {layers}, by the tensor names); "
            "name a checkpoint of Llama-3.2-1B, or one cut to fewer layers"
        )
    return layers


def _check_tensors(entries: dict[str, Entry], config: Config) -> None:
    expected = config.shapes()
    head = {HEAD: expected[EMBED]} if HEAD in entries else {}
    for name, shape in {**expected, **head}.items():
        entry = entries.get(name)
        wanted = f"{name} must be BF16 of shape {list(shape)}"
        if entry is None:
            raise CheckpointError(
                f"{wanted} (got no such tensor); name a whole Llama-3.2-1B checkpoint"
            )
        if entry.shape != shape:
            raise CheckpointError(
                f"{wanted} (got shape {list(entry.shape)}); name a checkpoint of Llama-3.2-1B"
            )
        if entry.dtype != "BF16":
            raise CheckpointError(
                f"{wanted} (got {entry.dtype}); save the model again after model.bfloat16()"
            )
    for name in entries:
        known = name in expected or name == HEAD or name.endswith("rotary_emb.inv_freq")
        if not known:
            raise CheckpointError(
                f"tensors must be those of Llama-3.2-1B (got {name} too); "
                "remove it, or merge it into the weights if it is an adapter or a quantisation"
            )


def _check_tied(checkpoint: Checkpoint) -> None:
    head, embed = checkpoint.tensor(HEAD), checkpoint.tensor(EMBED)
    for start in range(0, head.shape[0], 8192):
        rows = slice(start, start + 8192)
        same = head[rows].view(torch.int16) == embed[rows].view(torch.int16)
        if not same.all():
            row = start + int((~same).any(dim=1).nonzero()[0])
            raise CheckpointError(
                f"{HEAD} must equal {EMBED}, the engine ties them (got another row {row}); "
                "name a checkpoint with tied embeddings"
            )


def _check_config(file: Path) -> int | None:
    """Widths and rope settings of a config.json, in the old and in transformers 5's spelling.

    Returns its number of layers if it tells one.
    """
    given = _read_json(file)
    ours = Config()
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = given.get(key) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{key} in {file} must be an object (got {value!r}); {_RETRY}")
        rope |= value
    checks: list[
        tuple[str, Any, Any]
    ] = [  # name, expected, got; absent means what transformers assumes
        ("model_type", "llama", given.get("model_type", "llama")),
        ("hidden_size", ours.hidden, given.get("hidden_size", ours.hidden)),
        ("intermediate_size", ours.intermediate, given.get("intermediate_size", ours.intermediate)),
        (
            "num_attention_heads",
            ours.query_heads,
            given.get("num_attention_heads", ours.query_heads),
        ),
        ("num_key_value_heads", ours.kv_heads, given.get("num_key_value_heads", ours.query_heads)),
        ("head_dim", ours.head, given.get("head_dim") or ours.head),
        ("vocab_size", ours.vocab, given.get("vocab_size", ours.vocab)),
        ("rms_norm_eps", ours.norm_eps, given.get("rms_norm_eps", 1e-6)),
        ("hidden_act", "silu", given.get("hidden_act", "silu")),
        ("rope_theta", ours.rope_theta, rope.get("rope_theta", given.get("rope_theta", 10000.0))),
        ("rope_type", "llama3", rope.get("rope_type", rope.get("type", "default"))),
        ("factor", ours.rope_factor, rope.get("factor")),
        ("low_freq_factor", ours.rope_low_freq_factor, rope.get("low_freq_factor")),
        ("high_freq_factor", ours.rope_high_freq_factor, rope.get("high_freq_factor")),
        (
            "original_max_position_embeddings",
            ours.rope_original_positions,
            rope.get("original_max_position_embeddings"),
        ),
    ]
    for name, expected, got in checks:
        if got != expected:
            raise CheckpointError(
                f"{name} in {file} must be {expected}, as Llama-3.2-1B has it (got {got}); "
                "name a checkpoint of Llama-3.2-1B"
            )
    return given.get("num_hidden_layers")
