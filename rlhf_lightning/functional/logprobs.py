"""Log-probabilities and entropy of sampled tokens, in nats, and the one rule for position ids.

The temperature divides the logits before anything else, so log-probabilities and entropy describe the
distribution that was sampled from. Logits are raised to float32 before the softmax (float64 stays float64).
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from rlhf_lightning.functional.chunked import LOWEST_LOGPROB, ChunkedLogprobs, Head, default_chunk
from rlhf_lightning.functional.masked import at_least_float32


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; got {temperature}")


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log π(a_t | s_t) of the given tokens.

        log π(a|s) = z_a/τ − log Σ_v exp(z_v/τ)

    Args:
        logits: z, (B, T, V), at the positions that predict the tokens (P − 1 .. P + T − 2).
        tokens: a_t, (B, T) int64 in 0 .. V − 1; give padding any id in that range.
        temperature: τ > 0, the one used to sample.
    Returns:
        (B, T) float32 (float64 for float64 logits), nats.
    Raises:
        ValueError: the shapes do not belong together, or τ <= 0.
    """
    _check_temperature(temperature)
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"tokens must have shape {tuple(logits.shape[:-1])}; got {tuple(tokens.shape)}")
    logp = torch.log_softmax(at_least_float32(logits) / temperature, dim=-1)
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """H(π(· | s)) = −Σ_v π_v log π_v of softmax(z/τ).

    Args:
        logits: z, (..., V); −inf rules a token out.
        temperature: τ > 0, the one used to sample.
    Returns:
        (...) float32 (float64 for float64 logits), nats, >= 0.
    Raises:
        ValueError: τ <= 0.
    """
    _check_temperature(temperature)
    logp = torch.log_softmax(at_least_float32(logits) / temperature, dim=-1)
    return -(logp.exp() * logp.clamp(min=LOWEST_LOGPROB)).sum(dim=-1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions of left- or right-padded rows: cumsum(mask) − 1, clamped at 0. Every pass uses this one.

    Args:
        attention_mask: (B, L) bool or 0/1, True on real tokens.
    Returns:
        (B, L) int64.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


@overload
def chunked_token_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = ..., chunk: int | None = ...,
    bias: Tensor | None = ..., softcap: float | None = ..., entropy: Literal[True] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def chunked_token_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = ..., chunk: int | None = ...,
    bias: Tensor | None = ..., softcap: float | None = ..., entropy: Literal[False],
) -> tuple[Tensor, None]: ...  # fmt: skip


@overload
def chunked_token_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = ..., chunk: int | None = ...,
    bias: Tensor | None = ..., softcap: float | None = ..., entropy: bool,
) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip


def chunked_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """log π(a_t | s_t) and the entropy of π(· | s_t), straight from hidden states, without the (N, V) logits.

        z = h Wᵀ + b,   z ← c tanh(z/c) where a soft cap c is given,   π = softmax(z/τ)

    Forward and backward each see at most ``chunk`` rows of logits. Equal to ``token_logprobs`` and
    ``entropy`` of the full logits up to rounding. Gradients of ``hidden`` are prepared in the forward pass:
    call it under ``no_grad`` where none are wanted, and without ``entropy`` where that is not used.

    Args:
        hidden: h, (N, H) or (B, T, H), at the positions that predict the tokens; cast to the weight's dtype.
        weight: W of the language-model head, (V, H). Receives gradient only where it requires it; so does
            ``bias``.
        tokens: a_t, (N,) or (B, T) int64 in 0 .. V − 1; give padding any id in that range.
        temperature: τ > 0, the one used to sample.
        chunk: rows of logits alive at once; None: ``default_chunk``. Memory is chunk · V · 4 bytes, half as
            much again for a 16-bit head, and as much again each for entropy and for a soft cap's slope.
        bias: b, (V,).
        softcap: c > 0, as in Gemma 2 (https://arxiv.org/abs/2408.00118, section 2).
        entropy: whether the entropy is computed.
    Returns:
        log-probabilities and entropies (None without), each with the shape of ``tokens``, float32 (float64
        for float64 input), nats.
    Raises:
        ValueError: the shapes do not belong together, or τ, c or ``chunk`` is not above 0.
    """
    _check_temperature(temperature)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 row; got {chunk}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0; got {softcap}")
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(f"tokens must have shape {tuple(hidden.shape[:-1])}; got {tuple(tokens.shape)}")
    # A contiguous 2-D input: a sliced one can send the head down a slow batched path.
    rows = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype).contiguous()
    head = Head(
        weight.detach(),
        None if bias is None else bias.detach(),
        softcap,
        temperature,
        default_chunk(len(weight), weight.device) if chunk is None else chunk,
    )
    # Autocast is off in a custom backward, so it must be off in the forward whose logits that backward may
    # repeat.
    through_hidden = torch.is_grad_enabled() and rows.requires_grad
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = ChunkedLogprobs.apply(
            rows,
            weight,
            bias,
            tokens.reshape(-1),
            head,
            entropy,
            through_hidden,
        )
    return logprobs.view(tokens.shape), None if entropies is None else entropies.view(tokens.shape)
