"""The records that travel between floors: what was asked, what was answered, what it was worth.

Notation: ``B`` responses, ``P`` prompt width (left-padded), ``T`` response width (right-padded);
``t = 0 .. T-1`` runs over response tokens. Token ``a_t`` sits at position ``P + t`` and is predicted from
position ``P + t - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

Ended = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Prompts:
    """Prompts as the data module hands them out, unpadded; ``rows`` are their numbers in the global batch."""

    ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Demonstration:
    """One text to imitate: ``ids[learned:]`` is the answer with its end token; what is before is given."""

    ids: tuple[int, ...]
    learned: int


@dataclass(frozen=True)
class TokenPair:
    """A preference pair as tokens: two texts that begin alike.

    ``prompt + chosen`` and ``prompt + rejected`` are the two texts whole. For scoring, ``prompt`` is the
    longest common beginning; for DPO it ends where the answers begin.
    """

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float = 0.0  # how much better the chosen answer is, in units of score


@dataclass(frozen=True)
class Generation:
    """Sampled answers, exactly as sampled: no token is added, changed or dropped afterwards."""

    prompt_ids: Tensor  # (B, P) int64, left-padded
    prompt_mask: Tensor  # (B, P) bool, True on real prompt tokens
    response_ids: Tensor  # (B, T) int64, right-padded, a_t
    response_mask: Tensor  # (B, T) bool, True where a_t was sampled and counts (its end token included)
    rows: Tensor  # (B,) int64, number of the response in the global batch of this iteration
    ended: tuple[Ended, ...]  # why each response stopped

    @property
    def lengths(self) -> Tensor:
        """Sampled tokens of each response, end token included, (B,) int64."""
        return self.response_mask.sum(dim=1)

    def __len__(self) -> int:
        return self.response_ids.shape[0]


@dataclass(frozen=True)
class Scores:
    """What a reward says of B responses."""

    scores: Tensor  # (B,) float32, finite
    parts: dict[str, Tensor]  # name -> (B,) float32: the terms that the score was made of, for the log


@dataclass(frozen=True)
class Rollout(Generation):
    """One iteration's experience: answers, what they scored, and all that the update needs, frozen."""

    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    scores: Tensor  # (B,) float32, after normalisation, clipping and the missing-EOS penalty
    raw_scores: Tensor  # (B,) float32, as the reward gave them
    parts: dict[str, Tensor]  # name -> (B,) float32
    logprobs: Tensor  # (B, T) float32, log pi_old(a_t | s_t)
    ref_logprobs: Tensor  # (B, T) float32, log pi_ref(a_t | s_t)
    entropy: Tensor  # (B, T) float32, entropy of pi_old(. | s_t), nats
    values: Tensor  # (B, T) float32, V(s_t); 0 without a critic
    kl: Tensor  # (B, T) float32, the estimator that trains, 0 outside the mask
    rewards: Tensor  # (B, T) float32, r_t after KL shaping
    advantages: Tensor  # (B, T) float32, A_t, whitened where asked
    returns: Tensor  # (B, T) float32, A_t + V(s_t) before whitening; what was earned where there is no critic


@dataclass(frozen=True)
class Minibatch:
    """The rows of a rollout that one forward pass of the update sees, trimmed to their own widths."""

    prompt_ids: Tensor  # (b, P') int64
    prompt_mask: Tensor  # (b, P') bool
    response_ids: Tensor  # (b, T') int64
    response_mask: Tensor  # (b, T') bool
    old_logprobs: Tensor  # (b, T') float32
    ref_logprobs: Tensor  # (b, T') float32
    old_values: Tensor  # (b, T') float32
    advantages: Tensor  # (b, T') float32
    returns: Tensor  # (b, T') float32

    def to(self, device: torch.device | str) -> Minibatch:
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})
