"""What a reward model's path leads to, from folders as runs leave them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import reward_cast
from rlhf_lightning.rewards.learned import LearnedReward
from rlhf_lightning.serving.find import TINY, find_reward_model
from rlhf_lightning.serving.load import load_reward_model


def make_run(folder: Path, model: ModelConfig, stage: str = "reward") -> Path:
    """A finished run without its adapters."""
    folder.mkdir()
    settings = {"stage": {"name": stage}, "model": model.model_dump(mode="json")}
    (folder / "config_resolved.yaml").write_text(yaml.safe_dump(settings))
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
    return folder


@pytest.fixture
def run(tmp_path: Path, model_folders: dict[str, Path], disturb) -> tuple[Path, ActorCritic]:
    """A run of stage=reward on the small Llama, and the model that it saved."""
    model = ModelConfig(name="llama", path=str(model_folders["llama"]), quantization="none", dtype="float32")
    torch.manual_seed(2)
    backbone = load_backbone(model)
    trained = ActorCritic(backbone, model, cast=reward_cast(model), temperature=1.0)
    disturb(trained)
    with torch.no_grad():
        trained.score_head.weight.normal_()
        trained.score_head.bias.fill_(0.5)
    folder = make_run(tmp_path / "run", model)
    trained.save(folder / "adapters")
    return folder, trained


def test_a_run_scores_as_it_did_in_training(run: tuple[Path, ActorCritic]) -> None:
    folder, trained = run
    served = load_reward_model(str(folder), batch_size=2)
    local = LearnedReward(
        trained.score,
        trained.backbone.tokenizer,
        LearnedRewardConfig(kind="learned", path=str(folder)),
        context=trained.backbone.context_length,
    )
    prompts, responses = ["the soup", "we", "a slow waiter"], [" was warm", "", " brought a cold plate"]
    expected = local(prompts, responses).scores
    torch.testing.assert_close(served.reward(prompts, responses).scores, expected, atol=1e-6, rtol=1e-6)
    assert expected.std() > 0.01
    assert served.name == "llama" and "stage reward, finished" in served.description


def test_settings_come_from_the_run_also_for_its_adapter(run: tuple[Path, ActorCritic]) -> None:
    folder, _ = run
    whole, part = find_reward_model(str(folder)), find_reward_model(str(folder / "adapters" / "reward"))
    assert whole.adapter == part.adapter == str(folder / "adapters" / "reward")
    assert whole.model == part.model and whole.model.quantization == "none"
    assert find_reward_model(str(folder), base="elsewhere").model.path == "elsewhere"


def test_an_adapter_alone_names_its_backbone(tmp_path: Path) -> None:
    assert find_reward_model("tiny").model == TINY
    folder = Path(shutil.copytree(tiny_path("reward"), tmp_path / "reward"))
    config = json.loads((folder / "adapter_config.json").read_text())

    def write(base: str | None) -> None:
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))

    write("owner/model")
    found = find_reward_model(str(folder))
    assert found.model == ModelConfig(name="model", path="owner/model")
    assert find_reward_model(str(folder), base="tiny").model == TINY
    write(str(tiny_path("model")))
    assert find_reward_model(str(folder)).model == TINY
    write(None)
    with pytest.raises(UserError, match="does not say which model it was trained on: give --model"):
        find_reward_model(str(folder))


def test_what_is_no_reward_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "ppo", TINY, stage="ppo")
    with pytest.raises(UserError, match=r"RUN=.* is a run of stage=ppo, which left no reward adapter"):
        find_reward_model(str(run))
    with pytest.raises(UserError, match=r"RUN=.*nowhere: there is no such folder"):
        find_reward_model(str(tmp_path / "nowhere"))
