"""Small real models made on the spot: a Llama and a GPT-2, saved with a real BPE tokenizer."""

from __future__ import annotations

import os

os.environ.setdefault("WANDB_MODE", "offline")

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import ppo_cast
from rlhf_lightning.types import Prompts

TEXT = [
    "the soup was warm and the bread was fresh",
    "a slow waiter brought a cold plate of rice",
    "we would come back for the noodles any day",
    "nothing on the menu was worth the price",
]
PROMPTS = ("the soup", "a slow waiter brought a cold", "we", "nothing on the menu")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``llama`` (rotary, tied, two end ids) and ``gpt2`` (absolute positions, Conv1D, dropout set)."""
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    torch.manual_seed(0)
    built = {
        "llama": LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                tie_word_embeddings=True, eos_token_id=[0, 1], bos_token_id=None, pad_token_id=0,
                initializer_range=0.3,
            )
        ),
        "gpt2": GPT2LMHeadModel(
            GPT2Config(
                vocab_size=size, n_embd=64, n_layer=2, n_head=4, n_positions=128, eos_token_id=0,
                bos_token_id=0, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, initializer_range=0.3,
            )
        ),
    }  # fmt: skip
    folders = {}
    for name, model in built.items():
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture
def build(model_folders: dict[str, Path]):
    """``build("llama", critic="shared", ...) -> ActorCritic`` in float32 unless told otherwise."""

    def make(
        family: str = "llama", *, temperature: float = 1.0, reward_path: str | None = None, **settings
    ) -> ActorCritic:
        settings = {"quantization": "none", "dtype": "float32", "path": str(model_folders[family])} | settings
        config = ModelConfig(**settings)
        torch.manual_seed(1)
        return ActorCritic(
            load_backbone(config),
            config,
            cast=ppo_cast(config, reward_path=reward_path),
            temperature=temperature,
        )

    return make


@pytest.fixture
def prompts_for():
    """``prompts_for(actor_critic) -> Prompts`` of uneven lengths."""

    def make(actor_critic: ActorCritic, texts: tuple[str, ...] = PROMPTS, first_row: int = 0) -> Prompts:
        ids = tuple(tuple(actor_critic.backbone.tokenizer(text).input_ids) for text in texts)
        return Prompts(ids=ids, texts=texts, rows=tuple(range(first_row, first_row + len(texts))))

    return make


@pytest.fixture
def disturb():
    """Give fresh adapters random B matrices, so that roles differ from each other and from the backbone."""

    def do(actor_critic: ActorCritic, scale: float = 0.1) -> ActorCritic:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in actor_critic.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        return actor_critic

    return do
