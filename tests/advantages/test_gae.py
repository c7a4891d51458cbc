import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.advantages import gae

NAN, INF = float("nan"), float("inf")
VALUES = torch.tensor([[0.5, 0.4, 0.3]])
REWARDS = torch.tensor([[-0.01, -0.02, 1.0]])
FULL = torch.ones(1, 3, dtype=torch.bool)


def gae_by_hand(rewards, values, mask, gamma, lam, last):
    """Plain loops in float64: every advantage as the full sum of its discounted errors."""
    rows = []
    for r, v, m, tail in zip(rewards, values, mask, last, strict=True):
        n = sum(m)
        following = [*v[1:n], tail]
        deltas = [r[t] + gamma * following[t] - v[t] for t in range(n)]
        sums = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
        rows.append(sums + [0.0] * (len(m) - n))
    return rows


def batch(seed, rows, width):
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, width, generator=g)
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=g)
    return rewards, values, mask, torch.randn(rows, generator=g)


class TestByHand:
    @pytest.mark.parametrize(
        ("last", "expected"),
        [(None, [0.40775, 0.545, 0.7]), ([0.0], [0.40775, 0.545, 0.7]), ([0.2], [0.58825, 0.735, 0.9])],
    )
    def test_an_end_is_worth_nothing_and_a_cut_its_bootstrap(self, last, expected):
        last_values = None if last is None else torch.tensor(last)
        advantages, returns = gae(
            REWARDS, values=VALUES, mask=FULL, gamma=1.0, lam=0.95, last_values=last_values
        )
        assert advantages[0].tolist() == pytest.approx(expected)
        assert returns[0].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, [0.5, 0.4, 0.3], strict=True)]
        )

    @pytest.mark.parametrize("pad", [0.9, 1e30, NAN, INF])
    def test_pad_cells_are_never_read(self, pad):
        wide = [torch.cat([x, torch.full((1, 2), pad)], dim=1) for x in (REWARDS, VALUES)]
        mask = torch.tensor([[True, True, True, False, False]])
        advantages, returns = gae(wide[0], values=wide[1], mask=mask, gamma=1.0, lam=0.95)
        assert advantages[0].tolist() == pytest.approx([0.40775, 0.545, 0.7, 0, 0])
        assert returns[0, 3:].tolist() == [0, 0]

    def test_bootstrap_is_per_row_and_sits_at_the_last_valid_token(self):
        mask = torch.tensor([[True, False], [True, True], [False, False]])
        zero = torch.zeros(3, 2)
        advantages, _ = gae(
            zero, values=zero, mask=mask, gamma=0.5, lam=1.0, last_values=torch.tensor([1.0, 2.0, NAN])
        )
        assert advantages.tolist() == [[0.5, 0.0], [0.5, 1.0], [0.0, 0.0]]


class TestIdentities:
    def test_lambda_zero_is_the_one_step_error(self):
        advantages, _ = gae(REWARDS, values=VALUES, mask=FULL, gamma=0.9, lam=0.0)
        expected = [-0.01 + 0.9 * 0.4 - 0.5, -0.02 + 0.9 * 0.3 - 0.4, 1.0 - 0.3]
        assert advantages[0].tolist() == pytest.approx(expected)

    def test_lambda_one_is_return_minus_value(self):
        advantages, returns = gae(REWARDS, values=VALUES, mask=FULL, gamma=1.0, lam=1.0)
        assert returns[0].tolist() == pytest.approx([0.97, 0.98, 1.0])
        assert advantages[0].tolist() == pytest.approx([0.47, 0.58, 0.7])

    def test_discounted_return_does_not_depend_on_values(self):
        _, returns = gae(REWARDS, values=VALUES * 7 - 3, mask=FULL, gamma=0.5, lam=1.0)
        assert returns[0].tolist() == pytest.approx([-0.01 - 0.01 + 0.25, -0.02 + 0.5, 1.0])

    def test_perfect_values_leave_no_advantage(self):
        values = torch.tensor([[0.97, 0.98, 1.0]])
        advantages, _ = gae(REWARDS, values=values, mask=FULL, gamma=1.0, lam=0.95)
        torch.testing.assert_close(advantages, torch.zeros(1, 3))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    width=st.integers(0, 7),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_agrees_with_plain_loops_and_keeps_its_promises(seed, rows, width, gamma, lam):
    rewards, values, mask, last = batch(seed, rows, width)
    discount = {"gamma": gamma, "lam": lam}
    found = gae(rewards, values=values, mask=mask, last_values=last, **discount)
    by_hand = gae_by_hand(*(x.tolist() for x in (rewards, values, mask)), gamma, lam, last.tolist())
    expected = torch.tensor(by_hand, dtype=torch.float64).view(rows, width)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], torch.where(mask, found[0] + values, 0.0))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    permuted = gae(
        rewards[order], values=values[order], mask=mask[order], last_values=last[order], **discount
    )
    for ours, theirs in zip(permuted, found, strict=True):
        assert torch.equal(ours, theirs[order])
    for garbage in (NAN, INF, 1e30):
        dirty = [x.masked_fill(~mask, garbage) for x in (rewards, values)]
        for ours, theirs in zip(
            gae(dirty[0], values=dirty[1], mask=mask, last_values=last, **discount), found, strict=True
        ):
            assert torch.equal(ours, theirs)


def test_constants_of_the_update_carry_no_gradient():
    values = VALUES.clone().requires_grad_()
    assert not any(x.requires_grad for x in gae(REWARDS, values=values, mask=FULL, gamma=1.0, lam=0.95))


def test_float64_stays_and_bfloat16_is_raised():
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        advantages, returns = gae(REWARDS.to(dtype), values=VALUES.to(dtype), mask=FULL, gamma=1.0, lam=1.0)
        assert advantages.dtype == returns.dtype == expected


def test_nan_in_a_valid_cell_shows():
    rewards = REWARDS.clone()
    rewards[0, 2] = NAN
    assert gae(rewards, values=VALUES, mask=FULL, gamma=1.0, lam=0.95)[0].isnan().all()


def test_errors():
    good = {"values": VALUES, "mask": FULL, "gamma": 1.0, "lam": 0.95}
    for change, sentence in [
        ({"mask": VALUES, "values": FULL}, "mask must be a bool tensor"),
        ({"values": VALUES[:, 1:]}, r"values must have the mask's shape \(1, 3\); got \(1, 2\)"),
        ({"mask": torch.tensor([[False, True, True]])}, "mask must be right-padded"),
        ({"gamma": 1.1}, r"gamma must lie in \[0, 1\]; got 1.1"),
        ({"lam": -0.1}, r"lam must lie in \[0, 1\]; got -0.1"),
        ({"last_values": torch.zeros(1, 3)}, r"last_values must have shape \(1,\); got \(1, 3\)"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            gae(REWARDS, **good | change)
