"""A weighted sum of rewards, every term kept for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_lightning.rewards.base import Reward, checked
from rlhf_lightning.types import Scores


class CombinedReward:
    """score = sum over terms of weight * term.

    ``parts`` holds each term before its weight under its own name, and a term's own parts under
    ``name/part``.
    """

    def __init__(self, terms: Mapping[str, tuple[float, Reward]], *, name: str = "reward") -> None:
        self.terms = dict(terms)
        self.name = name

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        total = torch.zeros(len(responses), dtype=torch.float64)
        parts: dict[str, Tensor] = {}
        for term, (weight, reward) in self.terms.items():
            scored = reward(prompts, responses)
            parts[term] = scored.scores
            parts |= {f"{term}/{inner}": values for inner, values in scored.parts.items()}
            total += weight * scored.scores.double()
        return Scores(checked(total, name=self.name, prompts=prompts, responses=responses), parts)
