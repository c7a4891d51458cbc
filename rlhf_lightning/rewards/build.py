"""From a validated config to the reward it describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_lightning.config import rewards as kinds
from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.base import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_reward(
    config: kinds.RewardConfig,
    *,
    score: Callable[[Tensor, Tensor], Tensor] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    context: int | None = None,
    device: torch.device | str = "cpu",
    name: str = "reward",
) -> Reward:
    """Build the reward; what can be wrong with it is found here, before the first rollout.

    Args:
        score: ``(input_ids, attention_mask) -> (B,)`` of the backbone's reward role, for ``kind: learned``.
        tokenizer: the backbone's, for ``kind: learned``.
        context: positions that the backbone has, for ``kind: learned``; None: the tokenizer's own limit.
        device: where a separate classifier runs.
        name: the config key, for messages.

    Raises:
        UserError: the reward cannot be had; the message names the key.
    """
    match config:
        case kinds.FunctionRewardConfig():
            from rlhf_lightning.rewards.functions import FunctionReward

            return FunctionReward(config, name=name)
        case kinds.LengthRewardConfig():
            from rlhf_lightning.rewards.simple import LengthReward

            return LengthReward(config, name=name)
        case kinds.RegexRewardConfig():
            from rlhf_lightning.rewards.simple import RegexReward

            return RegexReward(config, name=name)
        case kinds.ClassifierRewardConfig():
            from rlhf_lightning.rewards.classifier import ClassifierReward

            return ClassifierReward(config, device=device, name=name)
        case kinds.HTTPRewardConfig():
            from rlhf_lightning.rewards.http import HTTPReward

            return HTTPReward(config, name=name)
        case kinds.LearnedRewardConfig():
            from rlhf_lightning.rewards.learned import LearnedReward

            if score is None or tokenizer is None:
                raise UserError(f"{name}.kind=learned needs a backbone that carries the reward adapter")
            return LearnedReward(score, tokenizer, config, context=context, name=name)
        case kinds.CombinedRewardConfig():
            from rlhf_lightning.rewards.combine import CombinedReward

            terms = {}
            for part, term in config.parts.items():
                inner = build_reward(
                    term.reward,
                    score=score,
                    tokenizer=tokenizer,
                    context=context,
                    device=device,
                    name=f"{name}.parts.{part}.reward",
                )
                terms[part] = (term.weight, inner)
            return CombinedReward(terms, name=name)
