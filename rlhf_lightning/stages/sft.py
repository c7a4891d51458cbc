"""Supervised fine-tuning: the answers of demonstrations are learned, their prompts are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_lightning.models.forest import Place, Segment
from rlhf_lightning.models.roles import Role
from rlhf_lightning.stages.supervised import Supervised, Terms
from rlhf_lightning.types import Demonstration

PACKED = 4  # longest demonstrations to a row: hardly a pad is left, and attention's square stays small


class SFT(Supervised[Demonstration]):
    """Minimises the mean negative log-likelihood of every learned token, end tokens included.

    With ``sft.packing`` several demonstrations lie in one row, and none sees another.
    """

    name = "sft"
    role: Role = "policy"
    rates = {"policy": "sft.lr"}  # noqa: RUF012  # read only

    def groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"policy": self.actor_critic.parameters_of("policy")}

    def items(self, batch: Sequence[Demonstration]) -> int:
        """Learned tokens; the first token of a text is predicted from nothing, and not learned."""
        return sum(len(one.ids) - max(one.learned, 1) for one in batch)

    def size(self, example: Demonstration) -> int:
        return len(example.ids)

    def loss(self, batch: Sequence[Demonstration], denominator: int) -> tuple[Tensor, Terms]:
        width = min(self.config.sft.max_length, PACKED * max(map(self.size, batch)))
        rows = pack(batch, width) if self.config.sft.packing else [[one] for one in batch]
        forest = self.actor_critic.plant([segments(row) for row in rows])
        answers: list[Place] = []
        for row, places in zip(rows, forest.places, strict=True):
            number = 0
            for one in row:
                number += one.learned > 0  # the prompt lies before its answer
                answers.append(places[number])
                number += 1
        logprobs, mask = self.actor_critic.segment_logprobs(forest, answers, "policy")
        return -torch.where(mask, logprobs, 0.0).sum() / denominator, {"nll": -logprobs.detach()[mask]}

    def figures(self, terms: Terms) -> dict[str, float]:
        return {"perplexity": float(terms["nll"].double().mean().exp())}


def segments(row: Sequence[Demonstration]) -> list[Segment]:
    """Demonstrations side by side: each a prompt and the answer that continues it, or an answer alone."""
    found: list[Segment] = []
    for one in row:
        if one.learned:
            found.append(Segment(one.ids[: one.learned]))
            found.append(Segment(one.ids[one.learned :], len(found) - 1))
        else:
            found.append(Segment(one.ids))
    return found


def pack(batch: Sequence[Demonstration], width: int) -> list[list[Demonstration]]:
    """Demonstrations in as few rows of at most ``width`` tokens as first fit, longest first, finds."""
    rows: list[list[Demonstration]] = []
    room: list[int] = []
    for one in sorted(batch, key=lambda one: -len(one.ids)):
        place = next((i for i, left in enumerate(room) if left >= len(one.ids)), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(max(width, len(one.ids)))
        rows[place].append(one)
        room[place] -= len(one.ids)
    return rows
