"""A run's parts on the small models, ready to be examined, with adapters and a classifier to go with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rlhf_lightning.build import Parts
from rlhf_lightning.config.schema import Config, ModelConfig
from rlhf_lightning.data.datamodule import PromptDataModule
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import ppo_cast
from rlhf_lightning.rewards.build import build_reward
from rlhf_lightning.stages.ppo import PPO

LINES = "the soup\na slow waiter brought a cold\nwe\nnothing on the menu was\nthe bread was fresh\na plate\n"


@pytest.fixture(scope="session")
def adapters(model_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each family a reward adapter with its score head; an SFT adapter, ``policy``, lies beside it."""
    folders = {}
    for family, path in model_folders.items():
        torch.manual_seed(7)
        config = ModelConfig(path=str(path), quantization="none", dtype="float32")
        actor_critic = ActorCritic(
            load_backbone(config), config, cast=ppo_cast(config, reward_path=None), temperature=1.0
        )
        with torch.no_grad():
            for name, parameter in actor_critic.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.05)
        folder = tmp_path_factory.mktemp(f"adapter_{family}")
        actor_critic.model.save_pretrained(str(folder), selected_adapters=["critic", "policy"])
        folders[family] = folder / "critic"
        actor_critic.value_head.save(folders[family] / "score_head.safetensors")
    return folders


@pytest.fixture(scope="session")
def classifier(model_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with two labels whose pad id is its end id."""
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_labels=2, pad_token_id=0, eos_token_id=0, bos_token_id=None,
        max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_parts(model_folders: dict[str, Path], adapters: dict[str, Path], classifier: Path, tmp_path: Path):
    """``make_parts("gpt2", reward="learned", sft=True, model={...}, ppo={...}) -> Parts``."""

    def make(
        family="llama", *, reward="learned", sft=False, model=None, ppo=None, generation=None, advantage=None
    ) -> Parts:
        file = tmp_path / "prompts.txt"
        file.write_text(LINES)
        rewards = {
            "learned": {"kind": "learned", "path": str(adapters[family])},
            "classifier": {"kind": "classifier", "path": str(classifier)},
            "length": {"kind": "length", "target": 4},
        }
        rewards["combined"] = {
            "kind": "combined",
            "parts": {"a": {"weight": 0.5, "reward": rewards["learned"]}, "b": {"reward": rewards["length"]}},
        }
        start = {"adapter": str(adapters[family].parent / "policy")} if sft else {}
        config = Config(
            model={"path": str(model_folders[family]), "quantization": "none", "dtype": "float32"}
            | start
            | (model or {}),
            ppo={"prompts_per_iteration": 8, "minibatch_size": 8, "micro_batch_size": 4} | (ppo or {}),
            generation={"max_new_tokens": 6} | (generation or {}),
            advantage=advantage or {"kind": "gae"},
            data={"path": str(file)},
            reward=rewards[reward],
        )
        torch.manual_seed(config.seed)
        backbone = load_backbone(config.model)
        actor_critic = ActorCritic(
            backbone,
            config.model,
            cast=ppo_cast(
                config.model,
                reward_path=str(adapters[family]) if reward in ("learned", "combined") else None,
                critic=config.has_critic,
            ),
            temperature=config.generation.temperature,
        )
        data = PromptDataModule(
            config.data,
            backbone.tokenizer,
            room=100,
            prompts_per_iteration=8,
            samples_per_prompt=1,
            seed=config.seed,
        )
        judge = build_reward(
            config.reward, score=actor_critic.score, tokenizer=backbone.tokenizer, context=128
        )
        return Parts(PPO(actor_critic, judge, config), data)

    return make
