"""Speaking through our decoder against speaking through the backbone's modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_lightning.config.schema import GenerationConfig
from rlhf_lightning.models.speaking import DecoderSpeaker, ModuleSpeaker
from rlhf_lightning.rollout.generate import generate
from rlhf_lightning.types import Prompts

TEXTS = ((7, 9, 11, 13), (7, 9), (8,), (7, 9, 11, 13), (7, 9, 30, 31, 32, 33, 34))


def speakers(model, texts=TEXTS, *, room: int = 6, role="policy"):
    """Both, for the same model."""
    ours = model.speaker(texts, role, room=room)
    decoder, model.decoder = model.decoder, None
    theirs = model.speaker(texts, role, room=room)
    model.decoder = decoder
    assert isinstance(ours, DecoderSpeaker) and isinstance(theirs, ModuleSpeaker)
    return ours, theirs


@pytest.mark.parametrize("role", ["policy", "reference"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@torch.no_grad()
def test_states_agree_step_by_step_as_rows_leave(build, kinds, disturb, kind, quantization, role):
    model = disturb(build(path=str(kinds[kind]), quantization=quantization))
    pair = speakers(model, role=role)
    generator = torch.Generator().manual_seed(3)
    states = [speaker.start() for speaker in pair]
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    for kept in (None, [0, 2, 3, 4], None, [3, 1], [0], None):
        if kept is not None:
            for speaker in pair:
                speaker.keep(torch.tensor(kept))
            states = [state[kept] for state in states]
        tokens = torch.randint(1, 300, (len(states[0]),), generator=generator)
        states = [speaker.step(tokens) for speaker in pair]
        torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_the_same_tokens_are_drawn(build, kinds, disturb, kind, greedy):
    model = disturb(build(path=str(kinds[kind])))
    model.backbone = replace(model.backbone, end_ids=frozenset(range(0, 320, 6)))  # rows end one by one
    prompts = Prompts(TEXTS * 2, ("",) * 10, tuple(range(10)))
    config = GenerationConfig(max_new_tokens=12)
    ours = generate(model, prompts, config, seed=4, iteration=1, greedy=greedy)
    model.decoder = None
    theirs = generate(model, prompts, config, seed=4, iteration=1, greedy=greedy)
    assert torch.equal(ours.response_ids, theirs.response_ids) and ours.ended == theirs.ended
    assert greedy or len(set(ours.lengths.tolist())) > 2


@torch.no_grad()
def test_bfloat16_speaks_as_it_scores(build, kinds, disturb):
    """Step by step over the cache against one pass over the whole row: the same roundings but for the order
    of sums."""
    model = disturb(build(path=str(kinds["llama"]), quantization="nf4", dtype="bfloat16"))
    speaker, _ = speakers(model)
    speaker.start()
    tokens = torch.arange(20, 25)
    speaker.step(tokens)
    last = speaker.step(tokens + 1)
    longer = tuple((*text, 20 + n, 21 + n) for n, text in enumerate(TEXTS))
    whole = speakers(model, longer)[0].start()
    assert (last - whole).abs().mean() < 2e-2 * whole.abs().mean()


@torch.no_grad()
def test_room_is_what_was_asked_for(build, kinds):
    model = build(path=str(kinds["llama"]))
    speaker = model.speaker([(5, 6), (7,)], "policy", room=3)
    speaker.start()
    for token in range(3):
        assert speaker.step(torch.tensor([token, token])).shape == (2, 64)
    with pytest.raises(IndexError):
        speaker.step(torch.tensor([4, 4]))


def test_a_text_that_may_outgrow_the_window_is_spoken_by_the_modules(build, kinds):
    model = build(path=str(kinds["mistral, window 6"]))
    assert isinstance(model.speaker([(5, 6), (7,)], "policy", room=4), DecoderSpeaker)
    assert isinstance(model.speaker([(5, 6), (7,)], "policy", room=5), ModuleSpeaker)
