"""Starts, noise and partings by hand."""

from __future__ import annotations

import math

import pytest

from rlhf_lightning.functional.watches import noise, parting, start_of


def test_the_start_is_the_mean_of_the_first_and_waits_for_them():
    assert start_of([2.0, 4.0, 60.0], 2) == 3.0
    assert start_of([2.0], 2) is None


def test_noise_is_that_of_neighbours_and_not_of_the_trend():
    """Differences 1, -1, 1: 3 / (2 * 3) = 1/2. A slope's ordinary deviation would be 2.9 here."""
    assert noise([0.0, 1.0, 0.0, 1.0]) == pytest.approx(math.sqrt(0.5))
    assert noise([0.1 * k for k in range(100)]) == pytest.approx(0.1 / math.sqrt(2))
    with pytest.raises(ValueError, match="needs two values"):
        noise([1.0])


def test_a_parting_by_hand():
    """Stretches of two: best (5 + 7)/2 = 6, last (2 + 4)/2 = 3, so a fall of 3.

    Differences 2, -5, 2: s² = 33 / 6 = 5.5; standard error sqrt(5.5 * 2 / 2) = 2.345; 3 / 2.345 = 1.279.
    """
    found = parting([0.0, 0.0, 1.0, 1.0], [5.0, 7.0, 2.0, 4.0], window=2)
    assert found is not None
    assert found.fall == 3.0
    assert found.standard_errors == pytest.approx(3 / math.sqrt(5.5))


def test_the_rise_is_counted_from_the_best_stretch():
    """The second reward is best in iterations 2 and 3; the score there is 4, above its end."""
    seconds = [1.0, 1.0, 9.0, 9.0, 1.0, 1.0]
    assert parting([0.0, 0.0, 4.0, 4.0, 3.0, 3.0], seconds, window=2) is None
    assert parting([0.0, 0.0, 4.0, 4.0, 5.0, 5.0], seconds, window=2) is not None


@pytest.mark.parametrize(
    ("scores", "seconds"),
    [
        ([0.0, 0.0, 1.0], [5.0, 5.0, 1.0]),  # not two stretches yet
        ([0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0]),  # both rise
        ([1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 1.0, 1.0]),  # both fall
        ([0.0, 0.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]),
    ],
)
def test_no_parting(scores, seconds):
    assert parting(scores, seconds, window=2) is None


def test_a_fall_without_other_noise_is_sure_soon():
    """A step of 1 among 100 values: s² = 1 / 198, and the error of two means of 5 is s * sqrt(2 / 5)."""
    found = parting([0.0] * 50 + [1.0] * 50, [1.0] * 50 + [0.0] * 50, window=5)
    assert found is not None
    assert found.standard_errors == pytest.approx(math.sqrt(198 * 2.5))
