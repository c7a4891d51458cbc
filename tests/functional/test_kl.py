import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.functional import AdaptiveBeta, kl_estimate, kl_shaped_rewards

NAN = float("nan")


def shape_by_hand(scores, kl, mask, beta):
    """Plain loops in float64."""
    rows = []
    for score, row_kl, row_mask in zip(scores, kl, mask, strict=True):
        row = [-beta * k if valid else 0.0 for k, valid in zip(row_kl, row_mask, strict=True)]
        valid_steps = [t for t, valid in enumerate(row_mask) if valid]
        if valid_steps:
            row[valid_steps[-1]] += score
        rows.append(row)
    return rows


class TestEstimate:
    @pytest.mark.parametrize(
        ("kind", "expected"), [("k1", [0.5, -0.2]), ("k2", [0.125, 0.02]), ("k3", [0.106531, 0.021403])]
    )
    def test_by_hand(self, kind, expected):
        kl = kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.8]), kind=kind)
        assert kl.tolist() == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("kind", ["k1", "k3"])
    def test_unbiased(self, kind):
        p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.2, 0.6]).log()
        exact = (p.exp() * (p - q)).sum()
        torch.testing.assert_close((p.exp() * kl_estimate(p, q, kind=kind)).sum(), exact)

    def test_as_a_loss_k2_is_a_leash_and_k3_the_reversed_one_and_k1_none(self):
        logits, q = torch.tensor([0.4, -0.3, 0.9], requires_grad=True), torch.tensor([0.2, 0.2, 0.6]).log()
        p = logits.log_softmax(0)
        (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
        by = {
            kind: torch.autograd.grad(
                (p.detach().exp() * kl_estimate(p, q, kind=kind)).sum(), logits, retain_graph=True
            )
            for kind in ("k1", "k2", "k3")
        }
        torch.testing.assert_close(by["k2"][0], exact)
        torch.testing.assert_close(by["k1"][0], torch.zeros(3))
        (reversed_,) = torch.autograd.grad((q.exp() * (q - p)).sum(), logits)
        torch.testing.assert_close(by["k3"][0], reversed_)

    def test_extremes_stay_finite_and_nan_shows(self):
        far = kl_estimate(torch.tensor([-200.0, 0.0, NAN]), torch.tensor([0.0, -200.0, 0.0]), kind="k3")
        assert far[0].item() == pytest.approx(math.exp(20) - 201, rel=1e-6)
        assert far[1].item() == pytest.approx(199.0)
        assert far[2].isnan()

    def test_low_precision_in_float32_out(self):
        assert kl_estimate(torch.ones(1).bfloat16(), torch.ones(1).bfloat16()).dtype == torch.float32

    def test_errors(self):
        with pytest.raises(ValueError, match="kind must be k1, k2 or k3; got 'kl'"):
            kl_estimate(torch.ones(2), torch.ones(2), kind="kl")
        with pytest.raises(ValueError, match=r"ref_logprobs must have shape \(2,\); got \(3,\)"):
            kl_estimate(torch.ones(2), torch.ones(3))


class TestShapedRewards:
    def test_the_walkthroughs_example(self):
        # Score 1, pi 0.9, reference 0.3, beta 0.2: log ratio 1.0986, penalty 0.2197, reward 0.7803.
        kl = kl_estimate(torch.tensor([[math.log(0.9)]]), torch.tensor([[math.log(0.3)]]))
        assert kl.item() == pytest.approx(1.0986, abs=1e-4)
        reward = kl_shaped_rewards(torch.tensor([1.0]), kl=kl, mask=torch.tensor([[True]]), beta=0.2)
        assert reward.item() == pytest.approx(0.7803, abs=1e-4)

    def test_penalty_has_the_sign_of_minus_kl(self):
        kl = torch.tensor([[0.5, -0.2]])
        rewards = kl_shaped_rewards(
            torch.tensor([0.0]), kl=kl, mask=torch.ones(1, 2, dtype=torch.bool), beta=0.1
        )
        assert rewards[0].tolist() == pytest.approx([-0.05, 0.02])

    def test_score_sits_on_the_last_valid_token(self):
        mask = torch.tensor([[True, True, True, False, False], [True] * 5, [False] * 5])
        kl = torch.zeros(3, 5).masked_fill(~mask, NAN)
        rewards = kl_shaped_rewards(torch.tensor([1.0, 2.0, NAN]), kl=kl, mask=mask, beta=1.0)
        assert rewards.nonzero().tolist() == [[0, 2], [1, 4]]
        assert rewards[0, 2].item() == 1.0 and rewards[1, 4].item() == 2.0

    def test_errors(self):
        with pytest.raises(ValueError, match="bool"):
            kl_shaped_rewards(torch.ones(1), kl=torch.ones(1, 2), mask=torch.ones(1, 2), beta=0.1)
        with pytest.raises(ValueError, match=r"scores must have shape \(1,\); got \(2,\)"):
            kl_shaped_rewards(torch.ones(2), kl=torch.ones(1, 2), mask=torch.ones(1, 2).bool(), beta=0.1)

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), width=st.integers(1, 7))
    def test_agrees_with_plain_loops_and_keeps_its_promises(self, seed, rows, width):
        g = torch.Generator().manual_seed(seed)
        scores, kl = torch.randn(rows, generator=g), torch.randn(rows, width, generator=g)
        mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=g)
        rewards = kl_shaped_rewards(scores, kl=kl, mask=mask, beta=0.3)
        by_hand = shape_by_hand(scores.tolist(), kl.tolist(), mask.tolist(), 0.3)
        torch.testing.assert_close(rewards.double(), torch.tensor(by_hand).double(), rtol=1e-6, atol=1e-6)
        for garbage in (NAN, math.inf, 1e30):
            dirty = kl_shaped_rewards(scores, kl=kl.masked_fill(~mask, garbage), mask=mask, beta=0.3)
            assert torch.equal(dirty, rewards)
        order = torch.randperm(rows, generator=g)
        permuted = kl_shaped_rewards(scores[order], kl=kl[order], mask=mask[order], beta=0.3)
        assert torch.equal(permuted, rewards[order])


class TestAdaptiveBeta:
    def test_steps_and_resume(self):
        controller = AdaptiveBeta(0.2, target=6, horizon=10_000)
        assert controller.update(12.0, 64) == pytest.approx(0.200256)
        for _ in range(49):
            controller.update(12.0, 64)
        resumed = AdaptiveBeta(0.2, target=6, horizon=10_000)
        resumed.load_state_dict(controller.state_dict())
        for _ in range(50):
            resumed.update(12.0, 64)
        assert resumed.beta == pytest.approx(0.227292, abs=1e-6)

    def test_direction_and_small_errors(self):
        controller = AdaptiveBeta(1.0, target=10, horizon=100)
        assert controller.update(9.0, 50) == pytest.approx(1 - 0.1 * 0.5)
        assert AdaptiveBeta(1.0, target=10, horizon=100).update(-5.0, 50) == pytest.approx(0.9)

    def test_more_responses_than_the_horizon_cannot_turn_the_sign(self):
        assert AdaptiveBeta(1.0, target=10, horizon=10).update(0.0, 1000) == pytest.approx(0.8)

    def test_fixed_means_fixed(self):
        controller = AdaptiveBeta(0.2, target=None, horizon=10_000)
        assert controller.update(12.0, 64) == 0.2
        controller.load_state_dict({"beta": 5.0})
        assert controller.beta == 0.2

    def test_errors(self):
        for arguments, sentence in [
            ({"beta": -1.0, "target": 6, "horizon": 1}, "beta must be at least 0; got -1"),
            ({"beta": 0.1, "target": 0, "horizon": 1}, "target must be above 0"),
            ({"beta": 0.1, "target": 6, "horizon": 0}, "horizon must be above 0"),
        ]:
            beta = arguments.pop("beta")
            with pytest.raises(ValueError, match=sentence):
                AdaptiveBeta(beta, **arguments)
        controller = AdaptiveBeta(0.2, target=6, horizon=10)
        with pytest.raises(ValueError, match="kl must be finite; got nan"):
            controller.update(NAN, 64)
        assert controller.beta == 0.2
