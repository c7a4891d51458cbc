"""Counted seeds: the same everywhere, different for every purpose."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.randomness import counted_seed

PURPOSE = st.lists(st.one_of(st.integers(-(2**40), 2**40), st.text("ab1", max_size=3)), max_size=4)


def test_is_the_first_63_bits_of_a_sha256_that_anyone_can_recompute() -> None:
    digest = hashlib.sha256(b'[7, "prompts", 3]').digest()
    assert counted_seed(7, "prompts", 3) == int.from_bytes(digest[:8], "big") // 2


def test_another_process_with_another_hash_seed_agrees() -> None:
    code = "from rlhf_lightning.randomness import counted_seed; print(counted_seed(5, 'rollout', 2))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[1],
            env={"PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for salt in ("1", "2")
    }
    assert seen == {str(counted_seed(5, "rollout", 2))}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), PURPOSE, PURPOSE)
def test_different_purposes_have_different_seeds_and_all_fit_a_generator(seed, one, other) -> None:
    first, second = counted_seed(seed, *one), counted_seed(seed, *other)
    assert (first == second) == (one == other)
    assert 0 <= first < 2**63
    torch.Generator().manual_seed(first)


def test_type_order_and_grouping_count() -> None:
    assert counted_seed(0, 1) != counted_seed(0, "1")
    assert counted_seed(0, 1, 2) != counted_seed(0, 2, 1)
    assert counted_seed(0, "ab") != counted_seed(0, "a", "b")
    assert counted_seed(1, 2) != counted_seed(2, 1)


def test_integers_of_numpy_count_as_integers_and_floats_are_refused() -> None:
    assert counted_seed(0, np.int64(3)) == counted_seed(0, 3)
    with pytest.raises(TypeError):
        counted_seed(0, 3.0)  # type: ignore[arg-type]
