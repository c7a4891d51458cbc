"""The order of prompts: counted, not carried (fault 68: a resumed run repeats the first epoch's order)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.data.order import prompt_indices

COUNT, PER, SEED = st.integers(1, 23), st.integers(1, 17), st.integers(0, 2**32 - 1)


def stream(count: int, per: int, iterations: int, seed: int, shuffle: bool = True) -> list[int]:
    found: list[int] = []
    for k in range(iterations):
        found += prompt_indices(count, per_iteration=per, iteration=k, seed=seed, shuffle=shuffle)
    return found


def test_file_order_runs_over_the_end_of_a_pass() -> None:
    """5 prompts, 2 an iteration: 01 23 40 12 34."""
    batches = [prompt_indices(5, per_iteration=2, iteration=k, seed=0, shuffle=False) for k in range(5)]
    assert batches == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_more_prompts_asked_than_there_are() -> None:
    assert prompt_indices(2, per_iteration=5, iteration=0, seed=0, shuffle=False) == [0, 1, 0, 1, 0]
    assert prompt_indices(2, per_iteration=5, iteration=1, seed=0, shuffle=False) == [1, 0, 1, 0, 1]


@settings(max_examples=60, deadline=None)
@given(COUNT, PER, SEED)
def test_every_pass_is_a_permutation(count: int, per: int, seed: int) -> None:
    passes = 3
    order = stream(count, per, -(-passes * count // per), seed)
    for number in range(passes):
        assert sorted(order[number * count : (number + 1) * count]) == list(range(count))


@settings(max_examples=60, deadline=None)
@given(COUNT, PER, st.integers(2, 5), SEED, st.booleans())
def test_the_stream_does_not_depend_on_how_it_is_cut(count, per, factor, seed, shuffle) -> None:
    whole = prompt_indices(count, per_iteration=per * factor, iteration=1, seed=seed, shuffle=shuffle)
    assert stream(count, per, 2 * factor, seed, shuffle)[per * factor :] == whole


@settings(max_examples=60, deadline=None)
@given(COUNT, PER, SEED)
def test_no_prompt_is_ever_two_passes_ahead_of_another(count: int, per: int, seed: int) -> None:
    seen = Counter(stream(count, per, 7, seed))
    assert max(seen.values()) - min(seen.get(i, 0) for i in range(count)) <= 1


def test_passes_and_seeds_differ() -> None:
    first, second = (prompt_indices(50, per_iteration=50, iteration=k, seed=0, shuffle=True) for k in (0, 1))
    other = prompt_indices(50, per_iteration=50, iteration=0, seed=1, shuffle=True)
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(50))}) == 4


def test_shuffled_order_is_pinned() -> None:
    """A change of these numbers breaks the resuming of old runs: do it knowingly."""
    assert prompt_indices(6, per_iteration=8, iteration=0, seed=0, shuffle=True) == [
        *(3, 0, 2, 5, 4, 1),
        *(0, 2),
    ]


@pytest.mark.parametrize(("count", "per", "iteration"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_nothing_to_draw_from_is_refused(count: int, per: int, iteration: int) -> None:
    with pytest.raises(ValueError, match=r"count >= 1.*got"):
        prompt_indices(count, per_iteration=per, iteration=iteration, seed=0, shuffle=True)
