"""The reward stage: scores are those that PPO will read, and a rule in the pairs is learned."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.build import build_parts
from rlhf_lightning.config.cli import main
from rlhf_lightning.config.schema import Config
from rlhf_lightning.data.padding import right_pad
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import ppo_cast, reward_cast
from rlhf_lightning.run import fit
from rlhf_lightning.stages.reward import RewardModel
from rlhf_lightning.types import TokenPair

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    TokenPair((5, 6, 7), (8, 9, 0), (10, 0)),
    TokenPair((), (8, 12, 0), (13, 14, 15, 16, 0)),
    TokenPair((5, 6), (9, 8, 9, 0), (11, 0)),
    TokenPair((11,), (8, 0), (9, 0)),
]
"""Token 8 stands in every chosen answer, and in no other."""


@pytest.fixture
def make(supervised):
    def build(**options) -> RewardModel:
        options = {"batch_size": 4, "micro_batch_size": 4, "warmup": 0} | options
        return supervised(RewardModel, reward_cast, "reward_model", held_out=PAIRS, **options)

    return build


def test_scores_of_pairs_are_those_of_two_texts_read_at_their_last_real_token(make, disturb):
    module = make()
    disturb(module.actor_critic)
    _, terms = module.loss(PAIRS, len(PAIRS))
    for side in ("chosen", "rejected"):
        ids, mask = right_pad([pair.prompt + getattr(pair, side) for pair in PAIRS], pad_id=3)
        assert torch.allclose(terms[side], module.actor_critic.score(ids, mask), atol=1e-5)


def test_the_loss_is_bradley_terry_with_its_margin(make, disturb):
    module = make()
    disturb(module.actor_critic)
    pairs = [
        PAIRS[0],
        TokenPair(*(getattr(PAIRS[2], name) for name in ("prompt", "chosen", "rejected")), 0.7),
    ]
    loss, terms = module.loss(pairs, 2)
    leads = (terms["chosen"] - terms["rejected"]).tolist()
    by_hand = [math.log1p(math.exp(-(lead - margin))) for lead, margin in zip(leads, (0, 0.7), strict=True)]
    assert loss.item() == pytest.approx(sum(by_hand) / 2, abs=1e-5)
    assert terms["chosen_length"].tolist() == [3, 4] and terms["rejected_length"].tolist() == [2, 2]


def test_micro_batches_change_no_gradient(make, disturb):
    module = make()
    disturb(module.actor_critic)
    parameters = [p for group in module.groups().values() for p in group]
    whole = torch.autograd.grad(module.loss(PAIRS, 4)[0], parameters)
    pieces = [torch.autograd.grad(module.loss([pair], 4)[0], parameters) for pair in PAIRS]
    for one, *several in zip(whole, *pieces, strict=True):
        assert torch.allclose(one, sum(several), rtol=1e-4, atol=1e-6)


def test_a_rule_is_learned_and_measured(make):
    module = make()
    optimizer = module.configure_optimizers()
    for group, rate in zip(optimizer.param_groups, (1e-2, 1e-2), strict=True):
        group["lr"] = rate
    for _ in range(25):
        optimizer.zero_grad()
        module.loss(PAIRS, 4)[0].backward()
        optimizer.step()
    found = module.measure(PAIRS)
    assert found["accuracy"] == 1.0 and found["loss"] < 0.1
    assert found["accuracy_low"] < 0.6 and found["accuracy_high"] == 1.0  # four pairs prove little
    _, terms = module.look(PAIRS)
    sure = torch.sigmoid(terms["chosen"] - terms["rejected"]).mean().item()
    assert found["ece"] == pytest.approx(1 - sure, abs=1e-4)  # all are right, so it lacks what it doubts
    scores = torch.cat([terms["chosen"], terms["rejected"]])
    lengths = torch.cat([terms["chosen_length"], terms["rejected_length"]])
    expected = torch.corrcoef(torch.stack([scores, lengths]))[0, 1].item()
    assert found["length_correlation"] == pytest.approx(expected, abs=1e-4)


def test_held_out_chosen_answers_average_zero_also_after_loading(make, disturb, tmp_path, model_folders):
    module = make()
    disturb(module.actor_critic)
    found = module.measure(PAIRS)
    assert found["chosen_score"] == pytest.approx(0.0, abs=1e-4)
    assert found["margin"] == pytest.approx(-found["rejected_score"], abs=1e-4)
    again = module.measure(PAIRS)
    assert again == pytest.approx(found, abs=1e-4)  # measuring twice moves nothing
    module.save_adapters(tmp_path)
    config = module.config.model
    loaded = ActorCritic(
        load_backbone(config),
        config,
        cast=ppo_cast(config, reward_path=str(tmp_path / "reward")),
        temperature=1.0,
    )
    _, before = module.look(PAIRS)
    for side in ("chosen", "rejected"):
        # measured pairs come in the order of their length
        texts = [pair.prompt + getattr(pair, side) for pair in sorted(PAIRS, key=module.size)]
        assert torch.allclose(loaded.score(*right_pad(texts, pad_id=3)), before[side], atol=1e-5)
    assert before["chosen"].mean().item() == pytest.approx(0.0, abs=1e-4)
    assert torch.equal(loaded.value_head.weight, loaded.score_head.weight)
    assert torch.equal(loaded.value_head.bias, loaded.score_head.bias)


def test_equal_scores_are_half_right(make):
    module = make()
    terms = {"chosen": torch.tensor([2.0, 1.0, 0.0]), "rejected": torch.tensor([1.0, 1.0, 4.0])}
    found = module.figures(terms)
    assert found["accuracy"] == 0.5  # right, even, wrong
    assert found["margin"] == pytest.approx(-1.0)


@pytest.fixture
def configure(model_folders, tmp_path):
    """``configure(rows, data={...}, ...) -> Config`` of a small reward model on these rows."""

    def build(rows: list[dict], *, data: dict | None = None, **reward_model) -> Config:
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Config.model_validate(
            {
                "stage": {"name": "reward"},
                "model": {"path": str(model_folders["llama"]), "quantization": "none", "dtype": "float32"},
                "data": {"path": str(file), "held_out": str(file), "format": "jsonl"} | (data or {}),
                "reward_model": {"batch_size": 2, "micro_batch_size": 2, "log_every": 1} | reward_model,
                "reward": {"kind": "length", "target": 3},
                "trainer": {"accelerator": "cpu"},
                "callbacks": {"progress": False},
            }
        )

    return build


ROWS = [
    {"prompt": "the soup", "chosen": " was warm", "rejected": " was cold", "better": 2},
    {"prompt": "a waiter", "chosen": " came back", "rejected": " was slow and cold", "better": 0.5},
]


def test_margins_come_from_their_column(configure):
    found = build_parts(configure(ROWS, data={"margin_field": "better"})).data.dataset.examples
    assert [pair.margin for pair in found] == [2.0, 0.5]
    assert [pair.margin for pair in build_parts(configure(ROWS)).data.dataset.examples] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "data", "said"),
    [
        ({"rejected": " was warm"}, {}, r"chosen and rejected are equal\); data.drop_bad=true leaves"),
        ({"chosen": " "}, {}, r"the chosen answer is empty\); data.drop_bad=true leaves"),
        (
            {"better": "much"},
            {"margin_field": "better"},
            "'better' must be a number of at least 0, not 'much'",
        ),
        ({"better": True}, {"margin_field": "better"}, "'better' must be a number of at least 0, not True"),
        ({"better": -1}, {"margin_field": "better"}, "'better' must be a number of at least 0, not -1"),
        ({}, {"margin_field": "gap"}, r"data.margin_field=gap\b"),
        ({}, {"chosen_field": "good"}, r"data.chosen_field=good\b"),
        ({}, {"held_out": None, "held_out_share": 1e-9}, "leaves 2 to learn from, 0 to measure on"),
        ({}, {"held_out": None, "held_out_share": 1 - 1e-9}, "leaves 0 to learn from, 2 to measure on"),
    ],
)
def test_bad_pairs_are_a_sentence(configure, change, data, said):
    with pytest.raises(UserError, match=said):
        build_parts(configure([ROWS[0] | change, ROWS[1]], data=data))


def test_answers_that_are_cut_to_the_same_end_are_refused(configure, tmp_path):
    rows = [
        ROWS[0],
        {"prompt": "we", "chosen": " came and the soup was warm", "rejected": " sat and the soup was warm"},
    ]
    config = configure(rows, max_length=2)
    with pytest.raises(UserError, match=r"reward_model.max_length=2: 2 of 4 pairs are equal"):
        fit(build_parts(config), config, tmp_path)


def test_each_look_leaves_its_scores_and_the_last_its_picture(configure, tmp_path):
    config = configure(ROWS, epochs=3, eval_every=2)
    parts = build_parts(config)
    seen = []
    train = parts.module.training_step

    def watch(steps):
        seen.append(((tmp_path / "held_out.json").exists(), (tmp_path / "held_out.png").exists()))
        train(steps)

    parts.module.training_step = watch
    fit(parts, config, tmp_path)
    assert seen == [(False, False), (False, False), (True, False)]
    assert (tmp_path / "held_out.png").exists()
    found = json.loads((tmp_path / "held_out.json").read_text())
    assert found.keys() == {"chosen", "rejected", "chosen_length", "rejected_length"}
    row = table(tmp_path)[-1]
    assert sum(found["chosen"]) / 2 == pytest.approx(0.0, abs=1e-5)
    assert sum(found["rejected"]) / 2 == pytest.approx(float(row["eval/rejected_score"]), abs=1e-5)
    assert {"eval/ece", "eval/accuracy_low", "eval/accuracy_high", "eval/length_correlation"} <= row.keys()


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_resumed_run_ends_as_the_unbroken_one(model_folders, tmp_path, monkeypatch):
    words = ["bread", "soup", "menu", "waiter", "plate", "slow", "warm", "cold"]
    rows = [{"prompt": f"the {w}", "chosen": f" {w} was good", "rejected": " it was cold"} for w in words]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    command = [
        "stage=reward", "model=llama7b", f"model.path={model_folders['llama']}", "model.quantization=none",
        "model.dtype=float32", f"data.path={file}", "data=jsonl", f"data.held_out={file}", "logger=none",
        "reward_model.batch_size=2", "reward_model.micro_batch_size=2", "reward_model.log_every=1",
        "reward_model.warmup=0", "callbacks.checkpoint_every=2", "trainer.accelerator=cpu",
    ]  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(ROOT, [*command, f"hydra.run.dir={whole}"]) == 0
    assert len(table(whole)) == 4
    import rlhf_lightning.stages.reward as stage

    taken = stage.RewardModel.training_step

    def dies(self, steps):
        if self.counters["iteration"] == 3:
            raise KeyboardInterrupt
        taken(self, steps)

    with monkeypatch.context() as patch:
        patch.setattr(stage.RewardModel, "training_step", dies)
        assert main(ROOT, [*command, f"hydra.run.dir={broken}"]) != 0
    assert len(table(broken)) == 3
    assert main(ROOT, [f"resume={broken}"]) == 0
    assert table(broken) == table(whole)
    for name in ("adapter_model.safetensors", "score_head.safetensors"):
        one, other = (load_file(folder / "adapters" / "reward" / name) for folder in (whole, broken))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    held_out = json.loads((whole / "held_out.json").read_text())
    assert len(held_out["chosen"]) == len(rows) and (whole / "held_out.png").stat().st_size > 10_000
