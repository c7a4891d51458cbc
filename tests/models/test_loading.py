"""How a backbone's weights come from their files."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from transformers import modeling_utils

from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.backbone import load_backbone


@pytest.mark.parametrize(("quantization", "expected"), [("none", "mmap"), ("nf4", "pread")])
def test_weights_that_are_quantised_are_read_and_not_mapped(
    model_folders, monkeypatch, quantization, expected
):
    """A mapped file's pages stay resident until everything is loaded: 13.5 GB for a 7B model."""
    opened, backends = modeling_utils.safe_open, []

    def watched(*args, **keywords):
        backends.append(keywords.get("backend", "mmap"))
        return opened(*args, **keywords)

    monkeypatch.setattr(modeling_utils, "safe_open", watched)
    load_backbone(ModelConfig(path=str(model_folders["llama"]), dtype="float32", quantization=quantization))
    assert backends and set(backends) == {expected}
    assert modeling_utils.safe_open is watched


def test_transformers_is_left_as_it_was_where_loading_fails(tmp_path):
    opened = modeling_utils.safe_open
    with pytest.raises(UserError):
        load_backbone(ModelConfig(path=str(tmp_path)))
    assert modeling_utils.safe_open is opened


def test_loading_bounds_what_products_keep(model_folders, monkeypatch):
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    load_backbone(ModelConfig(path=str(model_folders["llama"]), dtype="float32"))
    assert os.environ["LRU_CACHE_CAPACITY"] == os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"


def test_longrope_reads_no_further_than_a_row_has_frequencies_of_its_own(model_folders, tmp_path):
    folder = tmp_path / "long"
    shutil.copytree(model_folders["llama"], folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
    }
    file.write_text(json.dumps(config))
    usual = load_backbone(ModelConfig(path=str(model_folders["llama"]), dtype="float32"))
    assert usual.context_length > 16
    assert load_backbone(ModelConfig(path=str(folder), dtype="float32")).context_length == 16
