import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_lightning.rollout.sampling import draw

VOCABULARIES = st.sampled_from([1, 2, 5, 255, 256, 257, 511, 512, 3000])


def case(seed, rows, vocabulary, spread=4.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=g, dtype=torch.float64) * spread).to(dtype)
    out = torch.rand(rows, vocabulary, generator=g) < 0.3
    out[:, int(torch.randint(vocabulary, (1,), generator=g))] = False
    return logits.masked_fill(out, -math.inf), torch.rand(rows, generator=g, dtype=torch.float64)


class TestDraw:
    @pytest.mark.parametrize(
        ("u", "token"),
        # exp(log 1, log 0, log 2, log 1) / 4: the sums are 1/4, 1/4, 3/4, 1.
        [(0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (1 - 2**-53, 3)],
    )
    def test_by_hand(self, u, token):
        logits = torch.tensor([[1.0, 0.0, 2.0, 1.0]], dtype=torch.float64).log()
        assert draw(logits, torch.tensor([u], dtype=torch.float64)).tolist() == [token]

    def test_temperature_divides(self):
        logits = torch.tensor([[1.0, 3.0]], dtype=torch.float64).log()
        u = torch.tensor([0.2], dtype=torch.float64)
        assert draw(logits, u).tolist() == [0]  # 1/4 to 3/4
        assert draw(logits, u, temperature=0.5).tolist() == [1]  # 1/10 to 9/10

    @settings(max_examples=100, deadline=None)
    @given(
        seed=st.integers(0, 2**31),
        rows=st.integers(1, 9),
        vocabulary=VOCABULARIES,
        spread=st.sampled_from([0.0, 1.0, 5.0, 50.0]),
        dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    )
    def test_the_tokens_interval_holds_u(self, seed, rows, vocabulary, spread, dtype):
        logits, u = case(seed, rows, vocabulary, spread, dtype)
        untouched = logits.clone()
        tokens = draw(logits, u).unsqueeze(1)
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        weights = wide.softmax(dim=1).double()
        upper = weights.cumsum(dim=1) / weights.sum(dim=1, keepdim=True)
        chosen = weights.gather(1, tokens)
        assert torch.equal(logits, untouched)
        assert (chosen > 0).all()
        assert (upper.gather(1, tokens) >= u.unsqueeze(1) - 1e-12).all()
        assert (upper.gather(1, tokens) - chosen <= u.unsqueeze(1) + 1e-12).all()

    @settings(max_examples=50, deadline=None)
    @given(seed=st.integers(0, 2**31), rows=st.integers(2, 40), vocabulary=VOCABULARIES)
    def test_no_row_depends_on_its_neighbours(self, seed, rows, vocabulary):
        logits, u = case(seed, rows, vocabulary, dtype=torch.bfloat16)
        together = draw(logits, u, temperature=0.7)
        alone = [draw(logits[i : i + 1], u[i : i + 1], temperature=0.7) for i in range(rows)]
        assert torch.equal(together, torch.cat(alone))
        back = torch.arange(rows - 1, -1, -1)
        assert torch.equal(together[back], draw(logits[back], u[back], temperature=0.7))

    @pytest.mark.parametrize("barred", [range(256), range(256, 512), range(512, 700), range(600, 700)])
    def test_whole_blocks_ruled_out_and_u_at_its_ends(self, barred):
        logits = torch.zeros(1, 700)
        logits[0, list(barred)] = -math.inf
        for u in (0.0, 0.5, 1 - 2**-53, 1.0):  # 1.0 stands for a product that rounding put on the total
            token = int(draw(logits, torch.tensor([u], dtype=torch.float64)))
            assert token not in barred
        assert int(draw(logits, torch.tensor([0.0]))) == min(set(range(700)) - set(barred))
        assert token == max(set(range(700)) - set(barred))

    def test_rare_tokens_keep_their_share(self):
        # 49,152 tokens of weight 1e-9 after one of weight 1: a float32 sum would not move past 1.
        logits = torch.full((1, 49153), math.log(1e-9), dtype=torch.float64)
        logits[0, 0] = 0.0
        total = 1.0 + 49152e-9
        u = torch.tensor([(1.0 + (k - 0.5) * 1e-9) / total for k in (1, 30000, 49152)], dtype=torch.float64)
        assert draw(logits.float().expand(3, -1), u).sub(torch.tensor([1, 30000, 49152])).abs().max() <= 300
        assert draw(logits.expand(3, -1), u).tolist() == [1, 30000, 49152]

    def test_no_rows(self):
        assert draw(torch.zeros(0, 10), torch.zeros(0)).shape == (0,)
