"""Both halves of a layer against plain torch: values, and gradients of input and low-rank terms."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from rlhf_lightning.kernels.blocks import AttentionHalf, MLPHalf, Tokens
from rlhf_lightning.kernels.linears import Linears, Term
from rlhf_lightning.kernels.packing import pack

HIDDEN, HEADS, KEY_HEADS, SIZE, INNER = 6, 4, 2, 4, 5
EPS = 1e-3
ROWS = {
    "shared beginnings": [[3, 1, 4, 1, 5], [3, 1, 4, 2], [3, 1], [9, 2, 6]],
    "nothing shared": [[3, 1, 4], [1, 5], [2, 7, 1, 8]],
    "one token": [[3], [4]],
    "identical rows": [[3, 1, 4], [3, 1, 4]],
}
TERMS = {"all": (1, 1, 1), "one": (0, 1, 0), "none": (0, 0, 0)}


def maps(random, sizes, width, present) -> Linears:
    weight = random(sum(sizes), width) / width**0.5
    terms = tuple(
        Term(random(2, width, grad=True), random(size, 2, grad=True), 0.7) if here else None
        for size, here in zip(sizes, present, strict=True)
    )
    return Linears(lambda: weight, random(sum(sizes)), sizes, terms)


def plainly(linears: Linears, x):
    y = x @ linears.weight().T + linears.bias
    parts = y.split(linears.sizes, dim=-1)
    return torch.cat(
        [
            part if term is None else part + term.scale * (x @ term.A.T @ term.B.T)
            for part, term in zip(parts, linears.terms, strict=True)
        ],
        dim=-1,
    )


def normed(half, x):
    return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * half.norm


def attended(half: AttentionHalf, x, cos, sin):
    """One row (L, H) by the plain layers."""
    q, k, v = (
        y.view(len(x), -1, SIZE).transpose(0, 1)
        for y in plainly(half.qkv, normed(half, x)).split(half.qkv.sizes, dim=1)
    )

    def turned(y):
        first, second = y.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    y = scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
    return x + plainly(half.out, y.transpose(0, 1).flatten(1))


def tokens_of(rows) -> Tokens:
    packing = pack(rows)
    angles = packing.positions[:, None, None] * torch.tensor([0.9, 0.1], dtype=torch.float64)
    return Tokens(packing, angles.cos(), angles.sin())


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_attention_half_equals_the_plain_layers_row_by_row(random, rows, terms, lean):
    sizes = (HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE)
    half = AttentionHalf(
        norm=random(HIDDEN), eps=EPS, qkv=maps(random, sizes, HIDDEN, terms),
        out=maps(random, (HIDDEN,), HEADS * SIZE, terms[:1]), heads=HEADS, key_heads=KEY_HEADS,
        head_size=SIZE, lean=lean,
    )  # fmt: skip
    tokens = tokens_of(rows)
    x = random(len(tokens.packing), HIDDEN, grad=True)
    cells = [tokens.packing.index[b, : len(row)] for b, row in enumerate(rows)]
    cotangents = [random(len(row), HIDDEN) for row in rows]
    ours = half(x, tokens)
    theirs = [attended(half, x[cell], tokens.cos[cell, 0], tokens.sin[cell, 0]) for cell in cells]
    for cell, other in zip(cells, theirs, strict=True):
        torch.testing.assert_close(ours[cell], other)
    read = sum((ours[cell] * grad).sum() for cell, grad in zip(cells, cotangents, strict=True))
    plain = sum((other * grad).sum() for other, grad in zip(theirs, cotangents, strict=True))
    leaves = [x, *half.qkv.parameters, *half.out.parameters]
    for mine, other in zip(
        torch.autograd.grad(read, leaves), torch.autograd.grad(plain, leaves), strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
def test_mlp_half_equals_the_plain_layers(random, terms, lean):
    half = MLPHalf(
        norm=random(HIDDEN), eps=EPS, gate_up=maps(random, (INNER, INNER), HIDDEN, terms[:2]),
        down=maps(random, (HIDDEN,), INNER, terms[1:2]), lean=lean,
    )  # fmt: skip
    x, grad = random(7, HIDDEN, grad=True), random(7, HIDDEN)
    gate, up = plainly(half.gate_up, normed(half, x)).chunk(2, dim=-1)
    plain = x + plainly(half.down, silu(gate) * up)
    ours = half(x)
    torch.testing.assert_close(ours, plain)
    leaves = [x, *half.gate_up.parameters, *half.down.parameters]
    for mine, other in zip(
        torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(plain, leaves, grad), strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("lean", [False, True])
def test_terms_learn_where_the_input_wants_no_gradient(random, lean):
    """The first layer: its input is the frozen embedding."""
    sizes = (HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE)
    tokens = tokens_of(ROWS["shared beginnings"])
    x = random(len(tokens.packing), HIDDEN)
    halves = (
        AttentionHalf(random(HIDDEN), EPS, maps(random, sizes, HIDDEN, (1, 1, 1)),
                      maps(random, (HIDDEN,), HEADS * SIZE, (1,)), HEADS, KEY_HEADS, SIZE, lean),
        MLPHalf(random(HIDDEN), EPS, maps(random, (INNER, INNER), HIDDEN, (1, 1)),
                maps(random, (HIDDEN,), INNER, (1,)), lean),
    )  # fmt: skip
    for half, rest in zip(halves, ((tokens,), ()), strict=True):
        groups = (half.qkv, half.out) if isinstance(half, AttentionHalf) else (half.gate_up, half.down)
        leaves = [p for group in groups for p in group.parameters]
        found = torch.autograd.grad(half(x, *rest).sum(), leaves)
        wanted = x.clone().requires_grad_()
        expected = torch.autograd.grad(half(wanted, *rest).sum(), [*leaves, wanted])
        assert expected[-1].any() and all(map(torch.equal, found, expected))


def test_keys_and_values_are_those_of_the_call(random):
    sizes = (HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE)
    half = AttentionHalf(random(HIDDEN), EPS, maps(random, sizes, HIDDEN, (1, 1, 1)),
                         maps(random, (HIDDEN,), HEADS * SIZE, (1,)), HEADS, KEY_HEADS, SIZE)  # fmt: skip
    rows = ROWS["shared beginnings"]
    tokens = tokens_of(rows)
    x = random(len(tokens.packing), HIDDEN)
    with torch.no_grad():
        y, keys, values = half.keys_and_values(x, tokens)
        torch.testing.assert_close(y, half(x, tokens))
        for b, row in enumerate(rows):
            cell = tokens.packing.index[b, : len(row)]
            _, k, v = plainly(half.qkv, normed(half, x[cell])).split(sizes, dim=1)
            torch.testing.assert_close(values[b, :, : len(row)].transpose(0, 1).flatten(1), v)
            torch.testing.assert_close(keys[b, :, 0].flatten(), k[0])  # position 0 is not turned


def test_kept_for_the_backward_is_the_input_alone_where_lean(random):
    def kept(lean: bool) -> int:
        half = MLPHalf(random(HIDDEN), EPS, maps(random, (INNER, INNER), HIDDEN, (1, 1)),
                       maps(random, (HIDDEN,), INNER, (1,)), lean)  # fmt: skip
        found: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.numel()) or t, lambda t: t):
            half(random(7, HIDDEN, grad=True))
        return sum(found)

    # rank 2: A (4, H) and B (2 I, 4) of gate and up, A (2, I) and B (H, 2) of down; A x is 4 and 2 a token
    terms = 4 * HIDDEN + 2 * INNER * 4 + 2 * INNER + HIDDEN * 2
    assert kept(True) == 7 * HIDDEN + terms
    assert kept(False) == 7 * (HIDDEN + 2 * INNER + 4 + 2) + terms
