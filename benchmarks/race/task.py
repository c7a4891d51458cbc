"""What our side needs before it starts: the prompts, and a reward adapter as untrained as the peer's."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.race.subjects import questions
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import reward_cast


def write_prompts(path: Path, count: int) -> Path:
    """One prompt a line, as JSON."""
    rows = (json.dumps({"prompt": text}) + "\n" for text in questions(count))
    path.write_text("".join(rows), encoding="utf-8")
    return path


def write_reward(model: ModelConfig, folder: Path, *, seed: int = 0) -> Path:
    """A reward adapter with random low-rank terms and head, saved as ``stage=reward`` saves one.

    Returns:
        The folder for ``reward.path``.
    """
    torch.manual_seed(seed)
    roles = ActorCritic(load_backbone(model), model, cast=reward_cast(model), temperature=1.0)
    with torch.no_grad():
        for name, parameter in roles.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.01)
    roles.save(folder)
    return folder / "reward"
