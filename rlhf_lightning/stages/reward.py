"""A reward model from preference pairs, as an adapter and a score head on the shared backbone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_lightning.errors import UserError
from rlhf_lightning.functional.calibration import correlation, ordered_right, reliability, wilson_interval
from rlhf_lightning.functional.preference_losses import bradley_terry_loss
from rlhf_lightning.models.roles import Role
from rlhf_lightning.stages.pairs import pair_places, pair_row, pair_size
from rlhf_lightning.stages.supervised import Supervised, Terms
from rlhf_lightning.types import TokenPair


class RewardModel(Supervised[TokenPair]):
    """Minimises -log sigmoid(r(chosen) - r(rejected) - margin) over pairs (Bradley and Terry 1952).

    Only differences of scores are learned; the head's bias is set so that held-out chosen answers average 0,
    whenever they are measured.
    """

    name = "reward_model"
    role: Role = "reward"
    rates = {"adapter": "reward_model.lr", "head": "reward_model.head_lr"}  # noqa: RUF012  # read only

    measured: Terms | None = None
    """Scores and lengths of the held-out pairs as last measured, centred."""

    def on_fit_start(self) -> None:
        learned = self.trainer.datamodule.dataset.examples  # type: ignore[attr-defined]
        pairs = [*learned, *self.held_out]
        alike = sum(pair.chosen == pair.rejected for pair in pairs)
        if alike:
            raise UserError(
                f"reward_model.max_length={self.options.max_length}: {alike} of {len(pairs)} pairs are equal "
                "on both sides as tokens cut to that length; raise it, or take those pairs out of the data"
            )

    def groups(self) -> dict[str, list[torch.nn.Parameter]]:
        head = self.actor_critic.heads["reward"]
        own = {id(parameter) for parameter in head.parameters()}
        adapter = [p for p in self.actor_critic.parameters_of("reward") if id(p) not in own]
        return {"adapter": adapter, "head": [head.weight]}

    def peaks(self) -> dict[str, float]:
        options = self.config.reward_model
        return {"adapter": options.lr, "head": options.head_lr}

    def items(self, batch: Sequence[TokenPair]) -> int:
        return len(batch)

    def size(self, example: TokenPair) -> int:
        return pair_size(example)

    def loss(self, batch: Sequence[TokenPair], denominator: int) -> tuple[Tensor, Terms]:
        forest = self.actor_critic.plant([pair_row(pair) for pair in batch])
        chosen, rejected = self.actor_critic.end_scores(forest, pair_places(forest)).chunk(2)
        margin = torch.tensor([pair.margin for pair in batch], device=chosen.device)
        loss, _ = bradley_terry_loss(chosen, rejected, margin=margin, denominator=denominator)
        lengths = [[len(pair.chosen), len(pair.rejected)] for pair in batch]
        long, short = torch.tensor(lengths, dtype=torch.float32).unbind(1)
        terms = {"chosen": chosen, "rejected": rejected, "chosen_length": long}
        return loss, {name: x.detach() for name, x in terms.items()} | {"rejected_length": short}

    def figures(self, terms: Terms) -> dict[str, float]:
        chosen, rejected = terms["chosen"], terms["rejected"]
        return {
            "accuracy": float(ordered_right(chosen, rejected).mean()),
            "margin": float((chosen - rejected).mean()),
            "chosen_score": float(chosen.mean()),
            "rejected_score": float(rejected.mean()),
        }

    def measure(self, examples: Sequence[TokenPair]) -> dict[str, float]:
        """Beside the figures of training: the accuracy's 95 % interval, the calibration error, and how far
        scores and lengths go together, over both sides."""
        loss, terms = self.look(examples)
        level = terms["chosen"].mean()
        self.actor_critic.heads["reward"].bias.data -= level.to(self.actor_critic.device)
        terms |= {name: terms[name] - level for name in ("chosen", "rejected")}
        self.measured = terms
        figures = {"loss": loss} | self.figures(terms)
        low, high = wilson_interval(figures["accuracy"] * len(examples), len(examples))
        scores = torch.cat([terms["chosen"], terms["rejected"]])
        lengths = torch.cat([terms["chosen_length"], terms["rejected_length"]])
        return figures | {
            "accuracy_low": low,
            "accuracy_high": high,
            "ece": reliability(terms["chosen"], terms["rejected"]).error,
            "length_correlation": correlation(scores, lengths),
        }
