"""transformers' Llama of Llama-3.2-1B's widths, for the tests that read what it saves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.checkpoint import Checkpoint


@dataclass(frozen=True)
class SavedModel:
    """Folders written by save_pretrained, and the checkpoint that their weights came from."""

    whole: Path  # model.safetensors
    sharded: Path  # model.safetensors.index.json and shards
    source: Checkpoint


def llama_config(**changes: Any) -> Any:
    """transformers' configuration of Llama-3.2-1B with two layers."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    return LlamaConfig(**{**settings, **changes})
