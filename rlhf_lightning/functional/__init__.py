"""The mathematics of the update: pure functions of tensors and numbers, importing torch alone."""

from rlhf_lightning.functional.diagnostics import (
    explained_variance,
    explained_variance_from_moments,
    explained_variance_moments,
)
from rlhf_lightning.functional.kl import AdaptiveBeta, kl_estimate, kl_shaped_rewards
from rlhf_lightning.functional.logprobs import chunked_token_logprobs, entropy, position_ids, token_logprobs
from rlhf_lightning.functional.masked import masked_mean, masked_moments, masked_sum, masked_whiten
from rlhf_lightning.functional.moments import RunningMoments
from rlhf_lightning.functional.policy_losses import (
    SurrogateStats,
    ValueStats,
    clipped_surrogate_loss,
    clipped_value_loss,
)
from rlhf_lightning.functional.preference_losses import PreferenceStats, bradley_terry_loss, dpo_loss

__all__ = [
    "AdaptiveBeta",
    "PreferenceStats",
    "RunningMoments",
    "SurrogateStats",
    "ValueStats",
    "bradley_terry_loss",
    "chunked_token_logprobs",
    "clipped_surrogate_loss",
    "clipped_value_loss",
    "dpo_loss",
    "entropy",
    "explained_variance",
    "explained_variance_from_moments",
    "explained_variance_moments",
    "kl_estimate",
    "kl_shaped_rewards",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "masked_whiten",
    "position_ids",
    "token_logprobs",
]
