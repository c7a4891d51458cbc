"""DPO against what can be worked out without it: its first step, a plain loop, a rule that it must learn."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.data.encoding import answer_ids, answered_pair
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.cast import dpo_cast
from rlhf_lightning.stages.dpo import DPO
from rlhf_lightning.types import TokenPair

PAIRS = [
    TokenPair((5, 6, 7), (8, 9, 0), (10, 0)),
    TokenPair((11,), (12, 0), (13, 14, 15, 0)),
    TokenPair((5, 6), (9, 9, 9, 0), (8, 0)),
]


@pytest.fixture
def make(supervised):
    """``make(**dpo settings) -> DPO``, its reference known."""

    def build(pairs=PAIRS, **dpo) -> DPO:
        dpo = {"batch_size": 3, "micro_batch_size": 3, "lr": 1e-2, "warmup": 0} | dpo
        module = supervised(DPO, dpo_cast, "dpo", held_out=[], **dpo)
        module.known = module.reference(pairs)
        return module

    return build


def plain_logprob(model: ActorCritic, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """The sum by the model's own logits, one text alone."""
    with model.roles.use("policy"):
        logits = model.backbone.model(torch.tensor([prompt + answer])).logits[0].double()
    table = logits.log_softmax(dim=-1)
    return sum(table[len(prompt) + t - 1, token].item() for t, token in enumerate(answer))


def test_before_the_first_step_policy_and_reference_are_the_same(make):
    loss, terms = make().loss(PAIRS, 3)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert terms["chosen_reward"].abs().max() < 1e-5 and terms["rejected_reward"].abs().max() < 1e-5


def test_logprobs_are_those_of_a_plain_loop(make, disturb):
    module = make()
    disturb(module.actor_critic)
    _, terms = module.loss(PAIRS, 3)
    model = module.actor_critic
    for side in ("chosen", "rejected"):
        for pair, found in zip(PAIRS, terms[f"{side}_logprob"], strict=True):
            assert found.item() == pytest.approx(
                plain_logprob(model, pair.prompt, getattr(pair, side)), abs=1e-4
            )


def test_the_reference_stays_when_the_policy_moves(make, disturb):
    module = make()
    before = module.reference(PAIRS)
    disturb(module.actor_critic)
    assert module.reference(PAIRS) == before == module.known


def test_rewards_margin_and_accuracy_belong_together(make, disturb):
    module = make(beta=0.3)
    disturb(module.actor_critic)
    loss, terms = module.loss(PAIRS, 3)
    lead = terms["chosen_reward"] - terms["rejected_reward"]
    assert loss.item() == pytest.approx(-torch.nn.functional.logsigmoid(lead).mean().item(), abs=1e-6)
    figures = module.figures(terms)
    assert figures["margin"] == pytest.approx(lead.mean().item())
    assert figures["accuracy"] == pytest.approx((lead > 0).float().mean().item())


def test_ipo_averages_over_the_tokens_of_an_answer_and_the_rewards_do_not(make, disturb):
    module = make(loss="ipo", beta=0.5)
    disturb(module.actor_critic)
    loss, terms = module.loss(PAIRS, 3)
    total = 0.0
    for i, pair in enumerate(PAIRS):
        chosen = terms["chosen_reward"][i].item() / 0.5 / len(pair.chosen)
        rejected = terms["rejected_reward"][i].item() / 0.5 / len(pair.rejected)
        total += (chosen - rejected - 1.0) ** 2
    assert len({len(pair.chosen) for pair in PAIRS} | {len(pair.rejected) for pair in PAIRS}) > 1
    assert loss.item() == pytest.approx(total / 3, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"loss": "ipo"}, {"label_smoothing": 0.2}])
def test_micro_batches_change_no_gradient(make, disturb, settings):
    module = make(**settings)
    disturb(module.actor_critic)
    parameters = module.actor_critic.parameters_of("policy")
    whole = torch.autograd.grad(module.loss(PAIRS, 3)[0], parameters)
    pieces = [torch.autograd.grad(module.loss([pair], 3)[0], parameters) for pair in PAIRS]
    for one, *several in zip(whole, *pieces, strict=True):
        assert torch.allclose(one, sum(several), rtol=1e-4, atol=1e-5)


def test_a_rule_is_learned(make):
    module = make(beta=0.5)
    optimizer = module.configure_optimizers()
    optimizer.param_groups[0]["lr"] = 1e-2
    for _ in range(20):
        optimizer.zero_grad()
        loss, terms = module.loss(PAIRS, 3)
        loss.backward()
        optimizer.step()
    assert module.figures(terms)["accuracy"] == 1.0 and loss.item() < 0.3


def test_an_answer_is_tokenised_as_in_running_text_and_ends(model_folders):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
    together = tokenizer("the soup", add_special_tokens=False).input_ids
    before = tokenizer("the", add_special_tokens=False).input_ids
    assert before + answer_ids(tokenizer, before, " soup") == [*together, tokenizer.eos_token_id]
    cut = tokenizer("the so", add_special_tokens=False).input_ids
    inside = answer_ids(tokenizer, cut, "up")
    assert inside[:-1] == tokenizer("up", add_special_tokens=False).input_ids


def test_what_is_too_long_loses_the_beginning_of_the_prompt_first(model_folders):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
    ids = [5, 6, 7, 8, 9]
    whole = answered_pair(tokenizer, ids, " soup", " bread soup", max_length=100)
    assert whole.prompt == tuple(ids)
    longest = max(len(whole.chosen), len(whole.rejected))
    cut = answered_pair(tokenizer, ids, " soup", " bread soup", max_length=longest + 2)
    assert cut.prompt == (8, 9) and cut.chosen == whole.chosen
    tight = answered_pair(tokenizer, ids, " soup", " bread soup", max_length=2)
    assert tight.prompt == (9,) and len(tight.chosen) == len(tight.rejected) == 1
