import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.functional import RunningMoments


def test_scores_around_sixty():
    moments, scores = RunningMoments(), torch.tensor([60.0, 62.0])
    moments.update(scores)
    assert (moments.mean, moments.std) == (61.0, 1.0)
    assert moments.normalize(scores).tolist() == [-1.0, 1.0]


def test_before_there_is_a_spread_scores_are_only_centred():
    moments = RunningMoments()
    moments.update(torch.zeros(0))
    assert moments.normalize(torch.tensor([5.0])).tolist() == [5.0]
    moments.update(torch.tensor([60.0]))
    assert moments.normalize(torch.tensor([60.0, 61.0])).tolist() == [0.0, 1.0]
    moments.update(torch.full((9,), 60.0))
    assert moments.normalize(torch.tensor([60.0, 61.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_score_is_refused_and_leaves_no_trace(bad):
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 3.0]))
    before = moments.state_dict()
    with pytest.raises(ValueError, match=f"row 1 is {bad}"):
        moments.update(torch.tensor([1.0, bad, 3.0]))
    assert moments.state_dict() == before


def test_state_survives_json_exactly():
    moments, resumed = RunningMoments(), RunningMoments()
    moments.update(torch.randn(7))
    resumed.load_state_dict(json.loads(json.dumps(moments.state_dict())))
    for each in (moments, resumed):
        each.update(torch.tensor([0.1, 0.2]))
    assert resumed.state_dict() == moments.state_dict()


def test_dtypes():
    moments = RunningMoments()
    moments.update(torch.tensor([1, 3]))
    assert moments.normalize(torch.tensor([1, 3])).dtype == torch.float32
    assert moments.normalize(torch.tensor([1.0]).double()).dtype == torch.float64


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    cuts=st.lists(st.integers(0, 20), max_size=4),
    offset=st.sampled_from([0.0, 1e6]),
)
def test_batches_add_up_to_the_whole(seed, cuts, offset):
    x = torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    moments = RunningMoments()
    for part in x.tensor_split(sorted(cuts)):
        moments.update(part)
    assert moments.count == 20
    assert moments.mean == pytest.approx(x.mean().item())
    assert moments.std == pytest.approx(x.std(correction=0).item(), rel=1e-6)
