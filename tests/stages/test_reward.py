"""The reward stage: scores are those that PPO will read, and a rule in the pairs is learned."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.config.cli import main
from rlhf_lightning.config.schema import Config
from rlhf_lightning.data.padding import right_pad
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import ppo_cast, reward_cast
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
def make(model_folders):
    def build(**options) -> RewardModel:
        config = Config(
            stage={"name": "reward"},
            model={"path": str(model_folders["llama"]), "quantization": "none", "dtype": "float32"},
            reward_model={"batch_size": 4, "micro_batch_size": 4, "warmup": 0} | options,
            reward={"kind": "length", "target": 3},
        )
        torch.manual_seed(0)
        actor_critic = ActorCritic(
            load_backbone(config.model), config.model, cast=reward_cast(config.model), temperature=1.0
        )
        return RewardModel(actor_critic, config, config.reward_model, steps=1, held_out=PAIRS)

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
    assert 0 <= found["ece"] <= 0.5 and -1 <= found["length_correlation"] <= 1


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
    ids, mask = right_pad([pair.prompt + pair.chosen for pair in PAIRS], pad_id=3)
    assert loaded.score(ids, mask).mean().item() == pytest.approx(0.0, abs=1e-4)
    assert torch.equal(loaded.value_head.weight, loaded.score_head.weight)
    assert torch.equal(loaded.value_head.bias, loaded.score_head.bias)


def table(folder: Path) -> list[dict[str, str]]:
    measured = ("time/", "throughput/", "memory/")
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in csv.DictReader(file)]


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
