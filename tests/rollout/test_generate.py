"""The sampling loop against ``generate()``, and each way a rollout has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.config.schema import GenerationConfig
from rlhf_lightning.rollout.generate import generate, stop_window, texts
from rlhf_lightning.types import Prompts

FAMILIES = ["llama", "gpt2"]


def reference_generate(actor_critic, prompts: Prompts, new_tokens: int) -> list[list[int]]:
    """Greedy ``generate()``, row by row, without padding."""
    answers = []
    with torch.no_grad(), actor_critic.roles.use("policy"):
        for ids in prompts.ids:
            out = actor_critic.backbone.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=sorted(actor_critic.backbone.end_ids),
                pad_token_id=actor_critic.backbone.pad_id,
            )
            answers.append(out[0, len(ids) :].tolist())
    return answers


def sample(actor_critic, prompts_for, max_new_tokens: int):
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    return generate(actor_critic, prompts_for(actor_critic), config, seed=0, iteration=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_greedy_equals_generate_token_for_token(build, prompts_for, disturb, family, quantization):
    actor_critic = disturb(build(family, quantization=quantization))
    prompts = prompts_for(actor_critic)
    config = GenerationConfig(max_new_tokens=12)
    ours = generate(actor_critic, prompts, config, seed=0, iteration=0, greedy=True)
    rows = zip(ours.response_ids.tolist(), ours.lengths.tolist(), strict=True)
    assert [row[:length] for row, length in rows] == reference_generate(actor_critic, prompts, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_its_neighbours_or_the_batch(build, prompts_for, disturb, family):
    actor_critic = disturb(build(family))
    prompts = prompts_for(actor_critic)
    wide, single = GenerationConfig(max_new_tokens=10), GenerationConfig(max_new_tokens=10, batch_size=1)
    third = Prompts(prompts.ids[2:3], prompts.texts[2:3], (2,))
    whole = generate(actor_critic, prompts, wide, seed=3, iteration=2)
    narrow = generate(actor_critic, prompts, single, seed=3, iteration=2)
    alone = generate(actor_critic, third, wide, seed=3, iteration=2)
    assert torch.equal(whole.response_ids, narrow.response_ids) and whole.ended == narrow.ended
    length = int(whole.lengths[2])
    assert whole.response_ids[2, :length].tolist() == alone.response_ids[0].tolist()


def test_other_rows_iterations_and_seeds_draw_other_answers(build, prompts_for):
    actor_critic = build()
    same = Prompts(prompts_for(actor_critic).ids[:1] * 2, ("x", "x"), (0, 1))
    config = GenerationConfig(max_new_tokens=16)
    one = generate(actor_critic, same, config, seed=0, iteration=0)
    assert one.response_ids[0].tolist() != one.response_ids[1].tolist()
    for change in ({"seed": 1, "iteration": 0}, {"seed": 0, "iteration": 1}):
        other = generate(actor_critic, same, config, **change)
        assert other.response_ids.tolist() != one.response_ids.tolist()


def force_token(actor_critic, script: dict[int, int]) -> None:
    """Make the model say ``script[t]`` at step t and token 40 elsewhere: made-up logits, the real loop."""
    calls = {"t": -1}

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        calls["t"] += 1
        out = torch.full((len(hidden), 320), -1e9)
        out[:, script.get(calls["t"], 40)] = 0.0
        return out

    actor_critic.logits = logits


def test_stops_at_the_end_token_and_not_at_the_limit(build, prompts_for):
    actor_critic = build()
    force_token(actor_critic, {2: 0})
    out = sample(actor_critic, prompts_for, 50)
    assert out.response_ids.shape == (4, 3) and out.ended == ("eos",) * 4


def test_every_end_token_of_the_model_ends(build, prompts_for):
    actor_critic = build()
    assert actor_critic.backbone.end_ids == {0, 1}
    force_token(actor_critic, {2: 1})
    out = sample(actor_critic, prompts_for, 9)
    assert out.lengths.tolist() == [3] * 4 and out.ended == ("eos",) * 4


def test_an_ignored_end_token_is_sampled_counted_and_ends_nothing(build, prompts_for):
    actor_critic = build()
    force_token(actor_critic, {2: 1, 4: 0})
    config = GenerationConfig(max_new_tokens=6, ignore_eos=True)
    out = generate(actor_critic, prompts_for(actor_critic), config, seed=0, iteration=0)
    assert out.response_ids.tolist() == [[40, 40, 1, 40, 0, 40]] * 4
    assert bool(out.response_mask.all()) and out.ended == ("length",) * 4


def test_the_end_token_counts_although_it_is_also_the_pad_token(build, prompts_for):
    actor_critic = build()
    assert actor_critic.backbone.pad_id in actor_critic.backbone.end_ids
    force_token(actor_critic, {2: 0})
    out = sample(actor_critic, prompts_for, 5)
    assert out.response_mask.tolist() == [[True] * 3] * 4


def test_a_cut_answer_keeps_exactly_its_sampled_tokens(build, prompts_for):
    actor_critic = build()
    force_token(actor_critic, {0: 7, 1: 8, 2: 9})
    out = sample(actor_critic, prompts_for, 3)
    assert out.response_ids.tolist() == [[7, 8, 9]] * 4 and out.ended == ("length",) * 4


def test_an_end_token_at_once_is_an_answer_of_length_one_and_empty_text(build, prompts_for):
    actor_critic = build()
    force_token(actor_critic, {0: 0})
    out = sample(actor_critic, prompts_for, 5)
    assert out.lengths.tolist() == [1] * 4 and texts(out, actor_critic.backbone.tokenizer) == ("",) * 4


def test_a_stop_text_ends_an_answer_even_across_tokens(build, prompts_for):
    actor_critic = build()
    tokenizer = actor_critic.backbone.tokenizer
    pieces = tokenizer("x.y").input_ids
    assert len(pieces) == 3
    force_token(actor_critic, dict(enumerate(pieces)))
    config = GenerationConfig(max_new_tokens=20, stop=["x.y"])
    out = generate(actor_critic, prompts_for(actor_critic), config, seed=0, iteration=0)
    assert out.ended == ("stop",) * 4 and out.lengths.tolist() == [3] * 4
    assert texts(out, tokenizer) == ("x.y",) * 4


def test_the_stop_window_holds_the_longest_text():
    assert stop_window(["ab", "é"]) == 6 and stop_window([]) == 4


def test_characters_split_over_tokens_come_back_whole(build, prompts_for):
    actor_critic = build()
    tokenizer = actor_critic.backbone.tokenizer
    text = "好吃 🍜"
    force_token(actor_critic, dict(enumerate([*tokenizer(text).input_ids, 0])))
    out = sample(actor_critic, prompts_for, 40)
    assert texts(out, tokenizer) == (text,) * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_frequencies_match_the_scored_probabilities(build, prompts_for, disturb, family):
    actor_critic = disturb(build(family, temperature=0.7))
    ids = prompts_for(actor_critic).ids[:1]
    count = 4000
    many = Prompts(ids * count, ("the soup",) * count, tuple(range(count)))
    config = GenerationConfig(max_new_tokens=1, batch_size=1000)
    out = generate(actor_critic, many, config, seed=0, iteration=0)
    drawn = out.response_ids[:, 0]
    with torch.no_grad():
        probability = actor_critic.policy(out)[0][:, 0].exp()
    share = torch.bincount(drawn, minlength=320).float() / count
    scored = torch.zeros(320).index_put((drawn,), probability)
    # five standard errors of a share at the largest probability
    assert (share - scored).abs().max() < 5 * (0.25 / count) ** 0.5
    assert abs(scored.sum() - 1) < 0.05


def test_nothing_leaks_in_from_the_checkpoints_own_generation_config(build, prompts_for):
    actor_critic = build()
    prompts = prompts_for(actor_critic)
    before = generate(actor_critic, prompts, GenerationConfig(max_new_tokens=8), seed=0, iteration=0)
    own = actor_critic.backbone.model.generation_config
    own.temperature, own.top_k, own.repetition_penalty, own.max_length = 0.1, 1, 5.0, 2
    after = generate(actor_critic, prompts, GenerationConfig(max_new_tokens=8), seed=0, iteration=0)
    assert torch.equal(before.response_ids, after.response_ids)


def test_nothing_of_a_rollout_is_an_inference_tensor(build, prompts_for):
    out = generate(build(), prompts_for(build()), GenerationConfig(max_new_tokens=3), seed=0, iteration=0)
    tensors = (out.prompt_ids, out.prompt_mask, out.response_ids, out.response_mask)
    assert not any(t.is_inference() for t in tensors)
