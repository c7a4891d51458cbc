import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.advantages import RunningBaseline, grpo, per_token, reinforce, rloo

SCORES = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])


class TestRloo:
    def test_the_others_of_the_group_are_the_baseline(self):
        assert rloo(SCORES, group_size=3).tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0]

    def test_is_the_centred_score_stretched(self):
        centred = grpo(SCORES, group_size=3, scale=False)
        torch.testing.assert_close(rloo(SCORES, group_size=3), centred * 3 / 2)

    def test_two_answers_are_each_others_baseline(self):
        scores = torch.tensor([1.0, 4.0, -2.0, -2.5])
        assert rloo(scores, group_size=2).tolist() == [-3.0, 3.0, 0.5, -0.5]


class TestGrpo:
    def test_by_hand(self):
        # Mean 3, sample variance (4 + 1 + 9) / 2.
        std = math.sqrt(14 / 2) + 1e-4
        assert grpo(SCORES, group_size=3).tolist() == pytest.approx([-2 / std, -1 / std, 3 / std, 0, 0, 0])
        assert grpo(SCORES, group_size=3, scale=False).tolist() == [-2, -1, 3, 0, 0, 0]

    @pytest.mark.parametrize("constant", [0.1, -7.3, 12345.678])
    def test_a_group_without_spread_is_not_blown_up(self, constant):
        assert not grpo(torch.full((7,), constant), group_size=7).any()


class TestReinforce:
    def test_baselines(self):
        scores = torch.tensor([1.0, 3.0])
        assert reinforce(scores).tolist() == [-1.0, 1.0]
        assert reinforce(scores, baseline=0.5).tolist() == [0.5, 2.5]
        assert reinforce(scores, baseline=torch.tensor(0.5)).tolist() == [0.5, 2.5]
        assert reinforce(scores, baseline=torch.tensor([1.0, 1.0])).tolist() == [0.0, 2.0]

    def test_errors(self):
        with pytest.raises(ValueError, match=r"baseline must be a number or have shape \(2,\); got \(2, 1\)"):
            reinforce(torch.zeros(2), baseline=torch.zeros(2, 1))
        with pytest.raises(ValueError, match=r"scores must have shape \(B,\); got \(2, 1\)"):
            reinforce(torch.zeros(2, 1))


class TestRunningBaseline:
    def test_by_hand(self):
        baseline = RunningBaseline()
        assert baseline.value is None
        found = []
        for scores in ([1.0, 3.0], [5.0, 7.0], [0.0, 0.0]):
            baseline.update(torch.tensor(scores), decay=0.75)
            found.append(baseline.value)
        # 2; 0.75 * 2 + 0.25 * 6 = 3; 0.75 * 3
        assert found == [2.0, 3.0, 2.25]

    def test_travels_through_a_checkpoint(self):
        one, two = RunningBaseline(), RunningBaseline()
        two.load_state_dict(one.state_dict())
        assert two.value is None
        one.update(torch.tensor([1.5]), decay=0.5)
        two.load_state_dict(one.state_dict())
        assert two.value == 1.5

    def test_a_score_that_is_not_finite_is_refused_and_leaves_it_as_it_was(self):
        baseline = RunningBaseline()
        baseline.update(torch.tensor([1.0]), decay=0.5)
        for bad in ([math.nan, 1.0], [math.inf], []):
            with pytest.raises(ValueError, match="the mean of the scores must be finite"):
                baseline.update(torch.tensor(bad), decay=0.5)
        assert baseline.value == 1.0


class TestPerToken:
    def test_every_valid_token_and_no_other(self):
        mask = torch.tensor([[True, False], [True, True], [False, False]])
        spread = per_token(torch.tensor([1.0, 2.0, float("nan")]), mask)
        assert spread.tolist() == [[1, 0], [2, 2], [0, 0]]

    def test_errors(self):
        with pytest.raises(ValueError, match="bool"):
            per_token(torch.zeros(2), torch.ones(2, 3))
        with pytest.raises(ValueError, match=r"advantages must have shape \(2,\); got \(3,\)"):
            per_token(torch.zeros(3), torch.ones(2, 3).bool())


@pytest.mark.parametrize("estimator", [rloo, grpo])
class TestGroups:
    def test_errors(self, estimator):
        with pytest.raises(ValueError, match="group_size must divide the number of scores; got 4 and 6"):
            estimator(SCORES, group_size=4)
        with pytest.raises(ValueError, match=r"group_size must be at least 2.*got 1"):
            estimator(SCORES, group_size=1)
        with pytest.raises(ValueError, match=r"scores must have shape \(B,\); got \(2, 3\)"):
            estimator(SCORES.view(2, 3), group_size=3)

    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 2**31), groups=st.integers(1, 4), size=st.integers(2, 5))
    def test_promises(self, estimator, seed, groups, size):
        g = torch.Generator().manual_seed(seed)
        scores = torch.randn(groups, size, generator=g, dtype=torch.float64)
        found = estimator(scores.flatten(), group_size=size).view(groups, size)
        torch.testing.assert_close(found.sum(dim=1), torch.zeros(groups).double(), atol=1e-9, rtol=0)
        # What a prompt is worth in itself cancels, and so do other groups and the order of the answers.
        shifted = scores + torch.randn(groups, 1, generator=g)
        torch.testing.assert_close(estimator(shifted.flatten(), group_size=size).view(groups, size), found)
        order, inner = torch.randperm(groups, generator=g), torch.randperm(size, generator=g)
        permuted = estimator(scores[order][:, inner].flatten(), group_size=size).view(groups, size)
        torch.testing.assert_close(permuted, found[order][:, inner])

    def test_one_bad_score_stays_in_its_group(self, estimator):
        scores = SCORES.clone()
        scores[1] = float("nan")
        found = estimator(scores, group_size=3)
        assert found[:3].isnan().all()
        assert found[3:].isfinite().all()
