"""Counts of n-grams, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lightning.functional.text_metrics import distinct_n, repetition

ROWS = [["the", "soup", "the", "soup"], ["warm", "soup"]]


def test_distinct_counts_different_ngrams_over_all_answers():
    # the, soup, warm of six words; (the soup), (soup the), (warm soup) of four pairs
    assert distinct_n(ROWS, 1) == pytest.approx(3 / 6)
    assert distinct_n(ROWS, 2) == pytest.approx(3 / 4)
    assert distinct_n(ROWS, 4) == 1.0


def test_an_ngram_never_spans_two_answers():
    assert distinct_n([["a"], ["b"]], 2) == 0.0


def test_repetition_is_counted_within_an_answer():
    # the first answer: 2 different of 4 words, 2 different of 3 pairs; the second repeats nothing
    assert repetition(ROWS, 1) == pytest.approx((2 / 4 + 0) / 2)
    assert repetition(ROWS, 2) == pytest.approx((1 / 3 + 0) / 2)


def test_short_or_no_answers_repeat_nothing():
    assert repetition([["a"], []], 4) == 0.0
    assert repetition([], 1) == 0.0
    assert distinct_n([], 1) == 0.0


@pytest.mark.parametrize("measure", [distinct_n, repetition])
def test_an_ngram_has_a_part(measure):
    with pytest.raises(ValueError, match="at least 1 part, not 0"):
        measure([["a"]], 0)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20))
def test_one_answer_is_distinct_where_it_does_not_repeat(row):
    assert distinct_n([row], 2) + repetition([row], 2) == pytest.approx(1.0)
