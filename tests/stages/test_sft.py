"""Supervised fine-tuning: answers alone are learned, and no demonstration sees another."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.config.schema import Config, GenerationConfig
from rlhf_lightning.data.encoding import answer_ids
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import sft_cast
from rlhf_lightning.rollout.generate import generate
from rlhf_lightning.stages.sft import SFT, pack
from rlhf_lightning.types import Demonstration, Prompts

SHOWN = [
    Demonstration((5, 6, 7, 8, 9, 0), 3),
    Demonstration((11, 12, 0), 1),
    Demonstration((13, 14, 15, 16, 0), 0),  # plain text: all of it is learned
    Demonstration((5, 6, 10, 0), 2),
]


@pytest.fixture
def make(supervised):
    def build(**options) -> SFT:
        options = {"batch_size": 4, "micro_batch_size": 4, "max_length": 12, "warmup": 0} | options
        return supervised(SFT, sft_cast, "sft", held_out=SHOWN, **options)

    return build


def plain_nll(model: ActorCritic, one: Demonstration) -> list[float]:
    """By the model's own logits, one text alone."""
    with model.roles.use("policy"), torch.no_grad():
        table = model.backbone.model(torch.tensor([one.ids])).logits[0].double().log_softmax(dim=-1)
    return [-table[t - 1, one.ids[t]].item() for t in range(max(one.learned, 1), len(one.ids))]


@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_is_the_mean_over_answers_tokens_of_a_plain_loop(make, disturb, packing):
    module = make(packing=packing)
    disturb(module.actor_critic)
    each = [value for one in SHOWN for value in plain_nll(module.actor_critic, one)]
    assert module.items(SHOWN) == len(each) == 3 + 2 + 4 + 2
    loss, terms = module.loss(SHOWN, module.items(SHOWN))
    assert loss.item() == pytest.approx(sum(each) / len(each), abs=1e-5)
    assert sorted(terms["nll"].tolist()) == pytest.approx(sorted(each), abs=1e-4)
    assert module.figures(terms)["perplexity"] == pytest.approx(math.exp(sum(each) / len(each)), rel=1e-4)


def test_packing_changes_no_gradient(make, disturb):
    found = []
    for packing in (True, False):
        module = make(packing=packing)
        disturb(module.actor_critic)
        loss, _ = module.loss(SHOWN, module.items(SHOWN))
        found.append(torch.autograd.grad(loss, module.actor_critic.parameters_of("policy")))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_micro_batches_change_no_gradient(make, disturb):
    module = make()
    disturb(module.actor_critic)
    parameters, items = module.actor_critic.parameters_of("policy"), module.items(SHOWN)
    whole = torch.autograd.grad(module.loss(SHOWN, items)[0], parameters)
    pieces = [torch.autograd.grad(module.loss([one], items)[0], parameters) for one in SHOWN]
    for one, *several in zip(whole, *pieces, strict=True):
        assert torch.allclose(one, sum(several), rtol=1e-4, atol=1e-6)


def test_what_lies_beside_changes_nothing(make, disturb):
    """Neither for the first text of a row, the longest, nor for the last, the shortest."""
    module = make(max_length=40)
    disturb(module.actor_critic)
    assert [len(one.ids) for one in pack(SHOWN, 40)[0]] == [6, 5, 4, 3]
    first, last = SHOWN[0], SHOWN[1]
    changed = {one: Demonstration(tuple((i + 3) % 20 + 1 for i in one.ids), one.learned) for one in SHOWN}
    for one, cells in ((first, slice(0, 3)), (last, slice(-2, None))):
        alone = module.loss([one], 1)[1]["nll"]
        others = [other for other in SHOWN if other is not one]
        for company in (others, [changed[other] for other in others]):
            nll = module.loss([*company, one], 1)[1]["nll"]
            assert torch.allclose(nll[cells], alone, atol=1e-5)


def test_packing_by_hand():
    lengths = [[len(one.ids) for one in row] for row in pack(SHOWN, 9)]
    assert lengths == [[6, 3], [5, 4]]
    assert [[len(one.ids) for one in row] for row in pack(SHOWN, 4)] == [[6], [5], [4], [3]]


@pytest.mark.parametrize("ours", [False, True])
def test_rows_are_a_few_demonstrations_long(make, monkeypatch, ours):
    """Four of the longest, and never more than sft.max_length; our decoder takes one text a row."""
    widths = []
    for options in ({"max_length": 100}, {"max_length": 12}, {"max_length": 12, "packing": False}):
        module = make(**options)
        if not ours:
            module.actor_critic.decoder = None
        planted = module.actor_critic.plant
        monkeypatch.setattr(
            module.actor_critic,
            "plant",
            lambda rows, planted=planted: widths.append(planted(rows).ids.shape) or planted(rows),
        )
        module.loss([SHOWN[0]] * 6, 1)
    assert widths == [(6, 6)] * 3 if ours else [(2, 24), (3, 12), (6, 6)]


def test_the_end_is_learned():
    """After enough steps the embedded model writes two short demonstrations, and stops by itself."""
    config = Config(
        stage={"name": "sft"},
        model={"quantization": "none", "dtype": "float32"},
        reward={"kind": "length", "target": 3},
    )
    torch.manual_seed(0)
    backbone = load_backbone(config.model)
    model = ActorCritic(backbone, config.model, cast=sft_cast(config.model), temperature=1.0)
    texts = {"Review of the tea room:": " The soup.", "Lunch at the grill:": " Never again."}
    shown, prompts = [], []
    for prompt, answer in texts.items():
        ids = backbone.tokenizer(prompt).input_ids
        shown.append(Demonstration((*ids, *answer_ids(backbone.tokenizer, ids, answer)), len(ids)))
        prompts.append(tuple(ids))
    module = SFT(model, config, config.sft, steps=1, held_out=[])
    optimizer = module.configure_optimizers()
    optimizer.param_groups[0]["lr"] = 5e-3
    for _ in range(25):
        optimizer.zero_grad()
        loss, _ = module.loss(shown, module.items(shown))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    model.temperature = 0.05  # all but greedy
    asked = Prompts(ids=tuple(prompts), texts=tuple(texts), rows=(0, 1))
    found = generate(model, asked, GenerationConfig(max_new_tokens=12, temperature=0.05), seed=0, iteration=0)
    for one, ids, mask in zip(shown, found.response_ids, found.response_mask, strict=True):
        assert tuple(ids[mask].tolist()) == one.ids[one.learned :]
    assert found.ended == ("eos", "eos")
