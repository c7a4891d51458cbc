"""The families that our decoder reads, each tiny and with what sets it apart; and a batch full of corners."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from rlhf_lightning.data.padding import left_pad, right_pad
from rlhf_lightning.types import Generation

SIZES = {
    "vocab_size": 330, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
KINDS = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32, "num_key_value_heads": 1}),
    "mistral, window 6": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
}
ONE = (7, 9, 11, 13, 5)
PROMPTS = (ONE, ONE, ONE, ONE[:3], (8,), ONE[:3])
ANSWERS = ((21, 22, 23), (21, 30), (21, 22, 23), (40,), (41, 42, 43, 44), (13, 5))


@pytest.fixture(scope="session")
def kinds(model_folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each of ``KINDS``; every bias, also of Qwen's queries, keys and values, is far from 0."""
    tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
    folders = {}
    for number, (name, (family, own)) in enumerate(KINDS.items()):
        torch.manual_seed(number)
        config = getattr(transformers, f"{family}Config")(**SIZES | own)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif "norm" in key:
                    parameter.uniform_(0.5, 1.5)
        folders[name] = tmp_path_factory.mktemp(f"kind_{number}")
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture
def corners() -> Generation:
    """Three answers to one prompt, two of them equal; a prompt that another begins with, whose answer goes on
    as that one does; a prompt of one token; an answer of one token; unequal lengths."""
    prompt_ids, prompt_mask = left_pad(PROMPTS, 0)
    ids, mask = right_pad([list(answer) for answer in ANSWERS], 0)
    return Generation(prompt_ids, prompt_mask, ids, mask, torch.arange(len(ids)), ("length",) * len(ids))
