"""The clipped losses against plain float64 loops, and the promises that hold for any batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.functional import clipped_surrogate_loss, clipped_value_loss

NAN, INF = float("nan"), float("inf")


def batch(seed, rows, width):
    g = torch.Generator().manual_seed(seed)
    new, old, other = torch.randn(3, rows, width, generator=g) * 0.4
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=g)
    return new, old, other, mask


def surrogate_by_hand(new, old, advantages, mask, low, high, dual):
    """Plain loops in float64."""
    total, count = 0.0, 0
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if mask[b][t]:
                ratio, gain = math.exp(new[b][t] - old[b][t]), advantages[b][t]
                term = min(ratio * gain, min(max(ratio, 1 - low), 1 + high) * gain)
                if dual is not None and gain < 0:
                    term = max(term, dual * gain)
                total, count = total + term, count + 1
    return -total / max(count, 1)


def value_by_hand(values, old, returns, mask, clip):
    """Plain loops in float64."""
    total, count = 0.0, 0
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if mask[b][t]:
                v, o, r = values[b][t], old[b][t], returns[b][t]
                errors = [(v - r) ** 2]
                if clip is not None:
                    errors.append((min(max(v, o - clip), o + clip) - r) ** 2)
                total, count = total + 0.5 * max(errors), count + 1
    return total / max(count, 1)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    width=st.integers(1, 6),
    clips=st.sampled_from([(0.2, None, None), (0.1, 0.3, None), (0.2, 0.4, 1.3), (0.05, None, 1.01)]),
    value_clip=st.sampled_from([None, 0.05, 0.3]),
)
def test_both_losses_against_plain_loops_and_their_promises(seed, rows, width, clips, value_clip):
    new, old, other, mask = batch(seed, rows, width)
    low, high, dual = clips

    def surrogate(new, old, other, mask, denominator=None):
        rest = {"clip": low, "clip_high": high, "dual_clip": dual, "denominator": denominator}
        return clipped_surrogate_loss(new, old_logprobs=old, advantages=other, mask=mask, **rest)

    def value(new, old, other, mask, denominator=None):
        return clipped_value_loss(
            new, old_values=old, returns=other, mask=mask, clip=value_clip, denominator=denominator
        )

    lists = [x.tolist() for x in (new, old, other, mask)]
    for function, by_hand in (
        (surrogate, surrogate_by_hand(*lists, low, low if high is None else high, dual)),
        (value, value_by_hand(*lists, value_clip)),
    ):
        whole = new.clone().requires_grad_()
        loss, stats = function(whole, old, other, mask)
        loss.backward()
        assert loss.item() == pytest.approx(by_hand, rel=1e-6, abs=1e-6)

        for garbage in (NAN, INF, -INF, 1e30):
            dirty = [x.masked_fill(~mask, garbage) for x in (new, old, other)]
            dirty[0].requires_grad_()
            dirty_loss, dirty_stats = function(*dirty, mask)
            dirty_loss.backward()
            assert torch.equal(dirty_loss, loss) and dirty_stats == stats
            assert torch.equal(dirty[0].grad, whole.grad)

        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(rows, generator=generator)
        cuts = sorted(torch.randint(0, rows + 1, (2,), generator=generator).tolist())
        split, merged = new.clone().requires_grad_(), None
        for part in order.tensor_split(cuts):
            partial, figures = function(
                split[part], old[part], other[part], mask[part], max(int(mask.sum()), 1)
            )
            partial.backward()
            merged = figures if merged is None else merged.merge(figures)
        torch.testing.assert_close(split.grad, whole.grad, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(torch.stack(merged), torch.stack(stats), rtol=1e-5, atol=1e-6)
