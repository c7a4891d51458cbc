import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_lightning.functional import chunked_token_logprobs, entropy, position_ids, token_logprobs
from rlhf_lightning.functional.chunked import default_chunk

LOGITS = torch.tensor([[[2.0, 0.0, -1.0]]])
ONE = torch.tensor([[1]])


def plain(hidden, weight, tokens, *, temperature=1.0, bias=None, softcap=None):
    """The same two outputs by way of the full logits."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return token_logprobs(logits, tokens, temperature=temperature), entropy(logits, temperature=temperature)


def head(seed=0, rows=7, width=5, vocabulary=11, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=g, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, generator=g, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, vocabulary, (rows,), generator=g)


class Operations(TorchDispatchMode):
    """What ran: names of operations, and the elements of every tensor that they made or filled."""

    def __init__(self):
        super().__init__()
        self.names, self.sizes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(function.overloadpacket.__name__)
        self.sizes += [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result


class TestTokenLogprobs:
    @pytest.mark.parametrize(("temperature", "expected"), [(0.5, -4.020581), (1.0, -2.169846)])
    def test_divided_by_the_sampling_temperature(self, temperature, expected):
        lp = token_logprobs(LOGITS, ONE, temperature=temperature)
        assert lp.shape == (1, 1)
        assert lp.item() == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_logits_are_raised_first(self, dtype):
        logits = torch.tensor([[[7.30, 0.0, -5.0]]]).to(dtype)
        lp = token_logprobs(logits, ONE)
        assert lp.dtype == torch.float32
        assert torch.equal(lp, token_logprobs(logits.float(), ONE))
        assert lp.item() != lp.to(dtype).item()  # what a result of that dtype would have lost

    def test_large_logits_keep_their_digits(self):
        lp = token_logprobs(LOGITS + 1e4, ONE)
        assert lp.item() == pytest.approx(-2.169846, abs=1e-6)

    def test_position_p_minus_one_predicts_token_p(self):
        # A model whose logits at position i put all mass on id i + 1; prompt of 4, response [4, 5, 6].
        logits = torch.full((1, 7, 8), -1e9)
        logits[0, torch.arange(7), torch.arange(7) + 1] = 0.0
        assert token_logprobs(logits[:, 3:6], torch.tensor([[4, 5, 6]])).tolist() == [[0.0, 0.0, 0.0]]

    def test_errors(self):
        with pytest.raises(ValueError, match=r"tokens must have shape \(1, 1\); got \(1, 2\)"):
            token_logprobs(LOGITS, torch.tensor([[1, 1]]))
        with pytest.raises(ValueError, match="temperature must be above 0; got 0"):
            token_logprobs(LOGITS, ONE, temperature=0.0)

    def test_gradcheck(self):
        logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
        tokens = torch.randint(0, 4, (2, 3))
        assert torch.autograd.gradcheck(lambda z: token_logprobs(z, tokens, temperature=0.7), (logits,))
        assert torch.autograd.gradcheck(lambda z: entropy(z, temperature=0.7), (logits,))


class TestEntropy:
    @pytest.mark.parametrize(("temperature", "expected"), [(0.5, 0.106921), (1.0, 0.524267)])
    def test_of_the_distribution_that_is_sampled(self, temperature, expected):
        assert entropy(LOGITS, temperature=temperature).item() == pytest.approx(expected, abs=1e-6)

    def test_bounds(self):
        assert entropy(torch.zeros(5)).item() == pytest.approx(math.log(5))
        assert entropy(torch.tensor([0.0, -1e9])).item() == 0.0

    def test_ruled_out_tokens(self):
        logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
        h = entropy(logits)
        h.backward()
        assert h.item() == pytest.approx(math.log(2))
        assert logits.grad.tolist() == pytest.approx([0.0, 0.0, 0.0])


class TestPositionIds:
    def test_left_and_right_padding(self):
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
        assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]
        assert torch.equal(position_ids(mask.bool()), position_ids(mask))
        assert position_ids(mask.bool()).dtype == torch.int64


class TestChunked:
    @pytest.mark.parametrize("softcap", [None, 1.5])
    @pytest.mark.parametrize("chunk", [1, 3, 100])
    def test_gradcheck_of_both_outputs(self, chunk, softcap):
        hidden, weight, bias, tokens = head(rows=4, width=3, vocabulary=5)

        def call(h, w, b):
            return chunked_token_logprobs(h, w, tokens, bias=b, softcap=softcap, temperature=0.7, chunk=chunk)

        assert call(hidden, weight, bias)[0].dtype == torch.float64
        assert torch.autograd.gradcheck(call, (hidden, weight, bias))

    @settings(max_examples=30, deadline=None)
    @given(
        seed=st.integers(0, 2**31),
        rows=st.integers(0, 9),
        chunk=st.integers(1, 12),
        softcap=st.sampled_from([None, 2.0, 30.0]),
        temperature=st.sampled_from([0.5, 1.0, 1.7]),
        biased=st.booleans(),
        used=st.sampled_from(["logprobs", "entropy", "both"]),
    )
    def test_equals_the_plain_form(self, seed, rows, chunk, softcap, temperature, biased, used):
        hidden, weight, bias, tokens = head(seed, rows)
        inputs = [hidden, weight, bias] if biased else [hidden, weight]
        keywords = {"temperature": temperature, "softcap": softcap, "bias": bias if biased else None}
        g_lp, g_h = torch.randn(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        results = []
        for lp, h in (
            chunked_token_logprobs(hidden, weight, tokens, chunk=chunk, **keywords),
            plain(hidden, weight, tokens, **keywords),
        ):
            loss = {
                "logprobs": (lp * g_lp).sum(),
                "entropy": (h * g_h).sum(),
                "both": (lp * g_lp + h * g_h).sum(),
            }
            results.append((lp, h, *torch.autograd.grad(loss[used], inputs)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

    def test_float32_agrees_to_1e_6(self):
        hidden, weight, _, tokens = head(rows=40, width=16, vocabulary=500, dtype=torch.float32)
        ours, theirs = chunked_token_logprobs(hidden, weight, tokens, chunk=7), plain(hidden, weight, tokens)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)

    def test_batches_keep_their_shape_and_slices_are_welcome(self):
        hidden, weight, _, tokens = head(rows=12)
        wide = hidden.detach().view(3, 4, 5)
        lp, h = chunked_token_logprobs(wide[:, 1:], weight, tokens.view(3, 4)[:, 1:], chunk=2)
        expected_lp, expected_h = plain(wide[:, 1:], weight, tokens.view(3, 4)[:, 1:])
        torch.testing.assert_close(lp, expected_lp)
        torch.testing.assert_close(h, expected_h)

    def test_low_precision_head(self):
        hidden, weight, _, tokens = head(rows=6, dtype=torch.bfloat16)
        # The hidden state is float32, as adapters leave it: it is cast to the head's and cast back.
        wide = hidden.detach().float().requires_grad_()
        lp, h = chunked_token_logprobs(wide, weight, tokens, chunk=4)
        assert lp.dtype == h.dtype == torch.float32
        torch.testing.assert_close((lp, h), plain(hidden, weight, tokens), rtol=1e-5, atol=1e-5)
        (lp.sum() + h.sum()).backward()
        plain_lp, plain_h = plain(hidden, weight, tokens)
        expected = torch.autograd.grad(plain_lp.sum() + plain_h.sum(), [hidden, weight])
        assert (wide.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(wide.grad, expected[0].float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(weight.grad, expected[1], rtol=3e-2, atol=3e-2)

    def test_autocast_changes_nothing(self):
        hidden, weight, _, tokens = head(rows=6, dtype=torch.float32)
        outside = chunked_token_logprobs(hidden, weight, tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = chunked_token_logprobs(hidden, weight, tokens)
        assert torch.equal(outside[0], inside[0])
        inside[0].sum().backward()
        assert hidden.grad.isfinite().all()

    def test_frozen_head_gets_no_gradient(self):
        hidden, weight, bias, tokens = head()
        lp, _ = chunked_token_logprobs(hidden, weight.detach(), tokens, bias=bias.detach(), chunk=3)
        lp.sum().backward()
        assert hidden.grad is not None
        assert weight.grad is None and bias.grad is None

    def test_head_alone_can_train(self):
        hidden, weight, bias, tokens = head()
        lp, _ = chunked_token_logprobs(hidden.detach(), weight, tokens, bias=bias, chunk=3)
        lp.sum().backward()
        expected = torch.autograd.grad(
            plain(hidden.detach(), weight, tokens, bias=bias)[0].sum(), [weight, bias]
        )
        torch.testing.assert_close([weight.grad, bias.grad], list(expected))

    def test_an_output_that_nothing_uses_costs_no_backward(self):
        class Swallow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return None

        hidden, weight, _, tokens = head()
        lp, _ = chunked_token_logprobs(hidden, weight.detach(), tokens)
        Swallow.apply(lp).sum().backward()
        assert hidden.grad is None or not hidden.grad.any()

    @pytest.mark.parametrize("scale", [1.0, 1e6])
    def test_ruled_out_tokens(self, scale):
        hidden, weight, bias, tokens = head(vocabulary=11, dtype=torch.float32)
        barred = bias.detach().clone()
        barred[3] = -math.inf
        lp, h = chunked_token_logprobs(
            hidden, weight, tokens.masked_fill(tokens == 3, 4), bias=barred, chunk=2
        )
        (scale * h.sum() + lp.sum()).backward()
        rest = [i for i in range(11) if i != 3]
        torch.testing.assert_close(h, plain(hidden, weight[rest], tokens.clamp(max=9), bias=barred[rest])[1])
        assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
        assert not weight.grad[3].any()

    @pytest.mark.parametrize("used", ["logprobs", "entropy"])
    @pytest.mark.parametrize("head_learns", [False, True])
    def test_nothing_as_large_as_the_logits_is_ever_made_or_saved(self, used, head_learns):
        rows, vocabulary, chunk = 64, 1000, 4
        hidden, weight, _, tokens = head(rows=rows, width=2, vocabulary=vocabulary, dtype=torch.float32)
        saved = []

        def remember(x):
            saved.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x), Operations() as seen:
            lp, h = chunked_token_logprobs(
                hidden, weight.requires_grad_(head_learns), tokens, chunk=chunk, softcap=5.0
            )
            (lp.sum() if used == "logprobs" else h.sum()).backward()
        assert 0 < max(saved) <= weight.numel()
        assert max(seen.sizes) == chunk * vocabulary < rows * vocabulary

    @pytest.mark.parametrize(
        ("differentiated", "with_entropy", "products"),
        [(False, False, 1), (False, True, 1), (True, False, 2), (True, True, 3)],
    )
    def test_products_with_the_head(self, differentiated, with_entropy, products):
        hidden, weight, _, tokens = head(rows=6)
        with torch.set_grad_enabled(differentiated), Operations() as seen:
            lp, h = chunked_token_logprobs(hidden, weight.detach(), tokens, chunk=2, entropy=with_entropy)
            if differentiated:
                (lp.sum() + (h.sum() if with_entropy else 0.0)).backward()
        assert seen.names.count("mm") == 3 * products

    def test_without_entropy(self):
        hidden, weight, bias, tokens = head(rows=6)
        keywords = {"bias": bias, "temperature": 0.7, "softcap": 2.0, "chunk": 4}
        lp, none = chunked_token_logprobs(hidden, weight, tokens, entropy=False, **keywords)
        expected, _ = chunked_token_logprobs(hidden, weight, tokens, **keywords)
        assert none is None
        assert torch.equal(lp, expected)
        inputs = [hidden, weight, bias]
        ours, theirs = (torch.autograd.grad(x.square().sum(), inputs) for x in (lp, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def test_a_sure_token_keeps_its_small_gradient(self):
        # π_a = 1 − 9e-4 here. The gradient W_a − Σ π W is the small difference of two rows near 4: it has to
        # be formed from 1 − π_a, not from the two products.
        weight = torch.tensor([[4.0, 4.0], [-4.0, 4.0]], dtype=torch.bfloat16)
        hidden = torch.tensor([[0.875, 1.0]], dtype=torch.bfloat16, requires_grad=True)
        chunked_token_logprobs(hidden, weight, torch.tensor([0]))[0].sum().backward()
        logits = hidden.detach().double() @ weight.double().T
        rest = torch.sigmoid(logits[0, 1] - logits[0, 0])
        assert rest < 1e-3
        assert hidden.grad[0, 0].item() == pytest.approx(8.0 * rest.item(), rel=1e-2)
        assert hidden.grad[0, 1].item() == 0.0

    @pytest.mark.parametrize(("vocabulary", "rows"), [(49152, 170), (32000, 262), (1 << 20, 128)])
    def test_default_chunk_keeps_to_its_bytes(self, vocabulary, rows):
        assert default_chunk(vocabulary, torch.device("cpu")) == rows
        assert default_chunk(vocabulary, torch.device("cuda")) >= rows

    def test_errors(self):
        hidden, weight, _, tokens = head()
        with pytest.raises(ValueError, match=r"tokens must have shape \(7,\); got \(6,\)"):
            chunked_token_logprobs(hidden, weight, tokens[1:])
        with pytest.raises(ValueError, match="chunk must be at least 1 row; got 0"):
            chunked_token_logprobs(hidden, weight, tokens, chunk=0)
        with pytest.raises(ValueError, match="softcap must be above 0; got -1"):
            chunked_token_logprobs(hidden, weight, tokens, softcap=-1.0)
        with pytest.raises(ValueError, match="temperature must be above 0; got -1"):
            chunked_token_logprobs(hidden, weight, tokens, temperature=-1.0)
