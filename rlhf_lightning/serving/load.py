"""A trained reward model, ready to score texts, without policy or trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import Cast, Part
from rlhf_lightning.rewards.base import Reward
from rlhf_lightning.rewards.build import build_reward
from rlhf_lightning.serving.find import KEY, find_reward_model


@dataclass(frozen=True)
class RewardModel:
    """What scores, and in words what it is."""

    reward: Reward
    name: str
    description: str


def load_reward_model(
    path: str, *, base: str | None = None, batch_size: int = 32, device: torch.device | str = "cpu"
) -> RewardModel:
    """Load backbone, reward adapter and score head.

    Args:
        path, base: as ``find_reward_model`` takes them.
        batch_size: answers in one forward pass.

    Raises:
        UserError: there is no such reward model, or it does not fit its backbone.
    """
    found = find_reward_model(path, base=base)
    backbone = load_backbone(found.model, device=device)
    cast: Cast = {"reward": Part("reward", found.adapter, KEY)}
    actor_critic = ActorCritic(backbone, found.model, cast=cast, temperature=1.0)
    actor_critic.eval()
    reward = build_reward(
        LearnedRewardConfig(kind="learned", path=found.adapter, batch_size=batch_size),
        score=actor_critic.score,
        tokenizer=backbone.tokenizer,
        context=backbone.context_length,
        name="score",
    )
    model = found.model
    on = f"on {model.path} ({model.quantization}, {model.dtype}, {actor_critic.device})"
    return RewardModel(reward, model.name, f"{found.text}, {on}")
