"""The PPO stage on a real Trainer: identities that hold whatever the model says."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_lightning.errors import UserError
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.types import Scores


@pytest.mark.parametrize("critic", ["adapter", "shared"])
@pytest.mark.parametrize("family,quantization", [("llama", "none"), ("llama", "nf4"), ("gpt2", "none")])
def test_at_learning_rate_zero_nothing_moves(make_run, family, quantization, critic):
    _, history = make_run(
        family=family,
        ppo={"lr": 0.0, "critic_lr": 0.0, "iterations": 3},
        model={"quantization": quantization, "critic": critic},
    )
    for row in history:
        assert row["objective/kl"] == 0.0
        assert abs(row["policy/ratio_max"] - 1) < 1e-5 and abs(row["policy/ratio_mean"] - 1) < 1e-5
        assert row["policy/clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("rollout_weights", "lean"), [("dequantized", False), ("dequantized", True), ("packed", False)]
)
def test_first_ratio_is_one_where_weights_are_rounded_too(make_run, rollout_weights, lean):
    """bfloat16 over 4-bit weights, held as a copy while sampling and unpacked in the update: the ratio of the
    first epoch is 1 to a thousandth, as long as its batches are those that scored."""
    _, history = make_run(
        ppo={"minibatch_size": 8, "micro_batch_size": 8, "epochs": 1, "lr": 1e-3, "critic_lr": 1e-3},
        model={
            "quantization": "nf4", "dtype": "bfloat16", "rollout_weights": rollout_weights,
            "gradient_checkpointing": lean,
        },
    )  # fmt: skip
    for row in history:  # one step an iteration; in the second the adapter has moved
        assert abs(row["policy/ratio_max"] - 1) < 1e-3 and abs(row["policy/ratio_mean"] - 1) < 1e-3
    assert history[1]["objective/kl"] != 0.0


def test_counters_count_rollouts_steps_responses_and_tokens(make_run):
    module, history = make_run()
    assert module.counters["iteration"] == 2 and module.counters["responses"] == 16
    assert module.counters["optimizer_steps"] == 2 * 2 * 2 == module.used_trainer.global_step
    assert module.counters["tokens"] == sum(row["rollout/tokens"] for row in history)
    assert [row["ppo/epochs_done"] for row in history] == [2.0, 2.0]


def test_micro_batch_size_changes_no_number(make_run):
    adapters = []
    for size in (1, 2, 4):
        module, history = make_run(ppo={"micro_batch_size": size, "lr": 1e-3, "critic_lr": 1e-3})
        adapters.append(({n: p.detach().clone() for n, p in module._trainable().items()}, history[-1]))
    for parameters, row in adapters[1:]:
        for name, tensor in parameters.items():
            torch.testing.assert_close(tensor, adapters[0][0][name], atol=2e-5, rtol=1e-3)
        for name in ("policy/loss", "critic/loss", "objective/score", "policy/grad_norm"):
            assert row[name] == pytest.approx(adapters[0][1][name], abs=1e-4)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(make_run):
    one, two, other = (make_run(seed=seed)[1] for seed in (3, 3, 4))

    def figures(history):
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in history
        ]

    assert figures(one) == figures(two)
    assert figures(one) != figures(other)


def test_learning_raises_the_score(make_run):
    _, history = make_run(
        ppo={
            "iterations": 12, "prompts_per_iteration": 32, "minibatch_size": 16, "micro_batch_size": 16,
            "lr": 1e-2, "critic_lr": 1e-2, "beta": 0.0,
        }
    )  # fmt: skip
    first, last = (sum(row["objective/score"] for row in part) / 3 for part in (history[:3], history[-3:]))
    assert last > first + 0.1


def test_only_adapters_and_heads_move(make_run, model_folders):
    module, _ = make_run(ppo={"lr": 1e-2, "critic_lr": 1e-2})
    fresh = load_backbone(module.config.model).model.state_dict()
    moved = module.actor_critic.backbone.model.state_dict()
    for name, tensor in fresh.items():
        key = name if name in moved else name.replace(".weight", ".base_layer.weight")
        assert torch.equal(moved[key], tensor)
    trained = module._trainable()
    assert all(".lora_" in n or "value_head" in n for n in trained)
    for adapter in ("policy", "critic"):
        assert all(p.norm() > 0 for n, p in trained.items() if f"lora_B.{adapter}." in n)


def test_a_loss_with_no_weight_moves_nothing_of_its_role(make_run):
    _, history = make_run(ppo={"vf_coef": 0.0})
    assert history[-1]["critic/grad_norm"] == 0.0 and history[-1]["policy/grad_norm"] > 0
    _, history = make_run(
        reward=lambda p, r: Scores(torch.zeros(len(r)), {}), ppo={"beta": 0.0, "lam": 1.0, "gamma": 1.0}
    )
    assert history[-1]["critic/grad_norm"] > 0


def test_gradients_are_clipped_by_norm():
    from rlhf_lightning.stages.base import _clip

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert _clip([parameter], 0.5) == pytest.approx(5.0)
    assert parameter.grad.norm() <= 0.5 + 1e-6


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step(make_run, monkeypatch):
    from rlhf_lightning.stages import base

    monkeypatch.setattr(base, "_clip", lambda parameters, limit: math.nan)
    with pytest.raises(UserError, match="gradient of the policy is not finite in iteration 0"):
        make_run()


def test_a_checkpoint_holds_what_trains_and_nothing_else(make_run, tmp_path):
    path = tmp_path / "x.ckpt"
    module, _ = make_run(save=path)
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint["state_dict"]) == set(module._trainable())
    trainable = sum(p.numel() * 4 for p in module._trainable().values())
    assert path.stat().st_size < 2 * trainable * 4
    import json

    json.dumps(checkpoint["hyper_parameters"])


def test_resuming_repeats_the_unbroken_run(make_run, tmp_path):
    settings = {"iterations": 4, "lr": 1e-3, "critic_lr": 1e-3, "kl_target": 0.1, "normalize_scores": True}
    _, straight = make_run(ppo=settings)
    make_run(ppo=settings | {"iterations": 2}, save=tmp_path / "half.ckpt")
    module, rest = make_run(ppo=settings, resume=tmp_path / "half.ckpt")
    assert module.counters["iteration"] == 4 and len(rest) == 2
    for one, two in zip(straight[2:], rest, strict=True):
        timeless = {k for k in one if not k.startswith(("time/", "throughput/"))}
        assert {k: one[k] for k in timeless} == {k: two[k] for k in timeless}


def test_a_checkpoint_with_a_tensor_too_few_is_refused(make_run, tmp_path):
    path = tmp_path / "x.ckpt"
    make_run(save=path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"].popitem()
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match="1 tensors do not match"):
        make_run(resume=path, ppo={"iterations": 4})


def test_adapters_are_saved_for_peft_alone(make_run, tmp_path, model_folders):
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    module, _ = make_run(ppo={"lr": 1e-2})
    module.save_adapters(tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(model_folders["llama"], dtype=torch.float32)
    alone = PeftModel.from_pretrained(base, tmp_path / "adapters" / "policy")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), module.actor_critic.roles.use("policy"):
        torch.testing.assert_close(alone(ids).logits, module.actor_critic.backbone.model(ids).logits)
    head = load_file(tmp_path / "adapters" / "critic" / "value_head.safetensors")
    assert torch.equal(head["weight"], module.actor_critic.value_head.weight)
