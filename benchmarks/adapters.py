"""A LoRA adapter and score head with random weights, written without loading the model that they fit."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.locate import SCORE_HEAD
from rlhf_lightning.models.heads import ScalarHead
from scripts.random_llama import shards

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shape_at(path: str) -> LlamaConfig:
    """The config of the model that ``model.path`` names: ``tiny``, or a folder."""
    return AutoConfig.from_pretrained(tiny_path("model") if path == "tiny" else Path(path).expanduser())


def write_reward_adapter(
    folder: Path, config: LlamaConfig, *, rank: int, alpha: float, seed: int = 0
) -> Path:
    """A reward role for a Llama of this config, in PEFT's format; low-rank terms N(0, 0.01²), float32.

    Returns:
        ``folder``, for ``reward.path``.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for shapes in shards(config):
        for name, shape in shapes.items():
            if name.split(".")[-2] not in MODULES:
                continue
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            for part, size in (("lora_A", (rank, shape[1])), ("lora_B", (shape[0], rank))):
                tensors[f"{layer}.{part}.weight"] = torch.empty(size).normal_(0.0, 0.01, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    lora = LoraConfig(r=rank, lora_alpha=int(alpha), target_modules=list(MODULES), task_type="CAUSAL_LM")
    lora.inference_mode = True
    lora.save_pretrained(folder)
    ScalarHead(config.hidden_size).save(folder / SCORE_HEAD)
    return folder
