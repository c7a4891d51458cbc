"""Log-probabilities and entropy of sampled tokens, in nats, and the one rule for position ids.

The temperature divides the logits before anything else, so log-probabilities and entropy describe the
distribution that was sampled from. Logits are raised to float32 before the softmax (float64 stays float64).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_lightning.functional.masked import at_least_float32

# exp of anything below is 0 even in float64, so cutting log π here changes no entropy; but a ruled-out token
# (−inf) then adds 0 · lowest = 0 where it would add 0 · −inf = NaN, forward and backward.
_LOWEST_LOGPROB = -1e4


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
    return -(logp.exp() * logp.clamp(min=_LOWEST_LOGPROB)).sum(dim=-1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions of left- or right-padded rows: cumsum(mask) − 1, clamped at 0. Every pass uses this one.

    Args:
        attention_mask: (B, L) bool or 0/1, True on real tokens.
    Returns:
        (B, L) int64.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def _chunk_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """z/τ of some rows, (n, V), and tanh of the soft cap, (n, V), which its derivative needs."""
    logits = at_least_float32(torch.nn.functional.linear(hidden, weight, bias))
    if softcap is None:
        return logits.div_(temperature), None
    squashed = logits.div_(softcap).tanh_()
    return squashed * (softcap / temperature), squashed


class _ChunkedLogprobs(torch.autograd.Function):
    """Row chunks forward, and the same logits once more backward: no (N, V) tensor is ever alive."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        softcap: float | None,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        dtype = at_least_float32(hidden.new_empty(0)).dtype
        logprobs, entropies, peaks, log_totals = (hidden.new_empty(rows, dtype=dtype) for _ in range(4))
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits, _ = _chunk_logits(hidden[part], weight, bias, softcap, temperature)
            peak = logits.amax(dim=-1, keepdim=True)
            shifted = logits.sub_(peak)  # the peak comes off first: large logits then cost no digits
            weights = shifted.exp()
            total = weights.sum(dim=-1)
            log_total = total.log()
            logprobs[part] = shifted.gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1) - log_total
            shifted.clamp_(min=_LOWEST_LOGPROB)
            # Clamped: the difference of two equal numbers may round to just below 0.
            entropies[part] = (log_total - weights.mul_(shifted).sum(dim=-1) / total).clamp(min=0.0)
            peaks[part] = peak.squeeze(-1)
            log_totals[part] = log_total
        ctx.save_for_backward(hidden, weight, bias, tokens, entropies, peaks, log_totals)
        ctx.settings = (softcap, temperature, chunk)
        ctx.set_materialize_grads(False)  # an output without a gradient arrives as None and costs nothing
        return logprobs, entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        hidden, weight, bias, tokens, entropies, peaks, log_totals = ctx.saved_tensors
        softcap, temperature, chunk = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = peaks.dtype
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Summed over chunks in float32 at least: many small bfloat16 terms would be lost in a growing sum.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits, squashed = _chunk_logits(hidden[part], weight, bias, softcap, temperature)
            logp = logits.sub_(peaks[part].unsqueeze(-1)).sub_(log_totals[part].unsqueeze(-1))
            probs = logp.exp()
            if grad_entropy is None:
                grad = probs.mul_(-grad_logprobs[part].unsqueeze(-1))  # type: ignore[index]
            else:
                # ∂H/∂z_j = −π_j (log π_j + H)
                logp.clamp_(min=_LOWEST_LOGPROB).add_(entropies[part].unsqueeze(-1))
                factor = logp.mul_(-grad_entropy[part].unsqueeze(-1))
                if grad_logprobs is not None:
                    factor.sub_(grad_logprobs[part].unsqueeze(-1))
                grad = probs.mul_(factor)
            if grad_logprobs is not None:
                grad.scatter_add_(-1, tokens[part].unsqueeze(-1), grad_logprobs[part].unsqueeze(-1))
            grad.div_(temperature)
            if squashed is not None:
                grad.mul_(squashed.square_().neg_().add_(1.0))  # d/dz c·tanh(z/c) = 1 − tanh²(z/c)
            narrow = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )


def chunked_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 256,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log π(a_t | s_t) and the entropy of π(· | s_t), straight from hidden states, without the (N, V) logits.

        z = h Wᵀ + b,   z ← c tanh(z/c) where a soft cap c is given,   π = softmax(z/τ)

    Forward and backward each see at most ``chunk`` rows of logits; backward computes them again. Equal to
    ``token_logprobs`` and ``entropy`` of the full logits up to rounding.

    Args:
        hidden: h, (N, H) or (B, T, H), at the positions that predict the tokens; cast to the weight's dtype.
        weight: W of the language-model head, (V, H). Receives gradient only where it requires it; so does
            ``bias``.
        tokens: a_t, (N,) or (B, T) int64 in 0 .. V − 1; give padding any id in that range.
        temperature: τ > 0, the one used to sample.
        chunk: rows of logits alive at once; memory is about 3 · chunk · V · 4 bytes.
        bias: b, (V,).
        softcap: c > 0, as in Gemma 2 (https://arxiv.org/abs/2408.00118, section 2).
    Returns:
        log-probabilities and entropies, each with the shape of ``tokens``, float32 (float64 for float64
        input), nats.
    Raises:
        ValueError: the shapes do not belong together, or τ, c or ``chunk`` is not above 0.
    """
    _check_temperature(temperature)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 row; got {chunk}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0; got {softcap}")
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(f"tokens must have shape {tuple(hidden.shape[:-1])}; got {tuple(tokens.shape)}")
    # A contiguous 2-D input: a sliced one can send the head down a slow batched path.
    rows = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype).contiguous()
    # Autocast is off in a custom backward, so it must be off in the forward whose logits that backward
    # repeats.
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _ChunkedLogprobs.apply(
            rows, weight, bias, tokens.reshape(-1), softcap, temperature, chunk
        )
    return logprobs.view(tokens.shape), entropies.view(tokens.shape)
