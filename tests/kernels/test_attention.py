"""Causal attention with grouped heads against the equation under autograd, and against torch's kernel."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rlhf_lightning.kernels import attention
from rlhf_lightning.kernels.attention import attend, attend_backward, fused, fused_backward

HEADS = {"one for each": (4, 4), "grouped": (6, 2), "one for all": (3, 1), "alone": (1, 1)}
WAYS = {"ours": (attend, attend_backward), "torch": (fused, fused_backward)}


def plainly(q, k, v):
    """One query at a time over the keys up to its own."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = []
    for t in range(q.shape[2]):
        scores = (q[:, :, t, None] * keys[:, :, : t + 1]).sum(dim=-1) / q.shape[3] ** 0.5
        out.append((scores.softmax(dim=-1).unsqueeze(-1) * values[:, :, : t + 1]).sum(dim=2))
    return torch.stack(out, dim=2)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_two_tokens_by_hand(way):
    """Equal scores: the first token reads itself, the second the mean."""
    q = k = torch.zeros(1, 1, 2, 2)
    v = torch.tensor([[[[2.0, 4.0], [6.0, 8.0]]]])
    assert way[0](q, k, v).tolist() == [[[[2, 4], [4, 6]]]]
    of_q, of_k, of_v = way[1](torch.ones(1, 1, 2, 2), q, k, v)
    assert of_v.tolist() == [[[[1.5, 1.5], [0.5, 0.5]]]] and not of_q.any() and not of_k.any()


@pytest.mark.parametrize("scores", [1 << 22, 200, 1], ids=["one part", "several", "head by head"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_forward_and_backward_equal_the_equation(random, monkeypatch, way, heads, scores):
    monkeypatch.setattr(attention, "_SCORES", scores)
    forward, backward = way
    q, k, v = (random(3, n, 5, 4, grad=True) for n in (heads[0], heads[1], heads[1]))
    grad = random(3, heads[0], 5, 4)
    y = plainly(q, k, v)
    inputs = [x.detach() for x in (q, k, v)]
    torch.testing.assert_close(forward(*inputs), y.detach())
    expected = torch.autograd.grad(y, (q, k, v), grad)
    for mine, other in zip(backward(grad, *inputs), expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_one_token_reads_itself(random):
    q, k, v = random(2, 4, 1, 8), random(2, 2, 1, 8), random(2, 2, 1, 8)
    assert torch.equal(attend(q, k, v), v.repeat_interleave(2, dim=1))
    of_q, of_k, _ = attend_backward(random(2, 4, 1, 8), q, k, v)
    assert not of_q.any() and not of_k.any()


def test_scores_too_large_for_a_plain_exponential_are_no_nan():
    q = torch.full((1, 1, 3, 2), 1e3)
    y, grads = attend(q, q, q), attend_backward(q, q, q, q)
    assert all(x.isfinite().all() for x in (y, *grads))


def test_bfloat16_is_as_near_to_float32_as_torchs_kernel(random):
    exact = [random(2, n, 48, 16).float() for n in (4, 2, 2)]
    y = plainly(*exact)
    rough = [x.bfloat16() for x in exact]
    ours = (attend(*rough).float() - y).abs().mean()
    theirs = (scaled_dot_product_attention(*rough, is_causal=True, enable_gqa=True).float() - y).abs().mean()
    assert ours < 1.3 * theirs
