"""Packed maps against the same maps in float64."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.kernels.linears import Linears, Term
from rlhf_lightning.kernels.packed import Packed, packs

BF16 = torch.bfloat16
needs_bfloat16 = pytest.mark.skipif(
    not packs(torch.device("cpu"), BF16), reason="this processor does not multiply bfloat16"
)
SIZES = (24, 8, 8)


def make(random, *, bias: bool, terms: bool) -> Linears:
    weight = random(sum(SIZES), 32).to(BF16)
    term = [Term(random(4, 32).float(), random(size, 4).float(), 0.5) if terms else None for size in SIZES]
    return Linears(lambda: weight, random(sum(SIZES)).to(BF16) if bias else None, SIZES, tuple(term))


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 3, 16, 65])
@pytest.mark.parametrize(("bias", "terms"), [(True, True), (False, True), (True, False)])
def test_no_further_from_float64_than_the_plain_products(random, rows, bias, terms):
    maps, x = make(random, bias=bias, terms=terms), random(rows, 32).to(BF16)
    low = maps.low(BF16)
    exact = x.double() @ maps.weight().double().T
    if bias:
        exact = exact + maps.bias.double()
    if low is not None:
        exact = exact + x.double() @ low.A.double().T @ low.B.double().T
    packed = Packed(maps.weight(), maps.bias, low)(x)
    assert packed.dtype == BF16
    error, plain = ((y.double() - exact).norm() for y in (packed, maps.forward(x, low)))
    assert error <= 1.05 * plain <= 0.01 * exact.norm()


@needs_bfloat16
def test_the_copy_is_a_copy(random):
    maps, x = make(random, bias=False, terms=False), random(2, 32).to(BF16)
    packed = Packed(maps.weight())
    before = packed(x)
    maps.weight().zero_()
    assert torch.equal(packed(x), before) and before.any()


def test_nothing_else_packs():
    assert not packs(torch.device("cpu"), torch.float32) and not packs(torch.device("meta"), BF16)
