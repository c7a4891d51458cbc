"""What the plan says of weights, against the weights of models that are really built."""

from pathlib import Path

import pytest
import torch

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.schema import Config, ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.functional import chunked
from rlhf_lightning.kernels import attention
from rlhf_lightning.models import decoder
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import dpo_cast, ppo_cast, reward_cast, sft_cast
from rlhf_lightning.planning import activations
from rlhf_lightning.planning.plan import make_plan
from rlhf_lightning.planning.roles import roles_of
from rlhf_lightning.planning.shape import shape_of

LEARNED = {"kind": "learned", "path": "tiny"}
LENGTH = {"kind": "length", "target": 8}


def config(
    *, stage: str = "ppo", reward: dict | None = None, advantage: str = "gae", **model: object
) -> Config:
    values = {"stage": {"name": stage}, "model": model, "reward": reward or LENGTH}
    return Config.model_validate(values | {"advantage": {"kind": advantage}})


def built(c: Config) -> ActorCritic:
    stages = {"sft": sft_cast, "dpo": dpo_cast, "reward": reward_cast}
    if c.stage.name in stages:
        cast = stages[c.stage.name](c.model)
    else:
        path = str(tiny_path("reward")) if c.reward.kind == "learned" else None
        cast = ppo_cast(c.model, reward_path=path, critic=c.has_critic)
    return ActorCritic(load_backbone(c.model), c.model, cast=cast, temperature=1.0)


CASES = [
    config(),
    config(dtype="float32", quantization="none"),
    config(critic="shared", reward=LEARNED),
    config(reward=LEARNED, lora={"r": 4, "target_modules": ["q_proj", "down_proj"]}),
    config(advantage="grpo"),
    config(stage="sft", lora={"r": 3, "target_modules": ["layers.2.mlp.up_proj"]}),
    config(stage="reward"),
    config(stage="dpo"),
]


@pytest.mark.parametrize("c", CASES, ids=str)
def test_planned_bytes_are_those_of_the_built_model(c: Config) -> None:
    plan, weights = make_plan(c), built(c).weights()
    assert [role.name for role in plan.roles] == [weight.name for weight in weights[1:]]
    assert plan.backbone == weights[0].bytes
    assert [role.bytes for role in plan.roles] == [weight.bytes for weight in weights[1:]]
    assert plan.learning == sum(weight.trainable for weight in weights)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_backbones_of_other_sizes_and_layouts(model_folders, family: str, quantization: str) -> None:
    model = ModelConfig(path=str(model_folders[family]), quantization=quantization, dtype="float32")
    backbone = load_backbone(model)
    actor_critic = ActorCritic(backbone, model, cast=sft_cast(model), temperature=1.0)
    shape = shape_of(model)
    assert shape.parameters == actor_critic.weights()[0].frozen
    assert shape.stored(quantization, 4) == actor_critic.weights()[0].bytes


def test_a_saved_adapter_brings_its_own_rank_and_a_reference(tmp_path: Path) -> None:
    c = config(lora={"r": 4, "target_modules": ["q_proj", "v_proj"]})
    built(c).save(tmp_path)
    started = config(adapter=str(tmp_path / "policy"))
    policy, critic, reference = roles_of(started, shape_of(started.model))
    assert policy.parameters == reference.parameters == 3 * 2 * 4 * (192 + 192)
    assert not reference.trains
    assert critic.parameters == 193 + 3 * 16 * (4 * 384 + 3 * 768)


def test_llama_2_7b_adapters_by_hand() -> None:
    shape = {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "intermediate": 11008,
        "vocab": 32000, "tied": False,
    }  # fmt: skip
    plan = make_plan(config(path="a/b", shape=shape))
    policy, critic, reference = plan.roles
    # 16 x (4 x (4096 + 4096) + 3 x (4096 + 11008)) x 32 layers
    assert policy.parameters == 39_976_960
    assert critic.parameters == 39_976_960 + 4097
    assert reference.parameters == 0
    assert plan.learning == 2 * 39_976_960 + 4097


def test_targets_that_name_no_layer_are_refused() -> None:
    with pytest.raises(UserError, match=r"names no layer of this model: it has q_proj, k_proj, v_proj"):
        make_plan(config(lora={"target_modules": ["c_attn"]}))


def test_the_engine_is_counted_with_its_own_numbers() -> None:
    ours = {family.__name__ for family in decoder.FAMILIES}
    assert {f"{family.capitalize()}Model" for family in activations.PACKED} == ours
    assert activations.SCORES == attention._SCORES
    assert activations.FEWEST_ROWS == chunked._FEWEST_ROWS
    for kind, device in (("cpu", "cpu"), ("gpu", "cuda")):
        rows = activations.CHUNK_BYTES[kind] // (4 * 49_152)
        assert rows == chunked.default_chunk(49_152, torch.device(device))
