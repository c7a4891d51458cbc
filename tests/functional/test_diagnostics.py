import pytest
import torch

from rlhf_lightning.functional import (
    explained_variance,
    explained_variance_from_moments,
    explained_variance_moments,
)

RETURNS = torch.tensor([[1.0, 3.0, float("nan")]])
MASK = torch.tensor([[True, True, False]])


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0], 1.0), ([11.0, 13.0], 1.0), ([5.0, 5.0], 0.0), ([1.5, 2.5], 0.75), ([3.0, 1.0], -3.0)],
)
def test_by_hand(values, expected):
    found = explained_variance(torch.tensor([[*values, 9.0]]), RETURNS, MASK)
    assert found.item() == pytest.approx(expected)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("returns", [[0.1, 0.1, 0.1], [4321.7] * 3])
def test_constant_returns_have_no_answer(returns):
    everything = torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([returns]), everything).isnan()
    assert explained_variance(RETURNS, RETURNS, MASK & False).isnan()


def test_ranks_add_their_moments():
    g = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, 4, 6, generator=g)
    mask = torch.rand(4, 6, generator=g) < 0.6
    parts = [explained_variance_moments(values[i::3], returns[i::3], mask[i::3]) for i in range(3)]
    joint = explained_variance_from_moments(torch.stack(parts).sum(dim=0))
    torch.testing.assert_close(joint, explained_variance(values, returns, mask))
    v, r = values[mask].double(), returns[mask].double()
    torch.testing.assert_close(joint.double(), 1 - (r - v).var() / r.var(), rtol=1e-6, atol=1e-6)


def test_refuses_what_is_not_a_mask():
    with pytest.raises(ValueError, match="bool"):
        explained_variance(torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 3))
