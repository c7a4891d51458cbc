"""Stacked frozen maps with low-rank terms, against one product after another under autograd."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.kernels.linears import Linears, Term

SIZES, WIDTH = (4, 2, 3), 5
RANKS = {"all": (2, 1, 3), "some": (None, 2, None), "ends": (1, None, 4), "none": (None, None, None)}


def make(random, ranks, bias=True) -> Linears:
    weight = random(sum(SIZES), WIDTH)
    terms = tuple(
        None
        if rank is None
        else Term(random(rank, WIDTH, grad=True), random(size, rank, grad=True), 0.5 * n + 1)
        for n, (size, rank) in enumerate(zip(SIZES, ranks, strict=True))
    )
    return Linears(lambda: weight, random(sum(SIZES)) if bias else None, SIZES, terms)


def plainly(maps: Linears, x):
    """(x W' + b + scale x A' B') of each map, side by side."""
    parts, row = [], 0
    for size, term in zip(maps.sizes, maps.terms, strict=True):
        y = x @ maps.weight()[row : row + size].T
        if maps.bias is not None:
            y = y + maps.bias[row : row + size]
        parts.append(y if term is None else y + term.scale * (x @ term.A.T @ term.B.T))
        row += size
    return torch.cat(parts, dim=1)


def test_one_map_by_hand():
    """y = 2x + 1 + 3 (4 (5 x)): at x = 1, 63; dy/dx = 62, dy/dA = 3 * 4 * 1, dy/dB = 3 * 5 * 1."""
    one = torch.ones(1, 1)
    maps = Linears(lambda: 2 * one, torch.ones(1), (1,), (Term(5 * one, 4 * one, 3.0),))
    low = maps.low(torch.float32)
    assert maps.forward(one, low).tolist() == [[63]]
    of_x, (of_a, of_b) = maps.backward(one, one, low)
    assert (of_x.item(), of_a.item(), of_b.item()) == (62, 12, 15)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS.keys())
def test_forward_and_backward_equal_the_plain_products(random, ranks, bias):
    maps, x, grad = make(random, ranks, bias), random(6, WIDTH, grad=True), random(6, sum(SIZES))
    low = maps.low(torch.float64)
    assert (low is None) == (not maps.parameters)
    y = plainly(maps, x)
    torch.testing.assert_close(maps.forward(x.detach(), low), y.detach())
    expected = torch.autograd.grad(y, [x, *maps.parameters], grad)
    of_x, found = maps.backward(grad, x.detach(), low)
    for mine, other in zip([of_x, *found], expected, strict=True):
        torch.testing.assert_close(mine, other)
    without, again = maps.backward(grad, x.detach(), low, input_grad=False)
    assert without is None and all(map(torch.equal, again, found))


def test_a_term_reaches_its_own_map_alone(random):
    maps = make(random, RANKS["some"])
    x, bare = random(6, WIDTH), make(random, RANKS["none"])
    bare = Linears(maps.weight, maps.bias, SIZES, bare.terms)
    moved = (maps.forward(x, maps.low(torch.float64)) - bare.forward(x, None)).abs().amax(dim=0)
    assert (moved > 0).tolist() == [False] * 4 + [True] * 2 + [False] * 3


def test_gradients_come_in_the_parameters_own_dtype(random):
    """The arithmetic is bfloat16's, the adapter trains in float32."""
    term = Term(random(2, WIDTH).float(), random(4, 2).float(), 2.0)
    weight = random(4, WIDTH).bfloat16()
    maps = Linears(lambda: weight, None, (4,), (term,))
    low, x = maps.low(torch.bfloat16), random(3, WIDTH).bfloat16()
    assert low.A.dtype == low.B.dtype == maps.forward(x, low).dtype == torch.bfloat16
    of_x, found = maps.backward(random(3, 4).bfloat16(), x, low)
    assert of_x.dtype == torch.bfloat16 and {g.dtype for g in found} == {torch.float32}
