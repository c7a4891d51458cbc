"""The PPO loop under every ``advantage=``, on a real Trainer."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.stages.base import Stage

KINDS = {
    "gae": ({"kind": "gae"}, {}),
    "reinforce": ({"kind": "reinforce", "decay": 0.5}, {}),
    "reinforce_plus_plus": ({"kind": "reinforce_plus_plus"}, {}),
    "rloo": ({"kind": "rloo"}, {}),
    "grpo": ({"kind": "grpo"}, {"loss_average": "response"}),
    "dr_grpo": ({"kind": "grpo", "scale": False}, {"loss_average": "constant"}),
    "gspo": ({"kind": "grpo"}, {"loss_average": "response", "ratio": "sequence"}),
}
PAIRS = {"prompts_per_iteration": 4, "samples_per_prompt": 2}
STILL = {"lr": 0.0, "critic_lr": 0.0}
ENDS = {"stop": ["e", "a", "o", "t", "r"]}  # so that lengths differ


@pytest.mark.parametrize("name", KINDS)
def test_at_learning_rate_zero_nothing_moves(make_run, name):
    advantage, ppo = KINDS[name]
    _, history = make_run(advantage=advantage, ppo=PAIRS | STILL | ppo, generation=ENDS)
    for row in history:
        assert row["objective/kl"] == 0.0 and row["policy/clip_fraction"] == 0.0
        assert abs(row["policy/ratio_max"] - 1) < 1e-5 and abs(row["policy/ratio_mean"] - 1) < 1e-5
        assert row["policy/grad_norm"] > 0
    with_critic = {key for key in history[-1] if "critic" in key}
    if name == "gae":
        assert {"critic/loss", "critic/explained_variance", "ppo/critic_lr"} <= with_critic
    else:
        assert not with_critic


def test_without_a_critic_the_policy_is_all_that_trains_and_is_kept(make_run, tmp_path):
    path = tmp_path / "x.ckpt"
    module, _ = make_run(advantage={"kind": "rloo"}, ppo=PAIRS | {"lr": 1e-3}, save=path)
    assert isinstance(module, Stage) and module.actor_critic.value_head is None
    (optimizer,) = module.used_trainer.optimizers
    assert [group["name"] for group in optimizer.param_groups] == ["policy"]
    kept = torch.load(path, weights_only=True)["state_dict"]
    assert kept and all(".policy." in name for name in kept)
    before, after = module.recorder.states[0], module.recorder.states[-1]
    assert all(not torch.equal(before[name], after[name]) for name in before if ".lora_B." in name)
    module.save_adapters(tmp_path / "adapters")
    folders = {path.name for path in (tmp_path / "adapters").iterdir() if path.is_dir()}
    assert folders == {"policy"}
    assert not module.rollout.values.any()


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "gspo"])
def test_micro_batches_change_no_gradient(one_step, name):
    advantage, ppo = KINDS[name]
    found = []
    for size in (8, 2):
        ppo = PAIRS | STILL | ppo | {"micro_batch_size": size, "max_grad_norm": 1e9}
        module = one_step(advantage=advantage, ppo=ppo, generation=ENDS)
        (optimizer,) = module.used_trainer.optimizers
        (group,) = optimizer.param_groups
        found.append(torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in group["params"]]))
        lengths = module.rollout.lengths
        assert lengths.min() < lengths.max()
    assert found[0].norm() > 1e-4
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-3)


def test_resuming_continues_the_running_baseline(make_run, tmp_path):
    advantage, settings = {"kind": "reinforce", "decay": 0.5}, PAIRS | {"iterations": 4, "lr": 1e-3}
    straight, history = make_run(advantage=advantage, ppo=settings)
    half, _ = make_run(advantage=advantage, ppo=settings | {"iterations": 2}, save=tmp_path / "half.ckpt")
    module, rest = make_run(advantage=advantage, ppo=settings, resume=tmp_path / "half.ckpt")
    assert half.baseline.value != straight.baseline.value == module.baseline.value
    for one, two in zip(history[2:], rest, strict=True):
        timeless = {k for k in one if not k.startswith(("time/", "throughput/"))}
        assert {k: one[k] for k in timeless} == {k: two[k] for k in timeless}


def test_the_running_baseline_is_the_decayed_mean_of_earlier_iterations(make_run):
    module, _ = make_run(
        advantage={"kind": "reinforce", "decay": 0.75}, ppo=PAIRS | STILL | {"iterations": 3, "beta": 0.0}
    )
    means = [float(rollout.scores.double().mean()) for rollout in module.recorder.rollouts]
    before_last = 0.75 * means[0] + 0.25 * means[1]
    last = module.recorder.rollouts[-1]
    torch.testing.assert_close(last.advantages[:, 0], last.scores - before_last)
    assert module.baseline.value == pytest.approx(0.75 * before_last + 0.25 * means[2], rel=1e-6)
