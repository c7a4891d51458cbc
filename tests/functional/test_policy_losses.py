import math

import pytest
import torch

from rlhf_lightning.functional import clipped_surrogate_loss, clipped_value_loss

NAN = float("nan")


def one(ratio, advantage, **keywords):
    """Surrogate loss of a single token and the gradient with respect to the ratio."""
    lp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    loss, stats = clipped_surrogate_loss(
        lp,
        old_logprobs=zero,
        advantages=torch.full_like(zero, advantage),
        mask=torch.ones(1, 1, dtype=torch.bool),
        **{"clip": 0.2} | keywords,
    )
    loss.backward()
    return loss.item(), lp.grad.item() / ratio, stats


def one_value(value, target, old=1.0, clip=0.2):
    v = torch.tensor([[value]], requires_grad=True)
    loss, stats = clipped_value_loss(
        v,
        old_values=torch.tensor([[old]]),
        returns=torch.tensor([[target]]),
        mask=torch.tensor([[True]]),
        clip=clip,
    )
    loss.backward()
    return loss.item(), v.grad.item(), stats


def batch(seed, rows, width):
    g = torch.Generator().manual_seed(seed)
    new, old, other = torch.randn(3, rows, width, generator=g) * 0.4
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=g)
    return new, old, other, mask


class TestSurrogate:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "surrogate", "slope"),
        [
            (1.6, 2.0, 2.4, 0.0),  # good token past the band: flat
            (0.5, -3.0, -2.4, 0.0),  # bad token, already pushed down past 1 - eps: flat
            (0.9, -3.0, -2.7, -3.0),  # bad token inside the band: still falls
            (1.5, 1.0, 1.2, 0.0),
            (1.5, -1.0, -1.5, -1.0),  # bad token gone up: the way back is never blocked
            (0.5, 1.0, 0.5, 1.0),  # good token gone down: the way back is never blocked
            (0.5, -1.0, -0.8, 0.0),
            (1.0, 2.0, 2.0, 2.0),
        ],
    )
    def test_value_and_slope_by_hand(self, ratio, advantage, surrogate, slope):
        loss, gradient, stats = one(ratio, advantage)
        assert loss == pytest.approx(-surrogate)
        assert -gradient == pytest.approx(slope)
        assert stats.clipped_count.item() == (slope == 0)

    def test_clip_high_is_the_upper_side_alone(self):
        assert one(1.6, 2.0, clip_high=0.5)[0] == pytest.approx(-3.0)
        assert one(0.5, -3.0, clip_high=0.5)[0] == pytest.approx(2.4)

    def test_dual_clip_bounds_bad_tokens_alone(self):
        loss, gradient, stats = one(5.0, -1.0, dual_clip=3.0)
        assert (loss, gradient, stats.clipped_count.item()) == (pytest.approx(3.0), 0.0, 1)
        assert one(2.0, -1.0, dual_clip=3.0)[:2] == (pytest.approx(2.0), pytest.approx(1.0))
        assert one(5.0, 1.0, dual_clip=3.0)[0] == pytest.approx(-1.2)
        assert one(1.1, 1.0, dual_clip=3.0)[2].clipped_count.item() == 0

    def test_ratio_one_is_minus_the_mean_advantage(self):
        new, _, advantages, mask = batch(0, 3, 5)
        mask[0, 0] = True
        new = new.requires_grad_()
        loss, stats = clipped_surrogate_loss(
            new, old_logprobs=new.detach(), advantages=advantages, mask=mask, clip=0.2
        )
        loss.backward()
        torch.testing.assert_close(loss, -advantages[mask].mean())
        # ... and its gradient is that of plain policy gradient.
        torch.testing.assert_close(new.grad, torch.where(mask, -advantages, 0.0) / mask.sum())
        assert (stats.ratio_mean, stats.ratio_max, stats.clip_fraction, stats.approx_kl) == (1, 1, 0, 0)

    def test_far_log_ratios_stay_finite_and_are_counted(self):
        loss, gradient, stats = one(math.exp(100), 0.0)
        assert (loss, gradient) == (0, 0)
        assert stats.clamped_count.item() == 1
        loss, gradient, stats = one(math.exp(100), -1.0)
        assert loss == pytest.approx(4.8517e8, rel=1e-4)
        assert math.isfinite(gradient) and all(math.isfinite(x) for x in stats)
        assert one(math.exp(-100), 1.0)[2].clamped_count.item() == 1
        assert one(math.exp(19), 1.0)[2].clamped_count.item() == 0

    def test_stats_by_hand(self):
        new = torch.tensor([[1.6, 0.5, 1.0, 7.0]]).log()
        loss, stats = clipped_surrogate_loss(
            new.requires_grad_(),
            old_logprobs=torch.zeros(1, 4),
            advantages=torch.tensor([[2.0, -3.0, 1.0, 1.0]]),
            mask=torch.tensor([[True, True, True, False]]),
            clip=0.2,
        )
        assert loss.item() == pytest.approx((-2.4 + 2.4 - 1.0) / 3)
        assert not any(x.requires_grad for x in stats)
        assert stats.ratio_sum.item() == pytest.approx(3.1)
        assert stats.ratio_mean.item() == pytest.approx(3.1 / 3)
        assert stats.ratio_max.item() == pytest.approx(1.6)
        assert stats.clip_fraction.item() == pytest.approx(2 / 3)
        expected = (0.6 - math.log(1.6)) + (-0.5 - math.log(0.5))
        assert stats.approx_kl_sum.item() == pytest.approx(expected)
        assert stats.approx_kl.item() == pytest.approx(expected / 3)
        assert stats.count.item() == 3

    @pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
    def test_nothing_valid(self, shape):
        x = torch.full(shape, NAN, requires_grad=True)
        mask = torch.zeros(shape, dtype=torch.bool)
        for denominator in (None, 0, torch.tensor(0)):
            loss, stats = clipped_surrogate_loss(
                x, old_logprobs=x, advantages=x, mask=mask, clip=0.2, denominator=denominator
            )
            loss.backward()
            assert loss.item() == 0 and not any(stats) and stats.ratio_mean == 0
            assert not x.grad.any()

    @pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages"])
    def test_nan_in_a_valid_cell_shows(self, name):
        inputs = {key: torch.zeros(1, 2) for key in ("logprobs", "old_logprobs", "advantages")}
        inputs[name][0, 0] = NAN
        lp = inputs.pop("logprobs")
        loss, stats = clipped_surrogate_loss(lp, **inputs, mask=torch.ones(1, 2, dtype=torch.bool), clip=0.2)
        assert loss.isnan()
        assert name == "advantages" or (stats.ratio_max.isnan() and stats.approx_kl.isnan())

    def test_ratio_in_float32_whatever_the_dtype(self):
        lp = torch.tensor([[-7.3]]).bfloat16()
        loss, stats = clipped_surrogate_loss(
            lp, old_logprobs=lp, advantages=torch.ones(1, 1), mask=torch.tensor([[True]]), clip=0.2
        )
        assert loss.dtype == torch.float32 and stats.ratio_max.item() == 1

    def test_errors(self):
        x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
        good = {"old_logprobs": x, "advantages": x, "mask": mask, "clip": 0.2}
        for change, sentence in [
            ({"mask": x, "advantages": mask}, "mask must be a bool tensor"),
            ({"mask": mask[:, :1]}, r"logprobs must have the mask's shape \(1, 1\); got \(1, 2\)"),
            ({"advantages": x[:, :1]}, "advantages must have the mask's shape"),
            ({"clip": 0.0}, "clip must lie between 0 and 1; got 0"),
            ({"clip_high": -0.1}, "clip_high must be above 0"),
            ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ]:
            with pytest.raises(ValueError, match=sentence):
                clipped_surrogate_loss(x, **good | change)
        with pytest.raises(TypeError):
            clipped_surrogate_loss(x, x, x, mask, 0.2)

    def test_gradcheck(self):
        new, old, advantages, mask = (x if x.dtype == torch.bool else x.double() for x in batch(3, 3, 4))
        rest = {"old_logprobs": old, "advantages": advantages, "mask": mask, "clip": 0.2, "dual_clip": 1.1}
        assert torch.autograd.gradcheck(
            lambda x: clipped_surrogate_loss(x, **rest)[0], (new.requires_grad_(),)
        )


class TestValue:
    @pytest.mark.parametrize(
        ("value", "target", "squared", "slope"),
        [(2.0, 3.0, 3.24, 0.0), (2.0, 0.0, 4.0, 2.0), (1.1, 3.0, 1.9**2, -1.9), (0.0, 3.0, 9.0, -3.0)],
    )
    def test_the_larger_error_by_hand(self, value, target, squared, slope):
        loss, gradient, stats = one_value(value, target)
        assert loss == pytest.approx(0.5 * squared)
        assert gradient == pytest.approx(slope)
        assert stats.clip_fraction.item() == (slope == 0)
        assert stats.error.item() == pytest.approx((value - target) ** 2)

    def test_without_clip(self):
        loss, gradient, stats = one_value(2.0, 3.0, clip=None)
        assert (loss, gradient, stats.clipped_count.item()) == (0.5, -1.0, 0)

    def test_nothing_valid_and_nan(self):
        x, mask = torch.full((1, 2), NAN, requires_grad=True), torch.zeros(1, 2, dtype=torch.bool)
        loss, stats = clipped_value_loss(x, old_values=x, returns=x, mask=mask, clip=0.2)
        loss.backward()
        assert loss.item() == 0 and not any(stats) and not x.grad.any()
        mask[0, 0] = True
        assert clipped_value_loss(x, old_values=x, returns=x, mask=mask, clip=0.2)[0].isnan()

    def test_errors(self):
        x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
        with pytest.raises(ValueError, match="mask must be a bool tensor"):
            clipped_value_loss(x, old_values=x, returns=mask, mask=x)
        with pytest.raises(ValueError, match="returns must have the mask's shape"):
            clipped_value_loss(x, old_values=x, returns=x[:, :1], mask=mask)
        with pytest.raises(ValueError, match="clip must be above 0; got 0"):
            clipped_value_loss(x, old_values=x, returns=x, mask=mask, clip=0.0)

    def test_gradcheck(self):
        new, old, returns, mask = (x.double() if x.is_floating_point() else x for x in batch(4, 3, 4))
        rest = {"old_values": old, "returns": returns, "mask": mask, "clip": 0.2}
        assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, **rest)[0], (new.requires_grad_(),))


class TestDenominator:
    def test_sums_over_the_tokens_of_the_whole_step(self):
        # Micro-batch A: 4 tokens of loss 1; B: 1 token of loss 5. (4 + 5) / 5 = 1.8; a mean of means gives 3.
        total = 0.0
        for tokens, each in ((4, 1.0), (1, 5.0)):
            zero = torch.zeros(1, tokens)
            loss, _ = clipped_surrogate_loss(
                zero,
                old_logprobs=zero,
                advantages=zero - each,
                mask=zero == 0,
                clip=0.2,
                denominator=5,
            )
            total += loss.item()
        assert total == pytest.approx(1.8)

    def test_may_be_below_one(self):
        # One valid token over two ranks whose gradients are averaged: each divides by 1 / 2.
        one_cell = torch.ones(1, 1)
        loss, _ = clipped_value_loss(
            one_cell, old_values=one_cell, returns=one_cell - 1, mask=one_cell == 1, denominator=0.5
        )
        assert loss.item() == 1.0


class TestRatioOfTheSequence:
    """Log-ratios (ln 4, 0) and (-ln 2): the responses have ratios 2 and 1/2, the tokens 4, 1 and 1/2."""

    MASK = torch.tensor([[True, True], [True, False]])
    GAINS = torch.tensor([[1.0, 1.0], [-1.0, NAN]])

    def loss(self, gains=GAINS, **keywords):
        logprobs = torch.tensor([[math.log(4.0), 0.0], [-math.log(2.0), NAN]], requires_grad=True)
        settings = {"clip": 0.2, "clip_high": 4.0, "ratio_of": "sequence"} | keywords
        loss, stats = clipped_surrogate_loss(
            logprobs, old_logprobs=torch.zeros(2, 2), advantages=gains, mask=self.MASK, **settings
        )
        loss.backward()
        return loss.item(), logprobs.grad, stats

    def test_by_hand(self):
        # 2 + 2 of the first; of the second min(-1/2, -0.8), which the clip holds. Three tokens.
        loss, gradient, stats = self.loss()
        assert loss == pytest.approx(-3.2 / 3)
        # d(2 r)/d log pi_t = 2 r / 2 = 2, for both tokens alike.
        assert gradient.tolist() == [pytest.approx([-2 / 3, -2 / 3]), [0, 0]]
        assert (stats.ratio_sum.item(), stats.ratio_max.item()) == pytest.approx((4.5, 2.0))
        assert (stats.clipped_count.item(), stats.count.item()) == (1, 3)
        # The KL stays that of the tokens.
        k3 = (4 - 1 - math.log(4)) + (0.5 - 1 + math.log(2))
        assert stats.approx_kl_sum.item() == pytest.approx(k3, rel=1e-6)

    def test_the_gradient_reaches_a_token_without_advantage_of_its_own(self):
        gains = torch.tensor([[0.0, 3.0], [0.0, 0.0]])
        _, gradient, _ = self.loss(gains)
        assert gradient[0].tolist() == pytest.approx([-1.0, -1.0])  # 3 r / 2 tokens / 3
        _, gradient, _ = self.loss(gains, ratio_of="token")
        assert gradient[0].tolist() == pytest.approx([0.0, -1.0])  # its own ratio is 1

    def test_with_the_mean_over_each_response_it_is_gspo(self):
        # (2 * 1 + 0.8 * -1) / 2 responses
        loss, _, _ = self.loss(weights=torch.tensor([1 / 2, 1.0]), denominator=2)
        assert loss == pytest.approx(-0.6)

    def test_a_response_of_one_token_is_its_token(self):
        logprobs = torch.tensor([[0.3], [-0.1]])
        both = [
            clipped_surrogate_loss(
                logprobs, old_logprobs=0 * logprobs, advantages=torch.tensor([[1.0], [-2.0]]),
                mask=torch.ones(2, 1).bool(), clip=0.2, ratio_of=kind,
            )
            for kind in ("token", "sequence")
        ]  # fmt: skip
        assert both[0][0] == both[1][0] and both[0][1] == both[1][1]


def test_weights_must_be_one_a_response():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"weights must have shape \(2,\); got \(3,\)"):
        clipped_surrogate_loss(x, old_logprobs=x, advantages=x, mask=x == 0, clip=0.2, weights=torch.ones(3))
