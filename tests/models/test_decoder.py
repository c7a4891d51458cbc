"""Our decoder against the backbone's own modules: the same function and the same gradients."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lightning.errors import UserError
from rlhf_lightning.kernels.packed import Packed, packs
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.decoder import Decoder
from rlhf_lightning.models.forest import Segment, plant

needs_bfloat16 = pytest.mark.skipif(
    not packs(torch.device("cpu"), torch.bfloat16), reason="this processor does not multiply bfloat16"
)
PLAIN_KINDS = ["llama", "mistral", "qwen2"]
SUBSETS = {
    "q and down": ["q_proj", "down_proj"],
    "v": ["v_proj"],
    "gate": ["gate_proj"],
    "o, up": ["o_proj", "up_proj"],
}
PAIR = [Segment([5, 6, 7]), Segment([8, 9], 0), Segment([10], 0)]
LONELY = [Segment([11, 12]), Segment([5, 6, 15, 16])]


def by_modules(model: ActorCritic) -> ActorCritic:
    """The same model without our decoder."""
    model.decoder = None
    return model


def passes(model: ActorCritic, batch) -> dict[str, Tensor]:
    logprobs, entropy = model.policy(batch)
    values = model.values(batch)[:, : batch.response_ids.shape[1]] * batch.response_mask
    return {"logprobs": logprobs, "entropy": entropy, "reference": model.reference(batch), "values": values}


def gradients(model: ActorCritic, batch) -> dict[str, Tensor]:
    """Of a sum in which every token has a weight of its own, for policy and critic."""
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 2, batch.response_ids.numel()).view_as(batch.response_ids)
    for role, read in (
        ("policy", lambda: model.policy(batch)[0]),
        ("critic", lambda: model.values(batch)[:, :-1]),
    ):
        with model.roles.use(role):
            (read() * weights * batch.response_mask).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(build, disturb, batch, **settings) -> None:
    """Float32: every number to 1e-5, every gradient to 1e-5 of its norm."""
    model = disturb(build(**settings))
    assert model.decoder is not None
    ours, our_gradients = passes(model, batch), gradients(model, batch)
    theirs, their_gradients = passes(by_modules(model), batch), gradients(model, batch)
    for name, numbers in theirs.items():
        torch.testing.assert_close(ours[name], numbers, atol=1e-5, rtol=1e-5, msg=name)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        assert gradient.norm() > 0, name
        assert (our_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_numbers_and_gradients_are_the_modules_own(build, kinds, disturb, corners, kind, quantization):
    compare(build, disturb, corners, path=str(kinds[kind]), quantization=quantization)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("modules", SUBSETS.values(), ids=SUBSETS.keys())
def test_adapters_on_some_of_the_maps(build, kinds, disturb, corners, modules, lean):
    lora = {"target_modules": modules, "r": 3, "alpha": 5.0}
    compare(build, disturb, corners, path=str(kinds["qwen2"]), lora=lora, gradient_checkpointing=lean)


def saved_adapter(kinds, folder, **settings) -> str:
    model = AutoModelForCausalLM.from_pretrained(kinds["llama"])
    own = {"target_modules": ["q_proj", "k_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    PeftModel(model, LoraConfig(**own | settings)).save_pretrained(folder)
    return str(folder)


def test_adapters_of_different_ranks_and_maps(build, kinds, disturb, corners, tmp_path):
    """Policy and reference go on from a folder, rank 4 on two maps; the critic is fresh, 16 on all."""
    folder = saved_adapter(kinds, tmp_path, r=4, lora_alpha=6)
    compare(build, disturb, corners, path=str(kinds["llama"]), adapter=folder)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_bfloat16_is_as_near_to_float32_as_the_modules(build, kinds, disturb, corners, kind, quantization):
    """Rounding happens in other places than in Transformers' layers, so that the two differ by as much as
    either differs from exact arithmetic on the same weights: some hundredths of a nat for one token of a
    random model, less than 0.02 in the mean."""
    path = str(kinds[kind])
    with torch.no_grad():
        model = disturb(build(path=path, quantization=quantization, dtype="bfloat16"))
        exact = by_modules(disturb(build(path=path)))
        own = dict(model.model.named_parameters())
        for name, parameter in exact.model.named_parameters():  # the same rounded weights
            state = getattr(own[name], "quant_state", None)
            parameter.copy_(own[name] if state is None else dequantize_4bit(own[name], state))
        ours, theirs = passes(model, corners), passes(by_modules(model), corners)
        exact = passes(exact, corners)
    for name in ("logprobs", "reference"):
        error, usual = (
            (numbers[name] - exact[name])[corners.response_mask].abs().mean() for numbers in (ours, theirs)
        )
        assert 0 < error < 2e-2 and error < 1.5 * usual + 1e-3, name


def test_what_rows_share_is_computed_once(build, kinds, corners, monkeypatch):
    seen: list[int] = []
    right = Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda self, packing, *a: seen.append(len(packing)) or right(self, packing, *a)
    )
    with torch.no_grad():
        build(path=str(kinds["llama"])).policy(corners)
    rows = [
        tuple(p[m].tolist() + a[n].tolist())
        for p, m, a, n in zip(
            corners.prompt_ids, corners.prompt_mask, corners.response_ids, corners.response_mask, strict=True
        )
    ]
    beginnings = {row[:n] for row in rows for n in range(1, len(row) + 1)}
    assert seen == [len(beginnings)] and len(beginnings) < sum(map(len, rows))


def test_rows_longer_than_the_window_go_through_the_modules(build, kinds, disturb, corners, monkeypatch):
    """Window 6: the batch of corners has rows of 8; its last two rows are short enough for our decoder."""
    model = disturb(build(path=str(kinds["mistral, window 6"])))
    used: list[int] = []
    right = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, *a: used.append(1) or right(self, *a))
    short = type(corners)(
        corners.prompt_ids[4:], corners.prompt_mask[4:], corners.response_ids[4:], corners.response_mask[4:],
        corners.rows[4:], corners.ended[4:],
    )  # fmt: skip
    assert model.decoder.limit == 6
    with torch.no_grad():
        found = []
        for batch, calls in ((corners, 0), (short, 3)):
            used.clear()
            found.append(passes(model, batch))
            assert len(used) == calls
        for batch, ours in zip((corners, short), found, strict=True):
            for name, numbers in passes(by_modules(model), batch).items():
                torch.testing.assert_close(ours[name], numbers, atol=1e-5, rtol=1e-5)
            model.decoder = None
    for name, whole in found[0].items():  # and a row is the same by either way
        if name != "values":
            torch.testing.assert_close(found[1][name][1, :2], whole[5, :2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kept_copy_of_the_weights_changes_no_bit(build, kinds, disturb, corners, dtype):
    model = disturb(build(path=str(kinds["qwen2"]), quantization="nf4", dtype=dtype))
    before, before_gradients = passes(model, corners), gradients(model, corners)
    model.decoder.keep_dequantised(True)
    kept = [frozen._kept for layer in model.decoder._weights for frozen in layer.frozen]
    assert all(weight.dtype == model.decoder.dtype for weight in kept)
    after, after_gradients = passes(model, corners), gradients(model, corners)
    assert all(torch.equal(after[name], numbers) for name, numbers in before.items())
    assert all(torch.equal(after_gradients[name], g) for name, g in before_gradients.items())
    model.decoder.keep_dequantised(False)
    assert all(frozen._kept is None for layer in model.decoder._weights for frozen in layer.frozen)


def test_rolling_out_holds_the_copy_inside_and_drops_it_whatever_happens(build, kinds):
    model = build(path=str(kinds["llama"]), quantization="nf4", rollout_weights="dequantized")
    frozen = model.decoder._weights[0].frozen[0]
    with pytest.raises(RuntimeError), model.rolling_out():
        assert frozen._kept is not None
        raise RuntimeError
    assert frozen._kept is None
    plain = build(path=str(kinds["llama"]), quantization="nf4")
    with plain.rolling_out():
        assert plain.decoder._weights[0].frozen[0]._kept is None


PACKED = {"dtype": "bfloat16", "rollout_weights": "packed"}


def spoken_logits(model: ActorCritic, texts, role, said) -> Tensor:
    """Log-probabilities that sampling meets for these tokens (steps, rows): (steps + 1, rows, V)."""
    speaker = model.speaker(texts, role, room=len(said) + 1)
    states = [speaker.start(), *(speaker.step(tokens) for tokens in said)]
    return torch.stack([model.logits(state).log_softmax(1) for state in states])


@needs_bfloat16
@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("role", ["policy", "reference"])
def test_packed_sampling_is_no_further_from_the_scoring_pass(build, kinds, disturb, quantization, role):
    """Root mean square over the vocabulary along three answers, beside that of plain sampling in bfloat16."""
    model = disturb(build(path=str(kinds["qwen2"]), quantization=quantization, **PACKED))
    texts, said = [[5, 6, 7], [8], [9, 10, 11, 12]], torch.tensor([[3, 4, 5], [13, 14, 15], [7, 7, 9]])
    with torch.no_grad():
        plain = spoken_logits(model, texts, role, said)
        with model.rolling_out(), model.sampling(role):
            packed = spoken_logits(model, texts, role, said)
        forest = model.plant([[Segment(text + said[:, row].tolist())] for row, text in enumerate(texts)])
        whole = (
            model.logits(model.read(forest, role).flatten(0, 1)).log_softmax(1).view(3, -1, packed.shape[2])
        )
    ends = torch.tensor([len(text) - 1 for text in texts])
    scored = torch.stack([whole[range(3), ends + step] for step in range(4)])
    error, usual = ((found - scored).square().mean().sqrt() for found in (packed, plain))
    assert error <= 1.3 * usual < 0.1


@needs_bfloat16
def test_packed_weights_go_with_the_sampling_whatever_happens(build, kinds, disturb):
    model = disturb(build(path=str(kinds["llama"]), **PACKED))
    with pytest.raises(RuntimeError), model.sampling("policy"):
        assert isinstance(model.decoder.products("policy")[0][0], Packed) and model._packed_head is not None
        assert not isinstance(model.decoder.products(None)[0][0], Packed)
        raise RuntimeError
    assert not isinstance(model.decoder.products("policy")[0][0], Packed) and model._packed_head is None


def test_packing_is_refused_where_nothing_would_pack(build, kinds):
    with pytest.raises(
        UserError, match=r"model\.rollout_weights=packed needs model\.dtype=bfloat16 and a CPU"
    ):
        build(path=str(kinds["llama"]), dtype="float32", rollout_weights="packed")


def test_unquantised_weights_are_held_once(build, kinds, corners):
    """Maps that read one input lie in one tensor of which the modules' own weights are views."""
    model = build(path=str(kinds["llama"]))
    attention = model.trunk.layers[0].self_attn
    joined = model.decoder._weights[0].frozen[0]()
    for name, rows in (("q_proj", slice(0, 64)), ("k_proj", slice(64, 96)), ("v_proj", slice(96, 128))):
        weight = getattr(attention, name).base_layer.weight
        assert weight.data_ptr() == joined[rows].data_ptr() and torch.equal(weight, joined[rows])


def test_the_decoder_follows_a_cast_and_what_moves_the_weights(build, kinds, disturb, corners):
    model = disturb(build(path=str(kinds["qwen2"])))
    with torch.no_grad():
        before, decoder = model.policy(corners)[0], model.decoder
        assert model.float().decoder is decoder  # nothing moved
        model._apply(lambda tensor: tensor.clone())  # as a move to another device does
        assert model.decoder is not decoder
        torch.testing.assert_close(model.policy(corners)[0], before)
        double = model.double().policy(corners)[0]
        assert model.decoder.dtype == torch.float64
        torch.testing.assert_close(double.float(), before, atol=1e-5, rtol=1e-5)


def test_what_is_more_than_low_rank_terms_goes_through_the_modules(build, kinds, disturb, corners, tmp_path):
    path = str(kinds["llama"])
    on_the_embedding = saved_adapter(kinds, tmp_path / "embed", target_modules=["q_proj", "embed_tokens"])
    others = {
        "dropout that is on": {"lora": {"dropout": 0.1}},
        "a term on the embedding": {"adapter": on_the_embedding},
        "eager": {"attention": "eager"},
        "DoRA": {"adapter": saved_adapter(kinds, tmp_path / "dora", use_dora=True)},
        "a bias of its own": {"adapter": saved_adapter(kinds, tmp_path / "bias", lora_bias=True)},
    }
    for name, settings in others.items():
        assert build(path=path, **settings).decoder is None, name
    silent = saved_adapter(kinds, tmp_path / "dropped", lora_dropout=0.5)
    model = disturb(build(path=path, adapter=silent))
    assert model.decoder is not None  # it was trained with dropout, and is read without
    with torch.no_grad():
        ours = model.policy(corners)[0]
        torch.testing.assert_close(ours, by_modules(model).policy(corners)[0], atol=1e-5, rtol=1e-5)


def test_a_new_term_on_the_embedding_is_refused(build, kinds):
    with pytest.raises(UserError, match=r"model\.lora\.target_modules names the token embedding"):
        build(path=str(kinds["llama"]), lora={"target_modules": ["q_proj", "embed_tokens"]})


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_forests_are_read_as_by_the_modules(build, kinds, disturb, role):
    """Pairs and packed demonstrations: one text a row here, a mask of its own there."""
    model = disturb(build(path=str(kinds["qwen2"])))
    rows = [PAIR, LONELY]
    ours = model.plant(rows)
    assert ours.mask.ndim == 2
    learned = [[0, 1, 2], [0, 1]]

    def read(forest):
        places = [forest.places[row][n] for row, numbers in enumerate(learned) for n in numbers]
        logprobs, mask = model.segment_logprobs(forest, places, role)
        found = logprobs[mask]
        grads = (
            torch.autograd.grad(found.sin().sum(), model.parameters_of("policy")) if role == "policy" else ()
        )
        return [found.detach(), *grads]

    mine = read(ours)
    by_modules(model)
    for together in (True, False):
        for one, other in zip(mine, read(plant(rows, pad_id=0, together=together)), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
