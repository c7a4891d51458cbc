"""The figures of a rollout, by name."""

from __future__ import annotations

from torch import Tensor

from rlhf_lightning.functional.diagnostics import explained_variance
from rlhf_lightning.functional.masked import masked_mean
from rlhf_lightning.types import Rollout


def rollout_metrics(rollout: Rollout, *, beta: float, critic: bool) -> dict[str, float]:
    """Scores and KL are per response, entropy per token (nats), lengths in tokens.

    ``objective/kl`` sums the estimator that trains over a response's valid tokens; ``objective/score`` is the
    reward's own scale, and ``objective/reward`` is what the update maximises: the shaped score minus beta
    times that KL. ``critic``: the values are a critic's, and have figures too.
    """
    mask = rollout.response_mask
    kl = rollout.kl.sum(dim=1)
    figures: dict[str, Tensor | float] = {
        "objective/score": rollout.raw_scores.mean(),
        "objective/kl": kl.mean(),
        "objective/reward": (rollout.scores - beta * kl).mean(),
        "objective/entropy": masked_mean(rollout.entropy, mask),
        "rollout/length_mean": rollout.lengths.float().mean(),
        "rollout/eos_rate": sum(reason != "length" for reason in rollout.ended) / len(rollout),
        "rollout/unique_fraction": len(set(rollout.responses)) / len(rollout),
        "rollout/tokens": mask.sum(),
    }
    if critic:
        figures["critic/explained_variance"] = explained_variance(rollout.values, rollout.returns, mask)
        figures["critic/value_mean"] = masked_mean(rollout.values, mask)
    figures |= {f"reward/{name}": values.mean() for name, values in rollout.parts.items()}
    return {name: float(value) for name, value in figures.items()}
