"""Win rates and their intervals, by hand and by identities."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lightning.functional.comparison import bootstrap_interval, win_rate, wins

SETTINGS = {"seed": 3, "resamples": 4000, "confidence": 0.95}


def test_a_tie_counts_half():
    a, b = torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert wins(a, b).tolist() == [1.0, 0.0, 0.5, 1.0]
    assert win_rate(a, b) == 2.5 / 4


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=1, max_size=40))
def test_what_one_wins_the_other_loses(pairs):
    a, b = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
    assert win_rate(a, b) + win_rate(b, a) == pytest.approx(1.0, abs=1e-12)
    assert win_rate(a, a) == 0.5


def test_scores_that_do_not_pair_up_are_refused():
    with pytest.raises(ValueError, match="do not pair up"):
        wins(torch.zeros(3), torch.zeros(1))


def test_two_values_have_a_known_bootstrap():
    # A resample of {0, 1} has the mean 0, 1/2 or 1 with probability 1/4, 1/2, 1/4.
    values = torch.tensor([0.0, 1.0])
    assert bootstrap_interval(values, **SETTINGS) == (0.0, 1.0)
    narrow = SETTINGS | {"confidence": 0.4}  # from 30 % to 70 %: inside the middle half
    assert bootstrap_interval(values, **narrow) == (0.5, 0.5)


def test_the_interval_agrees_with_the_normal_one():
    values = torch.arange(400) % 2  # mean 1/2, deviation 1/2: 0.5 -+ 1.96 * 0.5 / 20
    low, high = bootstrap_interval(values, **SETTINGS)
    assert low == pytest.approx(0.451, abs=0.004)
    assert high == pytest.approx(0.549, abs=0.004)


def test_answers_to_one_prompt_are_drawn_together():
    # Copies of the same answers say nothing new: the interval must not shrink.
    values = torch.rand(20, generator=torch.Generator().manual_seed(0))
    once = bootstrap_interval(values, **SETTINGS)
    assert bootstrap_interval(values.unsqueeze(1).expand(20, 8), **SETTINGS) == pytest.approx(once)


def test_a_seed_counts_the_draws():
    values = torch.rand(9, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    first = bootstrap_interval(values, **SETTINGS)
    torch.manual_seed(1)
    assert bootstrap_interval(values, **SETTINGS) == first
    assert bootstrap_interval(values, **SETTINGS | {"seed": 4}) != first


def test_equal_values_leave_no_doubt():
    assert bootstrap_interval(torch.full((5,), 0.25), **SETTINGS) == (0.25, 0.25)


def test_many_prompts_are_drawn_in_pieces():
    values = torch.linspace(0, 1, 100_000)
    low, high = bootstrap_interval(values, seed=0, resamples=100, confidence=0.95)
    assert 0.497 < low < 0.5 < high < 0.503


def test_nothing_cannot_be_resampled():
    with pytest.raises(ValueError, match="nothing to resample"):
        bootstrap_interval(torch.zeros(0), **SETTINGS)
