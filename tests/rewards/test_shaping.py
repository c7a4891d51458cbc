"""The order of shaping: running moments, then the clip, then the penalty for a cut answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.moments import RunningMoments
from rlhf_lightning.rewards.shaping import shape_scores
from rlhf_lightning.types import Ended


def shape(
    scores: list[float],
    ended: list[Ended],
    *,
    penalty: float | None = None,
    normalize: bool = False,
    clip: float | None = None,
    moments: RunningMoments | None = None,
) -> list[float]:
    shaped: Tensor = shape_scores(
        torch.tensor(scores),
        ended=ended,
        missing_eos_penalty=penalty,
        moments=moments or RunningMoments(),
        normalize=normalize,
        clip=clip,
    )
    assert shaped.dtype == torch.float32
    return shaped.tolist()


def test_fault_7_a_stop_id_of_any_kind_is_an_end_and_a_cut_pays() -> None:
    assert shape([0.3, 0.3, 0.3], ["stop", "length", "eos"], penalty=1.0) == pytest.approx([0.3, -0.7, 0.3])
    assert shape([0.3, 0.3], ["stop", "length"]) == pytest.approx([0.3, 0.3])


def test_fault_37_scores_far_from_zero_are_centred_and_scaled_and_the_raw_ones_stay() -> None:
    raw = torch.tensor([60.0, 62.0])
    moments = RunningMoments()
    shaped = shape_scores(
        raw, ended=["eos", "eos"], missing_eos_penalty=None, moments=moments, normalize=True, clip=None
    )
    assert shaped.tolist() == [-1.0, 1.0]
    assert raw.mean().item() == 61.0 and moments.mean == 61.0


def test_moments_run_over_iterations() -> None:
    moments = RunningMoments()
    shape([60.0, 62.0], ["eos", "eos"], normalize=True, moments=moments)
    # Over 60, 62, 64, 66: mean 63, variance (9 + 1 + 1 + 9) / 4 = 5.
    shaped = shape([64.0, 66.0], ["eos", "eos"], normalize=True, moments=moments)
    assert shaped == pytest.approx([1 / 5**0.5, 3 / 5**0.5])


def test_moments_are_left_alone_where_nothing_is_normalised() -> None:
    moments = RunningMoments()
    shape([1.0, 5.0], ["eos", "eos"], moments=moments)
    assert moments.count == 0


def test_the_clip_follows_the_normalisation_and_the_penalty_follows_both() -> None:
    # -1 and 1 after normalisation, -0.5 and 0.5 after the clip; the cut answer then pays 2 in full.
    assert shape([60.0, 62.0], ["eos", "length"], penalty=2.0, normalize=True, clip=0.5) == [-0.5, -1.5]
    assert shape([60.0, -60.0], ["eos", "eos"], clip=5.0) == [5.0, -5.0]


def test_the_penalty_stays_out_of_the_statistics() -> None:
    moments = RunningMoments()
    shape([1.0, 3.0], ["length", "length"], penalty=100.0, normalize=True, moments=moments)
    assert moments.mean == 2.0


def test_wrong_lengths_and_nan_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must have shape \(1,\)"):
        shape([1.0, 2.0], ["eos"])
    with pytest.raises(ValueError, match="must be finite"):
        shape([1.0, float("nan")], ["eos", "eos"])
