import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.functional import masked_mean, masked_moments, masked_sum, masked_whiten

NAN, INF = float("nan"), float("inf")
TWO_ROWS = torch.tensor([[1.0, 2.0, 3.0, 0.0, 0.0], [4.0, 5.0, 6.0, 7.0, 8.0]])
TWO_MASK = torch.tensor([[True, True, True, False, False], [True] * 5])
TWO_WHITE = torch.tensor(
    [[-1.527525, -1.091089, -0.654654, 0, 0], [-0.218218, 0.218218, 0.654654, 1.091089, 1.527525]]
)


def whiten_by_hand(rows, mask, center):
    """Plain loops in float64."""
    valid = [x for row, keep in zip(rows, mask, strict=True) for x, k in zip(row, keep, strict=True) if k]
    if len(valid) < 2:
        return [[0.0] * len(row) for row in rows]
    mean = sum(valid) / len(valid)
    std = math.sqrt(sum((x - mean) ** 2 for x in valid) / len(valid))
    shift = mean if center else 0.0
    return [
        [(x - shift) / std if k else 0.0 for x, k in zip(row, keep, strict=True)]
        for row, keep in zip(rows, mask, strict=True)
    ]


class TestSums:
    def test_nan_outside_the_mask_is_never_touched(self):
        x = torch.tensor([1.0, 2.0, NAN], requires_grad=True)
        mean = masked_mean(x, torch.tensor([True, True, False]))
        mean.backward()
        assert mean.item() == 1.5
        assert x.grad.tolist() == [0.5, 0.5, 0.0]

    def test_nan_inside_the_mask_stays_visible(self):
        assert masked_mean(torch.tensor([1.0, NAN]), torch.tensor([True, True])).isnan()

    def test_empty_mask(self):
        x, mask = torch.tensor([[NAN, 2.0]]), torch.zeros(1, 2, dtype=torch.bool)
        assert masked_mean(x, mask).item() == 0
        assert masked_sum(x, mask).item() == 0
        assert masked_moments(x, mask).tolist() == [0, 0, 0]

    def test_low_precision_is_summed_in_float32(self):
        ones = torch.ones(1000, dtype=torch.bfloat16)  # bfloat16 cannot count beyond 256
        total = masked_sum(ones, torch.ones(1000, dtype=torch.bool))
        assert total.dtype == torch.float32
        assert total.item() == 1000

    def test_per_token_sums_ignore_the_sentinel_of_pad_cells(self):
        # Two tokens of log-probability -0.5 and four pads that hold +1: the entropy estimate is 1, not -3.
        lp = torch.tensor([-0.5, -0.5, 1.0, 1.0, 1.0, 1.0])
        assert masked_sum(-lp, torch.arange(6) < 2).item() == 1.0

    @pytest.mark.parametrize("function", [masked_mean, masked_sum, masked_moments, masked_whiten])
    def test_refuses_what_is_not_a_mask(self, function):
        with pytest.raises(ValueError, match=r"bool.*float32"):
            function(torch.ones(2), torch.ones(2))
        with pytest.raises(ValueError, match=r"x must have the mask's shape \(3,\); got \(2,\)"):
            function(torch.ones(2), torch.ones(3, dtype=torch.bool))


class TestWhiten:
    @pytest.mark.parametrize("pad", [0.0, 1e6, 1e30, NAN, INF])
    def test_mean_and_population_deviation_of_valid_cells(self, pad):
        torch.testing.assert_close(masked_whiten(TWO_ROWS.masked_fill(~TWO_MASK, pad), TWO_MASK), TWO_WHITE)

    def test_uncentred_keeps_the_mean_in_units_of_the_deviation(self):
        x = torch.tensor([1.0, 3.0])
        assert masked_whiten(x, torch.tensor([True, True]), center=False).tolist() == [1.0, 3.0]
        assert masked_whiten(10 * x, torch.tensor([True, True]), center=False).tolist() == [1.0, 3.0]

    @pytest.mark.parametrize("mask", [[[True]], [[False]]])
    def test_fewer_than_two_cells_give_zero(self, mask):
        assert masked_whiten(torch.tensor([[0.7]]), torch.tensor(mask)).tolist() == [[0.0]]

    @pytest.mark.parametrize("constant", [0.0, 0.1, -7.3, 12345.678])
    def test_constant_input_is_not_blown_up(self, constant):
        x, mask = torch.full((3, 7), constant), torch.ones(3, 7, dtype=torch.bool)
        for moments in (None, masked_moments(x, mask)):
            assert masked_whiten(x, mask, moments=moments).abs().max() < 1e-6

    def test_large_mean_costs_no_digits(self):
        x, mask = torch.tensor([100000.0, 100001.0, 100002.0]), torch.ones(3, dtype=torch.bool)
        expected = torch.tensor([-math.sqrt(1.5), 0, math.sqrt(1.5)])
        torch.testing.assert_close(masked_whiten(x, mask), expected)
        torch.testing.assert_close(masked_whiten(x, mask, moments=masked_moments(x, mask)), expected)

    def test_joint_moments_of_two_ranks_and_an_empty_one(self):
        ranks = [
            (TWO_ROWS[:1], TWO_MASK[:1]),
            (TWO_ROWS[1:], TWO_MASK[1:]),
            (TWO_ROWS[:1], TWO_MASK[:1] & False),
        ]
        moments = torch.stack([masked_moments(x, mask) for x, mask in ranks]).sum(dim=0)
        assert moments.tolist() == [8, 36, 204]
        whitened = [masked_whiten(x, mask, moments=moments) for x, mask in ranks]
        torch.testing.assert_close(torch.cat(whitened[:2]), TWO_WHITE)
        assert whitened[2].tolist() == [[0.0] * 5]
        alone = masked_whiten(*ranks[0])
        torch.testing.assert_close(alone[0, :3], torch.tensor([-1.224745, 0.0, 1.224745]))

    def test_a_bad_row_can_be_left_out(self):
        scores = torch.tensor([1.0, NAN, 3.0])
        assert masked_whiten(scores, scores.isfinite()).tolist() == [-1.0, 0.0, 1.0]

    def test_nan_in_a_valid_cell_shows(self):
        assert masked_whiten(torch.tensor([1.0, NAN, 3.0]), torch.ones(3, dtype=torch.bool)).isnan().all()

    def test_gradient_and_constant_input(self):
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        mask = torch.rand(3, 4) < 0.7
        mask[0, :2] = True
        assert torch.autograd.gradcheck(lambda y: masked_whiten(y, mask), (x,))
        flat = torch.ones(3, requires_grad=True)
        masked_whiten(flat, torch.ones(3, dtype=torch.bool)).sum().backward()
        assert flat.grad.isfinite().all()

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), width=st.integers(1, 7), center=st.booleans())
    def test_agrees_with_plain_loops_and_keeps_its_promises(self, seed, rows, width, center):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, width, generator=g) * 3 + 1
        mask = torch.rand(rows, width, generator=g) < 0.6
        result = masked_whiten(x, mask, center=center)
        expected = torch.tensor(whiten_by_hand(x.tolist(), mask.tolist(), center), dtype=torch.float64)
        torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)
        reduced = sum(masked_moments(x[i : i + 1], mask[i : i + 1]) for i in range(rows))
        torch.testing.assert_close(
            masked_whiten(x, mask, center=center, moments=reduced), result, rtol=1e-5, atol=1e-6
        )
        order = torch.randperm(rows, generator=g)
        torch.testing.assert_close(masked_whiten(x[order], mask[order], center=center), result[order])
        for garbage in (NAN, -INF, 1e30):
            assert torch.equal(masked_whiten(x.masked_fill(~mask, garbage), mask, center=center), result)
