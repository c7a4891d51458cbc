"""Log-probabilities and entropy straight from hidden states: the (N, V) logits are never there at once.

Where the hidden states want gradients, the forward pass also computes the one of each log-probability,

    ∂ log π(a|s)/∂h = (W_a − Σ_v π_v W_v)/τ,

while a chunk's probabilities are at hand. These (N, H) are all that the backward pass needs, and they save a
third product with the head: the logits are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# exp of anything below is 0 even in float64, so cutting log π here changes no entropy; but a ruled-out token
# (−inf) then adds 0 · lowest = 0 where it would add 0 · −inf = NaN, forward and backward.
LOWEST_LOGPROB = -1e4

# Bytes of a chunk's float32 logits. A CPU's matrix product packs all of W for every chunk, which 128 rows
# repay and 32 do not, and beyond that the passes over a chunk leave the cache (V = 49,152, 384 rows, both
# products and the passes, one core: 320 ms in chunks of 64, 272 of 128, 276 of 256). A GPU wants more rows.
_CPU_BYTES, _GPU_BYTES = 32 << 20, 256 << 20
_FEWEST_ROWS = 128


def default_chunk(vocabulary: int, device: torch.device) -> int:
    """Rows of logits alive at once where the caller names no number: what a fixed budget of bytes holds."""
    budget = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    return max(_FEWEST_ROWS, budget // (4 * vocabulary))


class Head(NamedTuple):
    """What turns hidden states into logits, and how many rows at a time."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    temperature: float
    chunk: int


class _Piece(NamedTuple):
    """Outputs of some rows, (n,), and their derivatives by z/τ, (n, V), each in scratch that the next piece
    takes over; None where not asked for."""

    rows: slice
    logprobs: Tensor
    entropy: Tensor | None
    d_logprobs: Tensor
    d_entropy: Tensor | None


class _Pieces:
    """Works through the rows chunk by chunk in scratch tensors made once: on a CPU, fresh memory of this size
    costs as much as the arithmetic."""

    def __init__(self, head: Head, rows: int, *, entropy: bool, derivatives: bool) -> None:
        self.head, self.derivatives = head, derivatives
        parts = max(1, -(-rows // head.chunk))
        self._step = max(1, -(-rows // parts))  # even chunks: a short last one would be the slowest per row
        shape, like = (min(self._step, rows), len(head.weight)), head.weight
        wide = torch.promote_types(like.dtype, torch.float32)
        self._narrow = like.new_empty(shape)
        self._logits = self._narrow if like.dtype == wide else like.new_empty(shape, dtype=wide)
        self._probs = like.new_empty(shape, dtype=wide) if entropy else None
        self._slopes = like.new_empty(shape, dtype=wide) if derivatives and head.softcap else None

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Iterator[_Piece]:
        for start in range(0, len(hidden), self._step):
            rows = slice(start, min(start + self._step, len(hidden)))
            yield self._piece(rows, hidden[rows], tokens[rows].unsqueeze(-1))

    def _piece(self, rows: slice, hidden: Tensor, tokens: Tensor) -> _Piece:
        logits = self._scaled_logits(hidden)
        chosen, peak = logits.gather(-1, tokens), logits.amax(dim=-1, keepdim=True)
        probs = logits if self._probs is None else self._probs[: len(hidden)]
        torch.softmax(logits, dim=-1, out=probs)
        # The likeliest token's shifted logit is 0 and its probability 1/Σ: so log Σ = −log max π.
        log_total = -probs.amax(dim=-1, keepdim=True).log_()
        entropy = None
        if self._probs is not None:
            weighted = logits.sub_(peak).clamp_(min=LOWEST_LOGPROB).mul_(probs)
            mean = weighted.sum(dim=-1, keepdim=True)
            # Clamped: the difference of two equal numbers may round to just below 0.
            entropy = (log_total - mean).clamp_(min=0.0)
            if self.derivatives:  # ∂H/∂z_j = −π_j (log π_j + H)
                weighted.addcmul_(probs, entropy - log_total).neg_()
        if self.derivatives:  # ∂ log π_a/∂z_j = [j = a] − π_j
            probs.neg_().scatter_add_(-1, tokens, torch.ones_like(chosen))
        return _Piece(
            rows,
            (chosen - peak - log_total).squeeze(-1),
            None if entropy is None else entropy.squeeze(-1),
            probs,
            None if entropy is None else logits,
        )

    def _scaled_logits(self, hidden: Tensor) -> Tensor:
        weight, bias, softcap, temperature, _ = self.head
        narrow, logits = self._narrow[: len(hidden)], self._logits[: len(hidden)]
        if bias is None:
            torch.mm(hidden, weight.T, out=narrow)
        else:
            torch.addmm(bias, hidden, weight.T, out=narrow)
        if logits.dtype != narrow.dtype:
            logits.copy_(narrow)
        if softcap is None:
            return logits if temperature == 1.0 else logits.div_(temperature)
        logits.div_(softcap).tanh_()
        if self._slopes is not None:  # d/dz c·tanh(z/c) = 1 − tanh²(z/c)
            torch.mul(logits, logits, out=self._slopes[: len(hidden)]).neg_().add_(1.0)
        return logits.mul_(softcap / temperature)

    def before_head(self, grad: Tensor) -> Tensor:
        """From a derivative by z/τ, which is overwritten, the one by (h Wᵀ + b)/τ, in the weight's dtype."""
        if self._slopes is not None:
            grad.mul_(self._slopes[: len(grad)])
        return grad if grad.dtype == self._narrow.dtype else self._narrow[: len(grad)].copy_(grad)


class ChunkedLogprobs(torch.autograd.Function):
    """The outputs of 2-D rows in the weight's dtype: (N, H), (V, H), (V,), (N,) -> (N,) and (N,) or None."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        head: Head,
        entropy: bool,
        through_hidden: bool,
    ) -> tuple[Tensor, Tensor | None]:
        count, wide = len(hidden), torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(count, dtype=wide)
        entropies = hidden.new_empty(count, dtype=wide) if entropy else None
        per_logprob = torch.empty_like(hidden) if through_hidden else None
        per_entropy = torch.empty_like(hidden) if through_hidden and entropy else None
        pieces = _Pieces(head, count, entropy=entropy, derivatives=through_hidden)
        for piece in pieces(hidden, tokens):
            logprobs[piece.rows] = piece.logprobs
            if entropies is not None and piece.entropy is not None:
                entropies[piece.rows] = piece.entropy
            if per_logprob is not None:
                torch.mm(pieces.before_head(piece.d_logprobs), weight, out=per_logprob[piece.rows])
            if per_entropy is not None and piece.d_entropy is not None:
                torch.mm(pieces.before_head(piece.d_entropy), weight, out=per_entropy[piece.rows])
        head_learns = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(per_logprob, per_entropy, *((hidden, tokens) if head_learns else (None, None)))
        ctx.head = head
        ctx.set_materialize_grads(False)  # an output without a gradient arrives as None and costs nothing
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        per_logprob, per_entropy, hidden, tokens = ctx.saved_tensors
        head: Head = ctx.head
        grads: list[Tensor | None] = [None] * 7
        used = [
            (per, grad.unsqueeze(-1) / head.temperature)
            for per, grad in ((per_logprob, grad_logprobs), (per_entropy, grad_entropy))
            if grad is not None
        ]
        if not used:
            return tuple(grads)
        if ctx.needs_input_grad[0]:
            grads[0] = sum(per * grad for per, grad in used).to(head.weight.dtype)  # type: ignore[union-attr]
        if hidden is not None:
            grads[1], grads[2] = _gradients_of_head(ctx, head, hidden, tokens, grad_logprobs, grad_entropy)
        return tuple(grads)


def _gradients_of_head(
    ctx: Any,
    head: Head,
    hidden: Tensor,
    tokens: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias, where a head trains: the one case that computes the logits again."""
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    # Summed over chunks in float32 at least: many small bfloat16 terms would be lost in a growing sum.
    weight = torch.zeros_like(head.weight, dtype=wide) if ctx.needs_input_grad[1] else None
    bias = head.weight.new_zeros(len(head.weight), dtype=wide) if ctx.needs_input_grad[2] else None
    pieces = _Pieces(head, len(hidden), entropy=grad_entropy is not None, derivatives=True)
    for rows, _, _, d_logprobs, d_entropy in pieces(hidden, tokens):
        grad = d_logprobs.mul_(0.0 if grad_logprobs is None else grad_logprobs[rows].unsqueeze(-1))
        if d_entropy is not None and grad_entropy is not None:
            grad.add_(d_entropy.mul_(grad_entropy[rows].unsqueeze(-1)))
        narrow = pieces.before_head(grad.div_(head.temperature))
        if weight is not None:
            weight += narrow.T @ hidden[rows]
        if bias is not None:
            bias += grad.sum(dim=0)
    return (
        None if weight is None else weight.to(head.weight.dtype),
        None if bias is None else bias.to(head.weight.dtype),
    )
