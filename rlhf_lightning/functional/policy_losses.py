"""The two clipped losses of PPO.

Both are sums over valid tokens divided by ``denominator``, a number of the whole optimizer step (its tokens,
or its responses), so that splitting a step into micro-batches changes nothing. Diagnostics are sums too:
``merge`` those of the micro-batches, then read the means.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import check_mask, divide_by_count, keep

_LARGEST_LOG_RATIO = 20.0


class SurrogateStats(NamedTuple):
    """Diagnostics of the policy loss: detached scalars, summed over the mask."""

    ratio_sum: Tensor  # Σ r_t, the ratio that the loss uses
    ratio_max: Tensor  # max r_t; 0 where the mask is empty
    clipped_count: Tensor  # tokens whose gradient the clip (or the dual clip) takes away
    approx_kl_sum: Tensor  # Σ (r_t − 1) − log r_t of the tokens' own ratios, nats: k3 of KL(π_old ‖ π), >= 0
    clamped_count: Tensor  # tokens with |log r_t| > 20, cut there so that exp stays finite
    count: Tensor  # type: ignore[assignment]  # valid tokens

    @property
    def ratio_mean(self) -> Tensor:
        return divide_by_count(self.ratio_sum, self.count, None)

    @property
    def clip_fraction(self) -> Tensor:
        return divide_by_count(self.clipped_count, self.count, None)

    @property
    def approx_kl(self) -> Tensor:
        """Nats a token; http://joschu.net/blog/kl-approx.html."""
        return divide_by_count(self.approx_kl_sum, self.count, None)

    def merge(self, other: SurrogateStats) -> SurrogateStats:
        """The diagnostics of both batches together."""
        sums = SurrogateStats(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))
        return sums._replace(ratio_max=torch.maximum(self.ratio_max, other.ratio_max))


class ValueStats(NamedTuple):
    """Diagnostics of the value loss: detached scalars, summed over the mask."""

    clipped_count: Tensor  # tokens where the clipped value has the larger error
    error_sum: Tensor  # Σ (V_t − R_t)², unclipped
    count: Tensor  # type: ignore[assignment]  # valid tokens

    @property
    def clip_fraction(self) -> Tensor:
        return divide_by_count(self.clipped_count, self.count, None)

    @property
    def error(self) -> Tensor:
        """Mean squared error of the critic."""
        return divide_by_count(self.error_sum, self.count, None)

    def merge(self, other: ValueStats) -> ValueStats:
        """The diagnostics of both batches together."""
        return ValueStats(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def response_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each response's valid tokens, (B, T) -> (B,); 0 where it has none."""
    check_mask(mask, x=x)
    return divide_by_count(keep(x, mask).sum(dim=1), mask.sum(dim=1), None)


def weighted_sum(x: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    """Σ_b w_b Σ_t x_bt over the mask, scalar.

    Args:
        x: (B, T).
        mask: bool (B, T), True where a cell counts.
        weights: w, (B,); None: 1.
    Raises:
        ValueError: the mask is not bool or the shapes do not belong together.
    """
    check_mask(mask, x=x)
    if weights is None:
        return keep(x, mask).sum()
    if weights.shape != mask.shape[:1]:
        raise ValueError(f"weights must have shape {tuple(mask.shape[:1])}; got {tuple(weights.shape)}")
    return (weights * keep(x, mask).sum(dim=1)).sum()


def clipped_surrogate_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio_of: Literal["token", "sequence"] = "token",
    weights: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, SurrogateStats]:
    """Clipped surrogate policy loss of PPO.

        L(θ) = − Σ_t min( r_t Â_t , clip(r_t, 1−ε, 1+ε_high) Â_t ) / N,   r_t = π_θ(a_t|s_t) / π_old(a_t|s_t)

    Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347. Where Â_t < 0 the dual clip c bounds the
    inner term from below by c Â_t: Ye et al. 2020, eq. 5, https://arxiv.org/abs/1912.09729. With
    ``ratio_of="sequence"`` every token of a response has the response's ratio in place of its own,

        r = exp( 1/T Σ_t log π_θ(a_t|s_t) − log π_old(a_t|s_t) )

    and the gradient reaches all T tokens through it: GSPO, Zheng et al. 2025, eq. 7,
    https://arxiv.org/abs/2507.18071. Means are far closer to 1 than their terms: ε of GSPO is 3e-4 or so.

    The gradient of a token is 0 where Â > 0 and r > 1 + ε_high, and where Â < 0 and r < 1 − ε; it always acts
    on the way back into the band. log r is cut at ±20 before exp, and the cut cells are counted.

    Args:
        logprobs: log π_θ(a_t|s_t) of the sampled tokens, (B, T). The only input that should receive gradient.
        old_logprobs: log π_old(a_t|s_t) recorded at rollout, (B, T).
        advantages: Â_t, (B, T); whiten before calling if wanted.
        mask: response mask, (B, T) bool, True where a_t was sampled and counts.
        clip: ε, in (0, 1).
        clip_high: ε_high > 0; None: ε.
        dual_clip: c > 1; None: no dual clip.
        ratio_of: whose ratio a token has, its own or its response's.
        weights: factor of each response's terms, (B,); None: 1. Diagnostics are not weighted.
        denominator: N, valid tokens of the whole optimizer step; None: those of the mask, at least 1.
    Returns:
        The scalar loss to minimise, and detached sums over the same mask. NaN in a valid cell shows in both.
    Raises:
        ValueError: the mask is not bool, the shapes differ, or a number is out of its range.
    """
    check_mask(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    high = clip if clip_high is None else clip_high
    if not 0 < clip < 1:
        raise ValueError(f"clip must lie between 0 and 1; got {clip}")
    if not high > 0:
        raise ValueError(f"clip_high must be above 0; got {high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1; got {dual_clip}")

    gain = keep(advantages, mask)
    own = keep(logprobs, mask) - keep(old_logprobs, mask)
    change = own if ratio_of == "token" else keep(response_mean(own, mask).unsqueeze(1).expand_as(own), mask)
    log_ratio = change.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = ratio * gain
    clipped = ratio.clamp(1 - clip, 1 + high) * gain
    surrogate = torch.minimum(unclipped, clipped)
    flat = clipped < unclipped
    if dual_clip is not None:
        floor = dual_clip * gain
        flat = flat | ((gain < 0) & (floor > surrogate))
        surrogate = torch.where(gain < 0, torch.maximum(surrogate, floor), surrogate)
    count = mask.sum().to(surrogate.dtype)
    loss = -divide_by_count(weighted_sum(surrogate, mask, weights), count, denominator)

    with torch.no_grad():
        valid_ratio = keep(ratio, mask)
        own_ratio = own.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        stats = SurrogateStats(
            ratio_sum=valid_ratio.sum(),
            ratio_max=torch.cat([valid_ratio.flatten(), valid_ratio.new_zeros(1)]).max(),
            clipped_count=flat.sum().to(count.dtype),
            approx_kl_sum=(torch.expm1(own_ratio) - own_ratio).sum(),
            clamped_count=(change.abs() > _LARGEST_LOG_RATIO).sum().to(count.dtype),
            count=count,
        )
    return loss, stats


def clipped_value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, ValueStats]:
    """Clipped value loss of PPO: the larger of two squared errors.

        L = ½ Σ_t max( (V_t − R_t)² , (V_old,t + clip(V_t − V_old,t, −ε_v, ε_v) − R_t)² ) / N

    Schulman et al. 2016, openai/baselines ppo2; without ``clip`` plain ½ Σ (V_t − R_t)² / N.

    Args:
        values: V_t of the critic now, (B, T). The only input that should receive gradient.
        old_values: V_old recorded at rollout, (B, T), not computed again in this pass.
        returns: R_t, (B, T).
        mask: response mask, (B, T) bool, True where a_t was sampled and counts.
        clip: ε_v > 0, in units of the reward; None: no clipping.
        denominator: N, valid tokens of the whole optimizer step; None: those of the mask, at least 1.
    Returns:
        The scalar loss to minimise, and detached sums over the same mask. NaN in a valid cell shows in both.
    Raises:
        ValueError: the mask is not bool, the shapes differ, or ``clip`` is not above 0.
    """
    check_mask(mask, values=values, old_values=old_values, returns=returns)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0; got {clip}")

    value, old, target = keep(values, mask), keep(old_values, mask), keep(returns, mask)
    error = (value - target).square()
    largest = error
    if clip is not None:
        largest = torch.maximum(error, (old + (value - old).clamp(-clip, clip) - target).square())
    count = mask.sum().to(error.dtype)
    loss = 0.5 * divide_by_count(largest.sum(), count, denominator)
    with torch.no_grad():
        stats = ValueStats(
            clipped_count=(largest > error).sum().to(count.dtype), error_sum=error.sum(), count=count
        )
    return loss, stats
