"""Calibration by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.functional.calibration import correlation, reliability, wilson_interval


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_bins_by_hand():
    lead = torch.tensor([logit(0.6), -logit(0.6), logit(0.9), logit(0.9), -logit(0.9)])
    found = reliability(lead, torch.zeros(5), bins=2)  # 0.5 .. 0.75 .. 1
    assert found.pairs.tolist() == [2, 3]
    assert found.confidence.tolist() == pytest.approx([0.6, 0.9], abs=1e-6)
    assert found.accuracy.tolist() == pytest.approx([1 / 2, 2 / 3])
    assert found.error == pytest.approx((2 * 0.1 + 3 * (0.9 - 2 / 3)) / 5, abs=1e-6)


def test_an_empty_bin_counts_for_nothing():
    found = reliability(torch.tensor([logit(0.9)]), torch.zeros(1), bins=5)
    assert found.pairs.tolist() == [0, 0, 0, 0, 1] and math.isnan(found.confidence[0])
    assert found.error == pytest.approx(0.1, abs=1e-6)


def test_equal_scores_are_half_right_and_the_surest_land_in_the_last_bin():
    found = reliability(torch.tensor([1.0, 100.0]), torch.tensor([1.0, 0.0]), bins=4)
    assert found.pairs.tolist() == [1, 0, 0, 1]
    assert found.accuracy[0] == 0.5 and found.accuracy[3] == 1.0


def test_a_model_that_means_what_it_says_has_no_error():
    generator = torch.Generator().manual_seed(0)
    lead = torch.randn(200_000, generator=generator) * 2
    wins = torch.rand(len(lead), generator=generator) < torch.sigmoid(lead)
    folded = torch.where(wins, lead, -lead)
    assert reliability(folded, torch.zeros_like(lead)).error < 0.005
    assert reliability(3 * folded, torch.zeros_like(lead)).error > 0.05  # too sure


def test_a_shift_of_all_scores_changes_nothing():
    chosen, rejected = torch.tensor([0.3, 2.0, -1.0]), torch.tensor([0.1, 2.5, -3.0])
    one, other = reliability(chosen, rejected), reliability(chosen + 7, rejected + 7)
    assert one.error == pytest.approx(other.error, abs=1e-6) and torch.equal(one.pairs, other.pairs)


@pytest.mark.parametrize(
    "chosen, rejected, bins", [(torch.ones(2), torch.ones(3), 5), (torch.ones(0), torch.ones(0), 5)]
)
def test_what_is_no_row_of_pairs_is_refused(chosen, rejected, bins):
    with pytest.raises(ValueError, match="rows of scores"):
        reliability(chosen, rejected, bins=bins)
    with pytest.raises(ValueError, match="bins"):
        reliability(torch.ones(1), torch.ones(1), bins=0)


def test_correlation_by_hand():
    assert correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])) == pytest.approx(1.0)
    assert correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 1.0, 2.0])) == pytest.approx(-0.5)
    assert correlation(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])) == 0.0


def test_wilson_by_hand():
    low, high = wilson_interval(8, 10, z=2.0)
    # share 0.8, z^2 = 4: middle (0.8 + 0.2) / 1.4, half 2 / 1.4 sqrt(0.016 + 0.01)
    assert low == pytest.approx(1 / 1.4 - 2 / 1.4 * math.sqrt(0.026))
    assert high == pytest.approx(1 / 1.4 + 2 / 1.4 * math.sqrt(0.026))
    assert wilson_interval(10, 10)[1] == 1.0 and wilson_interval(0, 10)[0] == 0.0
