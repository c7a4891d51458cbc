"""Objective, optimum and divergences of enumerated distributions, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Figures:
    """Exact expectations over all responses; score units, divergences in nats a response."""

    j_reference: float  # J(ref) = E_ref[r]
    j_policy: float  # J(π) = E_π[r − β log(π/ref)]
    j_optimum: float  # J* = β log E_ref[exp(r/β)]
    score: float  # E_π[r]
    kl: float  # KL(π ‖ ref)
    kl_optimum: float  # KL(π* ‖ ref)
    kl_to_optimum: float  # KL(π ‖ π*);  J* − J(π) = β KL(π ‖ π*)

    @property
    def share(self) -> float:
        """How much of the way from the reference to the optimum is done: 1 only for π*."""
        return (self.j_policy - self.j_reference) / (self.j_optimum - self.j_reference)


def figures(logprobs: Tensor, *, ref_logprobs: Tensor, rewards: Tensor, beta: float) -> Figures:
    """Exact figures of one prompt.

        π*(y) ∝ ref(y) exp(r(y)/β),    J* = β log Σ_y ref(y) exp(r(y)/β)

    Korbak et al. 2022, section 3, https://arxiv.org/abs/2205.11275.

    Args:
        logprobs: log π(y), (N,) float64, over all N responses.
        ref_logprobs: log ref(y), (N,) float64.
        rewards: r(y), (N,) float64.
        beta: β > 0.
    """
    tilted = ref_logprobs + rewards / beta
    log_z = tilted.logsumexp(dim=0)
    optimum = tilted - log_z
    policy, reference = logprobs.exp(), ref_logprobs.exp()
    score = (policy * rewards).sum()
    kl = (policy * (logprobs - ref_logprobs)).sum()
    return Figures(
        j_reference=float((reference * rewards).sum()),
        j_policy=float(score - beta * kl),
        j_optimum=float(beta * log_z),
        score=float(score),
        kl=float(kl),
        kl_optimum=float((optimum.exp() * (optimum - ref_logprobs)).sum()),
        kl_to_optimum=float((policy * (logprobs - optimum)).sum()),
    )


def mean_figures(of_prompts: Sequence[Figures]) -> Figures:
    """Average over prompts, each weighing the same."""
    names = [field.name for field in fields(Figures)]
    return Figures(
        **{name: sum(getattr(one, name) for one in of_prompts) / len(of_prompts) for name in names}
    )


def response_logprobs(model: nn.Module, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Tensor:
    """log p(y | prompt) of whole responses by a plain forward pass, (N,), in the model's dtype.

    The prompt is not padded, the responses are padded on the right, where a causal model does not look.
    """
    width = max(map(len, responses))
    rows = torch.tensor([[*prompt, *y, *[0] * (width - len(y))] for y in responses])
    logits = model(input_ids=rows).logits[:, len(prompt) - 1 : -1]
    tokens = rows[:, len(prompt) :]
    of_tokens = logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    valid = torch.arange(width) < torch.tensor([[len(y)] for y in responses])
    return torch.where(valid, of_tokens, 0.0).sum(dim=1)
