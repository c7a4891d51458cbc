"""Norm, rotation and gated unit: numbers by hand, and derivatives against autograd's."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.kernels.pointwise import gated, gated_backward, rms_norm, rms_norm_backward, rotate


def test_rms_norm_by_hand():
    """mean of (3, 4) squared is 12.5; with eps 3.5 the root is 4."""
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 1.0])
    assert rms_norm(x, weight, 3.5).tolist() == [[3 / 4 * 2, 4 / 4]]


def test_rms_norm_backward_is_the_derivative(random):
    x, weight, grad = random(5, 8, grad=True), random(8), random(5, 8)
    y = x * (x.square().mean(dim=1, keepdim=True) + 1e-3).rsqrt() * weight
    torch.testing.assert_close(rms_norm(x.detach(), weight, 1e-3), y.detach())
    (expected,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(rms_norm_backward(grad, x.detach(), weight, 1e-3), expected)


def test_rms_norm_backward_sums_in_float32(random):
    """In bfloat16 a sum of 4096 equal squares would stop growing long before its end."""
    x, grad = torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bfloat16)
    grad[0, 0] = 2.0
    found = rms_norm_backward(grad, x, torch.ones(4096, dtype=torch.bfloat16), 0.0)
    assert found.dtype == torch.bfloat16
    assert float(found[0, 0]) == pytest.approx(1 - 1 / 4096, abs=2**-8)  # 2 - mean of grad
    assert float(found[0, 1]) == pytest.approx(-1 / 4096, rel=2**-7)


def test_rotation_by_hand():
    """A quarter turn of (1, 2 | 3, 4), whose pairs are (1, 3) and (2, 4): (a, b) -> (-b, a)."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    assert rotate(x, zero, one).tolist() == [[-3, -4, 1, 2]]
    assert rotate(x, zero, one, back=True).tolist() == [[3, 4, -1, -2]]


def test_rotation_back_undoes_it_and_is_its_derivative(random):
    x, grad, angle = random(3, 2, 8, grad=True), random(3, 2, 8), random(3, 1, 4)
    cos, sin = angle.cos(), angle.sin()
    torch.testing.assert_close(rotate(rotate(x.detach(), cos, sin), cos, sin, back=True), x.detach())
    first, second = x.chunk(2, dim=-1)
    plain = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(rotate(x.detach(), cos, sin), plain.detach())
    (expected,) = torch.autograd.grad(plain, x, grad)
    torch.testing.assert_close(rotate(grad, cos, sin, back=True), expected)


def test_scores_depend_on_the_distance_alone(random):
    q, k = random(1, 8), random(1, 8)

    def score(i: int, j: int) -> float:
        angles = torch.tensor([0.7, 0.3, 0.1, 0.01], dtype=torch.float64)
        turned = [rotate(x, (n * angles).cos(), (n * angles).sin()) for x, n in ((q, i), (k, j))]
        return float(turned[0] @ turned[1].T)

    assert score(9, 4) == pytest.approx(score(5, 0), rel=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)


def test_gated_by_hand():
    """silu(ln 3) = 3/4 ln 3."""
    x = torch.tensor([[0.0, math.log(3), 5.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(gated(x), torch.tensor([[0.0, 1.5 * math.log(3)]], dtype=torch.float64))


def test_gated_backward_is_the_derivative(random):
    x, grad = random(4, 6, grad=True), random(4, 3)
    gate, up = x.chunk(2, dim=-1)
    (expected,) = torch.autograd.grad(gate * gate.sigmoid() * up, x, grad)
    before = x.detach().clone()
    torch.testing.assert_close(
        gated_backward(grad, x.detach(), gate.sigmoid().detach() * gate.detach()), expected
    )
    passed = (gate * gate.sigmoid()).detach()
    for found in (gated(x.detach()), gated(x.detach(), passed)):
        torch.testing.assert_close(found, (gate * gate.sigmoid() * up).detach())
    assert torch.equal(x, before)  # it is kept for the backward
