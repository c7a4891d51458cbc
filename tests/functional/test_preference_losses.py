import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.functional import bradley_terry_loss, dpo_loss


def pair(*numbers):
    return [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in numbers]


class TestBradleyTerry:
    def test_by_hand(self):
        # Leads 0 and ln 3: -log sigmoid is ln 2 and ln 4/3.
        chosen, rejected = torch.tensor([1.0, math.log(3)]), torch.tensor([1.0, 0.0])
        loss, stats = bradley_terry_loss(chosen, rejected)
        assert loss.item() == pytest.approx((math.log(2) + math.log(4 / 3)) / 2)
        assert stats.accuracy.item() == 0.5  # a tie is not a win
        assert stats.margin.item() == pytest.approx(math.log(3) / 2)
        assert stats.count.item() == 2

    def test_a_margin_must_be_beaten(self):
        chosen, rejected = torch.tensor([math.log(3)]), torch.tensor([0.0])
        loss, _ = bradley_terry_loss(chosen, rejected, margin=torch.tensor([math.log(3)]))
        assert loss.item() == pytest.approx(math.log(2))

    def test_far_apart_stays_finite(self):
        for lead in (1e4, -1e4):
            chosen = torch.tensor([lead], requires_grad=True)
            loss, _ = bradley_terry_loss(chosen, torch.zeros(1))
            loss.backward()
            assert loss.item() == max(-lead, 0.0) and chosen.grad.isfinite().all()

    def test_empty_and_low_precision(self):
        assert bradley_terry_loss(torch.zeros(0), torch.zeros(0))[0].item() == 0
        assert (
            bradley_terry_loss(torch.ones(1).bfloat16(), torch.ones(1).bfloat16())[0].dtype == torch.float32
        )

    def test_errors(self):
        with pytest.raises(ValueError, match=r"rejected must have shape \(2,\); got \(2, 1\)"):
            bradley_terry_loss(torch.zeros(2), torch.zeros(2, 1))
        with pytest.raises(ValueError, match="margin must have shape"):
            bradley_terry_loss(torch.zeros(2), torch.zeros(2), margin=torch.zeros(1))

    def test_gradcheck(self):
        assert torch.autograd.gradcheck(lambda c, r: bradley_terry_loss(c, r)[0], pair(0.3, -0.4))


class TestDPO:
    def test_untrained_policy_knows_nothing(self):
        lp, other = torch.tensor([-3.0]), torch.tensor([-5.0])
        loss, stats = dpo_loss(lp, other, ref_chosen=lp, ref_rejected=other, beta=0.1)
        assert loss.item() == pytest.approx(math.log(2))
        assert (stats.accuracy, stats.margin) == (0, 0)

    def test_by_hand(self):
        # h = (-1 + 2) - (-4 + 3) = 2, beta h = ln 3: -log sigmoid(ln 3) = ln 4/3, -log sigmoid(-ln 3) = ln 4.
        inputs, beta = [torch.tensor([x]) for x in (-1.0, -4.0, -2.0, -3.0)], math.log(3) / 2
        reference = {"ref_chosen": inputs[2], "ref_rejected": inputs[3]}
        loss, stats = dpo_loss(*inputs[:2], **reference, beta=beta)
        assert loss.item() == pytest.approx(math.log(4 / 3))
        assert stats.chosen_sum.item() == pytest.approx(beta)
        assert stats.rejected_sum.item() == pytest.approx(-beta)
        assert stats.accuracy.item() == 1
        smooth, _ = dpo_loss(*inputs[:2], **reference, beta=beta, label_smoothing=0.25)
        assert smooth.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
        ipo, _ = dpo_loss(*inputs[:2], **reference, beta=0.5, kind="ipo")
        assert ipo.item() == pytest.approx((2 - 1) ** 2)

    def test_is_bradley_terry_on_implicit_rewards(self):
        a, b, c, d = torch.randn(4, 5)
        ours = dpo_loss(a, b, ref_chosen=c, ref_rejected=d, beta=0.3)
        torch.testing.assert_close(ours, bradley_terry_loss(0.3 * (a - c), 0.3 * (b - d)))

    def test_errors(self):
        x = torch.zeros(2)
        good = {"ref_chosen": x, "ref_rejected": x, "beta": 0.1}
        for change, sentence in [
            ({"beta": 0.0}, "beta must be above 0; got 0"),
            ({"label_smoothing": 0.5}, r"label_smoothing must lie in \[0, 0.5\); got 0.5"),
            ({"label_smoothing": 0.1, "kind": "ipo"}, "no meaning with kind=ipo"),
            ({"kind": "hinge"}, "kind must be sigmoid or ipo; got 'hinge'"),
            ({"ref_chosen": x[:1]}, "ref_chosen must have shape"),
        ]:
            with pytest.raises(ValueError, match=sentence):
                dpo_loss(x, x, **good | change)

    @pytest.mark.parametrize("keywords", [{}, {"label_smoothing": 0.1}, {"kind": "ipo"}])
    def test_gradcheck(self, keywords):
        a, b = (x.detach() for x in pair(-2.0, -1.5))

        def call(chosen, rejected):
            return dpo_loss(chosen, rejected, ref_chosen=a, ref_rejected=b, beta=0.2, **keywords)[0]

        assert torch.autograd.gradcheck(call, pair(-1.2, -2.2))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    kind=st.sampled_from(["bradley_terry", "sigmoid", "ipo"]),
)
def test_order_and_micro_batches_change_nothing(seed, rows, kind):
    g = torch.Generator().manual_seed(seed)
    data = torch.randn(4, rows, generator=g)

    def call(chosen, rejected, ref_chosen, ref_rejected, denominator=None):
        if kind == "bradley_terry":
            return bradley_terry_loss(chosen, rejected, margin=ref_chosen, denominator=denominator)
        reference = {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
        return dpo_loss(chosen, rejected, **reference, beta=0.7, kind=kind, denominator=denominator)

    whole, split = data.clone().requires_grad_(), data.clone().requires_grad_()
    loss, stats = call(*whole)
    loss.backward()
    merged = None
    for part in torch.randperm(rows, generator=g).tensor_split([rows // 2]):
        partial, figures = call(*split[:, part], denominator=rows)
        partial.backward()
        merged = figures if merged is None else merged.merge(figures)
    torch.testing.assert_close(split.grad[:2], whole.grad[:2])
    torch.testing.assert_close(torch.stack(merged), torch.stack(stats), rtol=1e-5, atol=1e-6)
