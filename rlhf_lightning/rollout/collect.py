"""Turns sampled answers into experience: scores, log-probabilities, values, rewards, advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from rlhf_lightning.advantages.reinforce import RunningBaseline
from rlhf_lightning.config.algorithms import AdvantageConfig, PPOConfig
from rlhf_lightning.functional.kl import kl_estimate, kl_shaped_rewards
from rlhf_lightning.functional.moments import RunningMoments
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.rewards.shaping import shape_scores
from rlhf_lightning.rollout.advantage import estimate
from rlhf_lightning.rollout.minibatches import slices
from rlhf_lightning.types import Generation, Rollout, Scores


@torch.no_grad()
def collect(
    actor_critic: ActorCritic,
    generation: Generation,
    *,
    prompts: tuple[str, ...],
    responses: tuple[str, ...],
    scored: Scores,
    config: PPOConfig,
    advantage: AdvantageConfig,
    beta: float,
    moments: RunningMoments,
    baseline: RunningBaseline,
    progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Everything the update needs of one iteration, computed once and frozen.

    Args:
        generation: B answers as sampled.
        prompts, responses: their texts.
        scored: what the reward said.
        advantage: the estimator.
        beta: weight of the KL in the reward; its place is ``config.kl_in``.
        moments: running mean and variance of scores; updated here where ``config.normalize_scores``.
        baseline: running mean of shaped scores; updated here where the estimator is ``reinforce``.
        progress: called with (answers scored, B).

    Returns:
        The rollout on the CPU.
    """
    mask = generation.response_mask
    passes = _passes(actor_critic, generation, config, progress)
    logprobs, ref_logprobs, entropy = passes["logprobs"], passes["ref_logprobs"], passes["entropy"]
    values, last_values = _split_values(passes["values"], generation)
    scores = shape_scores(
        scored.scores,
        ended=generation.ended,
        missing_eos_penalty=config.missing_eos_penalty,
        moments=moments,
        normalize=config.normalize_scores,
        clip=config.clip_scores,
    )
    kl = kl_estimate(logprobs, ref_logprobs, kind=config.kl_estimator).masked_fill(~mask, 0.0)
    rewards = kl_shaped_rewards(scores, kl=kl, mask=mask, beta=beta if config.kl_in == "reward" else 0.0)
    cut = torch.tensor([reason == "length" for reason in generation.ended])
    advantages, returns = estimate(
        rewards,
        mask=mask,
        values=values,
        last_values=torch.where(cut, last_values, 0.0) if config.bootstrap_truncated else None,
        advantage=advantage,
        ppo=config,
        baseline=baseline,
    )
    return Rollout(
        **{field.name: getattr(generation, field.name) for field in fields(Generation)},
        prompts=prompts,
        responses=responses,
        scores=scores,
        raw_scores=scored.scores,
        parts=scored.parts,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
        values=values,
        kl=kl,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
    )


def _passes(
    actor_critic: ActorCritic,
    generation: Generation,
    config: PPOConfig,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Tensor]:
    """Old and reference log-probabilities, entropies, each (B, T), and values (B, T + 1), 0 without a critic;
    0 where unused."""
    size, width = generation.response_ids.shape
    found = {name: torch.zeros(size, width) for name in ("logprobs", "ref_logprobs", "entropy")}
    found["values"] = torch.zeros(size, width + 1)
    done = 0
    for rows, piece in slices(generation, config.micro_batch_size):
        parts: dict[str, Tensor | None] = {"ref_logprobs": actor_critic.reference(piece)}
        if actor_critic.shared_critic:
            parts["logprobs"], parts["entropy"], parts["values"] = actor_critic.policy_and_values(piece)
        else:
            parts["logprobs"], parts["entropy"] = actor_critic.policy(piece)
            if actor_critic.has_critic:
                parts["values"] = actor_critic.values(piece)
        for name, tensor in parts.items():
            assert tensor is not None  # entropies were asked for
            found[name][rows, : tensor.shape[1]] = tensor.cpu()
        done += len(rows)
        if progress is not None:
            progress(done, size)
    outside = ~generation.response_mask
    for name in ("logprobs", "ref_logprobs", "entropy"):
        found[name].masked_fill_(outside, 0.0)
    return found


def _split_values(values: Tensor, generation: Generation) -> tuple[Tensor, Tensor]:
    """V(s_t) under the mask, (B, T), and V of the state after each response's last token, (B,)."""
    last = values.gather(1, generation.lengths.unsqueeze(1)).squeeze(1)
    return values[:, :-1].masked_fill(~generation.response_mask, 0.0), last
