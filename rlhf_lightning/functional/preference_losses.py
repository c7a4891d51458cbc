"""Losses over pairs of answers: Bradley-Terry for a reward model, DPO and IPO for a policy."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lightning.functional.masked import at_least_float32, divide_by_count

PreferenceKind = Literal["sigmoid", "ipo"]


class PreferenceStats(NamedTuple):
    """Diagnostics of a preference loss: detached scalars, summed over pairs."""

    correct_count: Tensor  # pairs whose chosen answer has the strictly larger reward
    chosen_sum: Tensor  # Σ reward of the chosen answer (DPO: β (log π − log π_ref))
    rejected_sum: Tensor  # Σ reward of the rejected answer
    count: Tensor  # type: ignore[assignment]  # pairs

    @property
    def accuracy(self) -> Tensor:
        return divide_by_count(self.correct_count, self.count, None)

    @property
    def margin(self) -> Tensor:
        """Mean reward of chosen minus rejected."""
        return divide_by_count(self.chosen_sum - self.rejected_sum, self.count, None)

    def merge(self, other: PreferenceStats) -> PreferenceStats:
        """The diagnostics of both batches together."""
        return PreferenceStats(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def _check_pairs(first: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.shape != first.shape:
            raise ValueError(f"{name} must have shape {tuple(first.shape)}; got {tuple(tensor.shape)}")


def _stats(chosen: Tensor, rejected: Tensor) -> PreferenceStats:
    with torch.no_grad():
        return PreferenceStats(
            correct_count=(chosen > rejected).sum().to(chosen.dtype),
            chosen_sum=chosen.sum(),
            rejected_sum=rejected.sum(),
            count=torch.full_like(chosen.sum(), chosen.numel()),
        )


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, PreferenceStats]:
    """Negative log-likelihood that the chosen answer wins.

        L = − Σ log σ( r_chosen − r_rejected − m ) / N

    Ouyang et al. 2022, eq. 1, https://arxiv.org/abs/2203.02155; the margin m: Touvron et al. 2023, eq. 2,
    https://arxiv.org/abs/2307.09288.

    Args:
        chosen: scores of the preferred answers, (B,).
        rejected: scores of the others, (B,).
        margin: m, (B,), how much better the chosen answer is; None: 0.
        denominator: N, pairs of the whole optimizer step; None: B, at least 1.
    Returns:
        The scalar loss to minimise, and detached sums over the pairs.
    Raises:
        ValueError: the shapes differ.
    """
    _check_pairs(chosen, rejected=rejected, **({} if margin is None else {"margin": margin}))
    better, worse = at_least_float32(chosen), at_least_float32(rejected)
    lead = better - worse if margin is None else better - worse - at_least_float32(margin)
    stats = _stats(better.detach(), worse.detach())
    return divide_by_count(-logsigmoid(lead).sum(), stats.count, denominator), stats


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    *,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    kind: PreferenceKind = "sigmoid",
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, PreferenceStats]:
    """Direct preference optimisation, or IPO, from log-probabilities of whole answers.

        h = (log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)
        sigmoid:  L = Σ [ −(1−s) log σ(β h) − s log σ(−β h) ] / N
        ipo:      L = Σ ( h − 1/(2β) )² / N

    Rafailov et al. 2023, eq. 7, https://arxiv.org/abs/2305.18290; s, the share of labels taken to be wrong:
    Mitchell 2023, https://ericmitchell.ai/cdpo.pdf; IPO: Azar et al. 2023, eq. 17,
    https://arxiv.org/abs/2310.12036.

    Note: equation 17 sums log-probabilities over an answer. The usual form of IPO averages them over its
    tokens (TRL does, by its account with the authors' consent): for that divide all four by their tokens.

    Args:
        policy_chosen: log π(y_chosen|x), (B,), the sum over the answer's tokens, nats.
        policy_rejected: log π(y_rejected|x), (B,).
        ref_chosen: log π_ref(y_chosen|x), (B,), no gradient wanted.
        ref_rejected: log π_ref(y_rejected|x), (B,).
        beta: β > 0.
        label_smoothing: s in [0, 0.5); sigmoid only.
        kind: which loss.
        denominator: N, pairs of the whole optimizer step; None: B, at least 1.
    Returns:
        The scalar loss to minimise, and detached sums over the pairs.
    Raises:
        ValueError: the shapes differ, a number is out of its range, or the kind is unknown.
    """
    _check_pairs(
        policy_chosen, policy_rejected=policy_rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )
    if not beta > 0:
        raise ValueError(f"beta must be above 0; got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5); got {label_smoothing}")
    chosen = at_least_float32(policy_chosen) - at_least_float32(ref_chosen)
    rejected = at_least_float32(policy_rejected) - at_least_float32(ref_rejected)
    lead = chosen - rejected
    if kind == "sigmoid":
        losses = -(1 - label_smoothing) * logsigmoid(beta * lead) - label_smoothing * logsigmoid(-beta * lead)
    elif kind == "ipo":
        if label_smoothing:
            raise ValueError(f"label_smoothing has no meaning with kind=ipo; got {label_smoothing}")
        losses = (lead - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"kind must be sigmoid or ipo; got {kind!r}")
    stats = _stats(beta * chosen.detach(), beta * rejected.detach())
    return divide_by_count(losses.sum(), stats.count, denominator), stats
