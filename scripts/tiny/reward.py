"""The embedded reward model: trained by this project's own ``stage=reward``, loaded as PPO loads it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.config.schema import LoRAConfig, ModelConfig
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import Part
from rlhf_lightning.rewards.learned import LearnedReward

ROOT = Path(__file__).resolve().parents[2]
FILES = ("adapter_config.json", "adapter_model.safetensors", "score_head.safetensors", "backbone.json")


def train_reward(folder: Path, *, seed: int) -> None:
    """Train on the embedded pairs with the settings of ``model=tiny``, and keep the adapter in ``folder``."""
    with tempfile.TemporaryDirectory() as place:
        words = ["stage=reward", "logger=none", "model.lora.r=8", "model.lora.alpha=16", f"seed={seed}"]
        words.append(f"hydra.run.dir={place}/run")
        subprocess.run([sys.executable, str(ROOT / "train.py"), *words], check=True, cwd=place)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copy(Path(place, "run", "adapters", "reward", name), folder / name)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = (
        "../model"  # a path of the building machine would mean nothing elsewhere
    )
    path.write_text(json.dumps(config, indent=2) + "\n")
    path = folder / "backbone.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"path": "tiny"}, indent=2) + "\n")


class Scorer:
    """The stored reward on the embedded model, quantised or not."""

    def __init__(self, quantization: str) -> None:
        model = ModelConfig(quantization=quantization, dtype="float32", lora=LoRAConfig())  # type: ignore[arg-type]
        backbone = load_backbone(model)
        cast = {"reward": Part("reward", "tiny", "reward.path")}
        actor_critic = ActorCritic(backbone, model, cast=cast, temperature=1.0)
        self.head = actor_critic.heads["reward"]
        config = LearnedRewardConfig(kind="learned", batch_size=128)
        self.reward = LearnedReward(actor_critic.score, backbone.tokenizer, config)

    def scores(self, prompts: list[str], responses: list[str]) -> Tensor:
        """(B,) float32."""
        return self.reward(prompts, responses).scores

    def sides(self, pairs: list[dict[str, str]]) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected answers."""
        prompts = [pair["prompt"] for pair in pairs]
        chosen, rejected = (
            self.scores(prompts, [pair[side] for pair in pairs]) for side in ("chosen", "rejected")
        )
        return chosen, rejected

    def pair_accuracy(self, pairs: list[dict[str, str]]) -> float:
        """The share of pairs whose chosen answer scores higher."""
        chosen, rejected = self.sides(pairs)
        return float(torch.mean((chosen > rejected).float()))
