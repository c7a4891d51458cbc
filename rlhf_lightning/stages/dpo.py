"""Direct preference optimisation: the policy learns from pairs, without a reward model or a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_lightning.functional.preference_losses import dpo_loss
from rlhf_lightning.models.roles import Role
from rlhf_lightning.stages.pairs import pair_places, pair_row, pair_size
from rlhf_lightning.stages.supervised import Supervised, Terms
from rlhf_lightning.types import TokenPair


class DPO(Supervised[TokenPair]):
    """Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, with label smoothing, or IPO.

    The implicit reward of an answer is ``beta (log pi - log pi_ref)``, summed over its tokens. The
    reference's log-probabilities are computed once for all examples, before the first step, always in the
    same batches, so that a resumed run works with the same bits.
    """

    name = "dpo"
    role: Role = "policy"
    rates = {"policy": "dpo.lr"}  # noqa: RUF012  # read only

    def on_fit_start(self) -> None:
        examples = self.trainer.datamodule.dataset.used  # type: ignore[attr-defined]
        self.known = self.reference([*dict.fromkeys([*examples, *self.held_out])])

    @torch.no_grad()
    def reference(self, pairs: Sequence[TokenPair]) -> dict[TokenPair, tuple[float, float]]:
        """log pi_ref of both answers of each pair, nats, summed over their tokens."""
        found: dict[TokenPair, tuple[float, float]] = {}
        for piece in self.micro_batches(pairs):
            both = torch.stack(self._logprobs(piece, "reference"), dim=1).tolist()
            found |= {pair: (chosen, rejected) for pair, (chosen, rejected) in zip(piece, both, strict=True)}
            self.progress("reference", len(found), len(pairs))
        return found

    def groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"policy": self.actor_critic.parameters_of("policy")}

    def items(self, batch: Sequence[TokenPair]) -> int:
        return len(batch)

    def size(self, example: TokenPair) -> int:
        return pair_size(example)

    def loss(self, batch: Sequence[TokenPair], denominator: int) -> tuple[Tensor, Terms]:
        chosen, rejected = self._logprobs(batch, "policy")
        kept = torch.tensor([self.known[pair] for pair in batch], device=chosen.device)
        ref_chosen, ref_rejected = kept.unbind(1)
        options = self.config.dpo
        tokens = torch.ones_like(kept)
        if options.loss == "ipo":  # of averages over tokens, see dpo_loss
            tokens = torch.tensor([[len(p.chosen), len(p.rejected)] for p in batch], device=kept.device)
        of_chosen, of_rejected = tokens.unbind(1)
        loss, _ = dpo_loss(
            chosen / of_chosen,
            rejected / of_rejected,
            ref_chosen=ref_chosen / of_chosen,
            ref_rejected=ref_rejected / of_rejected,
            beta=options.beta,
            label_smoothing=options.label_smoothing,
            kind=options.loss,
            denominator=denominator,
        )
        terms = {
            "chosen_reward": options.beta * (chosen - ref_chosen),
            "rejected_reward": options.beta * (rejected - ref_rejected),
            "chosen_logprob": chosen,
            "rejected_logprob": rejected,
        }
        return loss, {name: values.detach() for name, values in terms.items()}

    def figures(self, terms: Terms) -> dict[str, float]:
        margin = terms["chosen_reward"] - terms["rejected_reward"]
        own = {"accuracy": float((margin > 0).float().mean()), "margin": float(margin.mean())}
        return super().figures(terms) | own

    def _logprobs(self, pairs: Sequence[TokenPair], role: Role) -> tuple[Tensor, Tensor]:
        forest = self.actor_critic.plant([pair_row(pair) for pair in pairs])
        logprobs, mask = self.actor_critic.segment_logprobs(forest, pair_places(forest), role)
        chosen, rejected = torch.where(mask, logprobs, 0.0).sum(dim=1).chunk(2)
        return chosen, rejected
