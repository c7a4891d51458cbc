"""A reward model on the policy's own backbone: one adapter, one head, one number for a whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.data.encoding import encode_judged
from rlhf_lightning.data.padding import right_pad
from rlhf_lightning.rewards.base import checked
from rlhf_lightning.types import Scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNLIMITED = 10**9  # tokenizers without a limit name a number far above this


def by_length(rows: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Row numbers in batches of like length, longest first: memory runs out at once or never."""
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class LearnedReward:
    """Scores texts with the backbone's reward role."""

    def __init__(
        self,
        score: Callable[[Tensor, Tensor], Tensor],
        tokenizer: PreTrainedTokenizerBase,
        config: LearnedRewardConfig,
        *,
        context: int | None = None,
        name: str = "reward",
    ) -> None:
        """
        Args:
            score: ``(input_ids, attention_mask) -> (B,)``, read at the last position whose mask is True.
            tokenizer: the backbone's, which is the reward model's own too.
            context: positions that the backbone has; a longer text keeps its end. None: the tokenizer's
                limit.
        """
        self.score = score
        self.tokenizer = tokenizer
        self.batch_size = config.batch_size
        limit = context or tokenizer.model_max_length
        self.limit = limit if limit < UNLIMITED else None
        self.name = name

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        rows = [self._encode(p, r) for p, r in zip(prompts, responses, strict=True)]
        pad = self.tokenizer.pad_token_id
        scores = torch.zeros(len(rows))
        for batch in by_length(rows, self.batch_size):
            ids, mask = right_pad([rows[row] for row in batch], pad if pad is not None else 0)
            scores[batch] = self.score(ids, mask).detach().float().cpu()
        return Scores(checked(scores, name=self.name, prompts=prompts, responses=responses), {})

    def _encode(self, prompt: str, response: str) -> list[int]:
        ids = encode_judged(self.tokenizer, prompt, response)
        return ids[-self.limit :] if self.limit is not None else ids
