"""Adapters from folders: they train where they should, fit or are refused, and drop nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_lightning.config.schema import GenerationConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.heads import ScalarHead
from rlhf_lightning.rollout.generate import generate


@pytest.fixture
def saved(build, disturb, tmp_path: Path):
    """``saved(**settings) -> folder`` with ``policy``, an adapter, and ``reward``, one with a score head."""

    def make(**settings) -> Path:
        actor_critic = disturb(build(**settings))
        actor_critic.model.save_pretrained(str(tmp_path), selected_adapters=["policy", "critic"])
        (tmp_path / "critic").rename(tmp_path / "reward")
        head = ScalarHead(64)
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-1, 1, 64))
            head.bias.fill_(0.25)
        head.save(tmp_path / "reward" / "score_head.safetensors")
        return tmp_path

    return make


def lora(actor_critic, adapter: str) -> dict[str, torch.Tensor]:
    return {
        n.replace(f".{adapter}", ""): p for n, p in actor_critic.named_parameters() if f".{adapter}." in n
    }


def sampled(actor_critic, prompts_for):
    return generate(
        actor_critic, prompts_for(actor_critic), GenerationConfig(max_new_tokens=6), seed=0, iteration=0
    )


def test_a_loaded_policy_trains_like_a_fresh_one(build, saved):
    folder = saved()
    loaded, fresh = build(adapter=str(folder / "policy")), build()
    assert sum(p.numel() for p in loaded.parameters_of("policy")) == sum(
        p.numel() for p in fresh.parameters_of("policy")
    )
    stored = load_file(folder / "policy" / "adapter_model.safetensors")
    for name, parameter in lora(loaded, "policy").items():
        assert torch.equal(parameter, stored[name.removeprefix("model.")])


def test_the_reference_is_a_frozen_copy_of_the_sft_adapter(build, saved, prompts_for, disturb):
    actor_critic = build(adapter=str(saved() / "policy"))
    batch = sampled(actor_critic, prompts_for)
    with torch.no_grad():
        reference = actor_critic.reference(batch)
        assert torch.equal(actor_critic.policy(batch)[0], reference)  # KL at step 0 is exactly 0
        for parameter in actor_critic.parameters_of("policy"):
            parameter.mul_(1.5)
        assert torch.equal(actor_critic.reference(batch), reference)
        assert not torch.equal(actor_critic.policy(batch)[0], reference)
    assert not any(p.requires_grad for p in lora(actor_critic, "reference").values())


def test_the_critic_starts_from_the_reward_adapter_and_head(build, saved):
    folder = saved()
    actor_critic = build(reward_path=str(folder / "reward"))
    critic, reward = lora(actor_critic, "critic"), lora(actor_critic, "reward")
    assert critic and all(torch.equal(critic[name], reward[name]) for name in critic)
    assert torch.equal(actor_critic.value_head.weight, actor_critic.score_head.weight)
    assert all(p.requires_grad for p in critic.values()) and not any(p.requires_grad for p in reward.values())
    assert not any(p.requires_grad for p in actor_critic.score_head.parameters())
    shared = build(reward_path=str(folder / "reward"), critic="shared")
    assert not torch.equal(shared.value_head.weight, shared.score_head.weight)


def test_the_score_is_read_at_the_last_real_token_whatever_the_padding(build, saved):
    actor_critic = build(reward_path=str(saved() / "reward"))
    rows = [[5, 0, 9, 7, 0], [8, 3]]  # 0 is end and pad at once, also inside
    with torch.no_grad(), actor_critic.roles.use("reward"):
        expected = []
        for row in rows:
            hidden = actor_critic.backbone.model(
                torch.tensor([row]), output_hidden_states=True
            ).hidden_states[-1]
            expected.append(actor_critic.score_head(hidden[0, -1]).item())
    left = torch.tensor([[0, *rows[0]], [0, 0, 0, 0, *rows[1]]])
    right = torch.tensor([[*rows[0], 0], [*rows[1], 0, 0, 0, 0]])
    mask = torch.tensor([[1] * 5 + [0], [1, 1, 0, 0, 0, 0]])
    torch.testing.assert_close(actor_critic.score(right, mask).tolist(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(actor_critic.score(left, mask.flip(1)).tolist(), expected, atol=1e-4, rtol=0)


def test_a_saved_adapters_own_dropout_is_off(build, saved, prompts_for):
    folder = saved(lora={"dropout": 0.5})
    actor_critic = build(adapter=str(folder / "policy"), reward_path=str(folder / "reward"))
    batch = sampled(actor_critic, prompts_for)
    actor_critic.train()
    with torch.no_grad():
        assert torch.equal(actor_critic.policy(batch)[0], actor_critic.policy(batch)[0])
        assert torch.equal(actor_critic.values(batch), actor_critic.values(batch))


def test_a_folder_without_an_adapter_is_refused(build, tmp_path):
    with pytest.raises(UserError, match=r"model\.adapter=.*adapter_config\.json"):
        build(adapter=str(tmp_path))


def test_a_policy_in_place_of_a_reward_is_refused(build, saved):
    with pytest.raises(UserError, match=r"holds an adapter but no score_head\.safetensors"):
        build(reward_path=str(saved() / "policy"))


def test_an_adapter_of_another_model_is_refused(build, saved):
    folder = saved()
    file = folder / "policy" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)
    with pytest.raises(UserError, match="does not fit this backbone: 1 tensors missing"):
        build(adapter=str(folder / "policy"))


def test_an_adapter_of_another_width_is_refused(build, saved):
    folder = saved()
    file = folder / "policy" / "adapter_model.safetensors"
    save_file({n: t.repeat(1, 2) for n, t in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"model\.adapter=.*does not fit"):
        build(adapter=str(folder / "policy"))


def test_a_head_of_another_width_is_refused(build, saved):
    folder = saved()
    narrow = {"weight": torch.zeros(1, 8), "bias": torch.zeros(1)}
    save_file(narrow, folder / "reward" / "score_head.safetensors")
    with pytest.raises(UserError, match=r"weight must have shape \(1, 64\) .*, found \(1, 8\)"):
        build(reward_path=str(folder / "reward"))


def test_layers_that_do_not_exist_are_refused(build):
    with pytest.raises(UserError, match=r"model\.lora\.target_modules=.*nowhere"):
        build(lora={"target_modules": ["nowhere"]})


@pytest.mark.parametrize("key", ["model.adapter", "reward.path"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("trainable_token_indices", [3]),
        ("init_lora_weights", "pissa"),
    ],
)
def test_an_adapter_that_would_change_the_shared_backbone_is_refused(build, saved, key, field, value):
    """Trained biases and copies of modules stay in force where the reference speaks."""
    folder = saved() / ("policy" if key == "model.adapter" else "reward")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    settings = {"adapter": str(folder)} if key == "model.adapter" else {"reward_path": str(folder)}
    with pytest.raises(UserError, match=rf"{key}=.*{field}="):
        build(**settings)


def test_an_adapter_on_the_head_is_refused(build):
    """Logits come from the head's own weight: a term on it would be neither sampled nor scored."""
    with pytest.raises(UserError, match=r"model\.lora\.target_modules names the language-model head"):
        build("llama", lora={"target_modules": ["q_proj", "lm_head"]})
