"""Which estimator turns an iteration's rewards into advantages: the choice behind ``advantage=``."""

from __future__ import annotations

from torch import Tensor

from rlhf_lightning.advantages import (
    RunningBaseline,
    gae,
    grpo,
    per_token,
    reinforce,
    reinforce_plus_plus,
    rloo,
)
from rlhf_lightning.config.algorithms import (
    AdvantageConfig,
    GAEConfig,
    GRPOConfig,
    PPOConfig,
    ReinforceConfig,
    ReinforcePlusPlusConfig,
)
from rlhf_lightning.functional.masked import masked_whiten


def estimate(
    rewards: Tensor,
    *,
    mask: Tensor,
    values: Tensor,
    last_values: Tensor | None,
    advantage: AdvantageConfig,
    ppo: PPOConfig,
    baseline: RunningBaseline,
) -> tuple[Tensor, Tensor]:
    """Advantages of every valid token, and the returns that a critic would learn.

    ``gae`` and ``reinforce_plus_plus`` work on tokens and discount by ``ppo.gamma``. The others judge a
    response as a whole, by the sum of its rewards: its score, less beta times its KL where ``ppo.kl_in`` is
    ``reward`` (as in the RLOO paper), for all kinds alike.

    ``ppo.whiten_advantages`` is GAE's alone. Whitening centres, which would undo the baseline of
    ``reinforce`` and scale ``rloo`` and Dr. GRPO, whose authors leave the scale as it is; ``grpo`` and
    ``reinforce_plus_plus`` normalise by definition.

    Args:
        rewards: r_t after KL shaping, (B, T), 0 outside the mask; answers to one prompt are adjacent rows.
        mask: response mask, (B, T) bool.
        values: V(s_t), (B, T), and
        last_values: V after the last token, (B,), or None for 0: ``gae`` alone reads them.
        baseline: of earlier iterations; ``reinforce`` alone reads it, and updates it.
    Returns:
        advantages and returns, (B, T) each, float32, 0 outside the mask.
    """
    if isinstance(advantage, GAEConfig):
        advantages, returns = gae(
            rewards, values=values, mask=mask, gamma=ppo.gamma, lam=ppo.lam, last_values=last_values
        )
        return masked_whiten(advantages, mask) if ppo.whiten_advantages else advantages, returns
    if isinstance(advantage, ReinforcePlusPlusConfig):
        return reinforce_plus_plus(rewards, mask=mask, gamma=ppo.gamma)
    scores = rewards.sum(dim=1)
    if isinstance(advantage, ReinforceConfig):
        gains = reinforce(scores, baseline=baseline.value)
        baseline.update(scores, decay=advantage.decay)
    elif isinstance(advantage, GRPOConfig):
        gains = grpo(scores, group_size=ppo.samples_per_prompt, scale=advantage.scale)
    else:
        gains = rloo(scores, group_size=ppo.samples_per_prompt)
    return per_token(gains, mask), per_token(scores, mask)
