"""What all tests share: one thread for each of several test processes, and a saved model."""

import os
import shutil
from collections.abc import Iterator

import pytest
import torch
from llama_folders import SavedModel, llama_config

from reference.checkpoint import open_checkpoint

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SavedModel]:
    """A folder of Llama-3.2-1B's widths as transformers saves it.

    Two layers of seed 7: no weight is one that any golden figure was made with."""
    from transformers import LlamaForCausalLM

    source = open_checkpoint("synthetic", seed=7, layers=2)
    folder = tmp_path_factory.mktemp("saved")
    with torch.device("meta"):  # transformers' own initialisation takes longer than all tests here
        model = LlamaForCausalLM(llama_config())
    weights = {name: source.tensor(name) for name in source.header()}
    told = model.load_state_dict(weights, strict=False, assign=True)
    assert told.missing_keys == ["lm_head.weight"]
    assert told.unexpected_keys == []
    model.tie_weights()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "sharded", max_shard_size="200MB")
    yield SavedModel(folder / "whole", folder / "sharded", source)
    shutil.rmtree(folder)  # 1.5 GB: pytest itself would keep the last three
