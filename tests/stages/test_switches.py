"""Every switch of the update does what it says, seen in a number that is wrong where the switch is not read.

``test_NAME__what`` is the test of the setting NAME, here and in the other files ``test_switches*.py``.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_lightning.config.algorithms import PPOConfig
from rlhf_lightning.config.schema import GenerationConfig
from rlhf_lightning.rollout.minibatches import minibatch_rows
from rlhf_lightning.types import Scores

STILL = {"lr": 0.0, "critic_lr": 0.0, "max_grad_norm": 1e9}
FAST = {"lr": 2e-2, "critic_lr": 2e-2}


def test_no_switch_is_without_its_test():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_switches*.py"))
    tested = set(re.findall(r"^def test_([a-z]\w*?)__", text, flags=re.MULTILINE))
    assert (set(PPOConfig.model_fields) | set(GenerationConfig.model_fields)) - tested == set()


def nothing(prompts, responses) -> Scores:
    return Scores(torch.zeros(len(responses)), {})


def without_advantages(module) -> None:
    """Values of 0 and a reward of 0 make every advantage 0; only the other terms of the loss are left."""
    torch.nn.init.zeros_(module.actor_critic.value_head.weight)


def moved(module, part: str, start: int = 0, end: int = -1) -> float:
    """The largest change of a tensor with ``part`` in its name, between two iterations."""
    states = module.recorder.states
    return max(
        float((states[end][name] - states[start][name]).abs().max()) for name in states[0] if part in name
    )


def first_gradient(module, role: str) -> Tensor:
    """The gradient of a run's only step as the optimizer saw it: AdamW's first moment is a tenth of it."""
    (optimizer,) = module.used_trainer.optimizers
    group = next(group for group in optimizer.param_groups if group["name"] == role)
    return torch.cat([optimizer.state[p]["exp_avg"].flatten() * 10 for p in group["params"]])


def gradient_of(loss: Tensor, module, role: str) -> Tensor:
    gradients = torch.autograd.grad(loss, module.actor_critic.parameters_of(role))
    return torch.cat([gradient.flatten() for gradient in gradients])


def second_step(one_step, settings) -> tuple[Tensor, Tensor]:
    """(ratios, advantages) of the valid tokens as the second step over the same answers meets them."""
    module = one_step(ppo=FAST | settings)
    rollout = module.rollout
    with torch.no_grad():
        ratio = (module.actor_critic.policy(rollout)[0] - rollout.logprobs).exp()
    return ratio[rollout.response_mask], rollout.advantages[rollout.response_mask]


# ---- how much and how often ---------------------------------------------------------------------------


def test_iterations__rollouts_in_the_run(one_step):
    module = one_step(ppo={"iterations": 3})
    assert (
        len(module.recorder.history)
        == module.counters["iteration"]
        == module.counters["optimizer_steps"]
        == 3
    )


@pytest.mark.parametrize(("epochs", "size", "steps"), [(3, 8, 3), (1, 2, 4), (2, 4, 4)])
def test_epochs__and_minibatch_size_make_the_steps(one_step, epochs, size, steps):
    module = one_step(ppo={"epochs": epochs, "minibatch_size": size, "micro_batch_size": 2})
    assert module.counters["optimizer_steps"] == module.used_trainer.global_step == steps
    assert module.recorder.history[0]["ppo/epochs_done"] == epochs


@pytest.mark.parametrize("size", [2, 4])
def test_minibatch_size__answers_in_one_step(one_step, size):
    """At ratio 1 the loss of a step is minus the mean advantage of the rows that it holds."""
    module = one_step(ppo=STILL | {"minibatch_size": size, "micro_batch_size": 1})
    means = []
    for rows in minibatch_rows(8, size, seed=0, iteration=0, epoch=0):
        assert len(rows) == size
        means.append(float(module.rollout.advantages[rows].sum() / module.rollout.response_mask[rows].sum()))
    assert len(means) == 8 // size and max(means) > min(means)
    assert module.metrics["policy/loss"] == pytest.approx(-sum(means) / len(means), abs=1e-6)


# ---- the policy's loss --------------------------------------------------------------------------------


def check_second_step(one_step, settings) -> None:
    """What the metrics say of two steps over the same answers, against the formula by hand.

    Ratios of the second step are read from a run of one step; in the first all are 1 and nothing is clipped.
    """
    low, high = settings["clip"], settings.get("clip_high", settings["clip"])
    ratio, gain = second_step(one_step, settings)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    flat = ((gain > 0) & (ratio > 1 + high)) | ((gain < 0) & (ratio < 1 - low))
    if high > low:
        assert ((gain > 0) & (ratio > 1 + low) & ~flat).any()  # tokens that only the upper edge decides
    if "dual_clip" in settings:
        bound = (gain < 0) & (ratio > settings["dual_clip"])
        assert bound.any()
        flat, surrogate = flat | bound, torch.where(bound, settings["dual_clip"] * gain, surrogate)
    share = float(flat.float().mean())
    assert share > 0
    metrics = one_step(ppo=FAST | {"epochs": 2} | settings).metrics
    assert metrics["policy/clip_fraction"] == pytest.approx(share / 2, abs=1e-6)
    loss = -float(gain.mean() + surrogate.mean()) / 2
    assert metrics["policy/loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("clip", [0.3, 0.001])
def test_clip__bounds_the_ratio_on_both_sides(one_step, clip):
    check_second_step(one_step, {"clip": clip})


def test_clip__narrow_holds_the_policy_back(one_step):
    wide, narrow = (
        one_step(ppo={"lr": 1e-4, "critic_lr": 0.0, "epochs": 6, "clip": clip}).metrics
        for clip in (0.9, 0.001)
    )
    assert narrow["policy/clip_fraction"] > 0.5 > wide["policy/clip_fraction"]
    assert narrow["policy/approx_kl"] < 0.6 * wide["policy/approx_kl"]


def test_clip_high__is_the_upper_edge_alone(one_step):
    check_second_step(one_step, {"clip": 0.01, "clip_high": 0.5})


def test_dual_clip__bounds_what_a_bad_token_can_cost(one_step):
    check_second_step(one_step, {"clip": 0.01, "dual_clip": 1.02})


def test_ratio__of_the_sequence_is_the_mean_of_its_log_ratios(one_step):
    """The loss of two steps by hand: at the first all ratios are 1."""
    settings = {"clip": 0.01, "ratio": "sequence"}
    module = one_step(ppo=FAST | settings)
    rollout, mask = module.rollout, module.rollout.response_mask
    with torch.no_grad():
        change = torch.where(mask, module.actor_critic.policy(rollout)[0] - rollout.logprobs, 0.0)
    ratio = (change.sum(dim=1) / mask.sum(dim=1)).exp().unsqueeze(1)
    gain = rollout.advantages
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.99, 1.01) * gain)[mask]
    metrics = one_step(ppo=FAST | settings | {"epochs": 2}).metrics
    assert metrics["policy/loss"] == pytest.approx(-float(gain[mask].mean() + surrogate.mean()) / 2, abs=1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(max(1.0, float(ratio.max())), rel=1e-4)
    assert abs(float(ratio.max()) - 1) > 1e-3


def test_loss_average__over_tokens_responses_or_the_limit(one_step):
    """At ratio 1 the gradient is that of minus the averaged gain times log pi; the critic's stays."""
    critics = []
    ends = {"stop": ["e", "a", "o", "t", "r"], "max_new_tokens": 8}
    for average in ("token", "response", "constant"):
        module = one_step(ppo=STILL | {"loss_average": average}, generation=ends)
        rollout, mask = module.rollout, module.rollout.response_mask
        lengths = mask.sum(dim=1)
        assert lengths.min() < lengths.max()
        gains = torch.where(mask, rollout.advantages * module.actor_critic.policy(rollout)[0], 0.0).sum(dim=1)
        loss = {
            "token": gains.sum() / mask.sum(),
            "response": (gains / lengths).mean(),
            "constant": gains.sum() / (8 * 8),
        }[average]
        torch.testing.assert_close(
            first_gradient(module, "policy"), gradient_of(-loss, module, "policy"), atol=1e-6, rtol=1e-3
        )
        critics.append(first_gradient(module, "critic"))
    assert torch.equal(critics[0], critics[1]) and torch.equal(critics[0], critics[2])


def test_entropy_coef__is_the_weight_of_the_mean_entropy(one_step, disturb):
    """Without advantages the bonus is the whole loss of the policy."""
    settings = {"beta": 0.0, "entropy_coef": 0.3}

    def prepare(module):
        disturb(module.actor_critic)
        without_advantages(module)

    module = one_step(ppo=STILL | settings, reward=nothing, prepare=prepare)
    mask = module.rollout.response_mask
    bonus = -0.3 * module.actor_critic.policy(module.rollout)[1][mask].mean()
    torch.testing.assert_close(
        first_gradient(module, "policy"), gradient_of(bonus, module, "policy"), atol=1e-6, rtol=1e-3
    )
    module = one_step(ppo=settings | {"lr": 1e-3}, reward=nothing, prepare=prepare)
    after = module.actor_critic.policy(module.rollout)[1][mask].mean()
    assert float(after.detach()) > module.metrics["objective/entropy"] + 1e-3


# ---- the KL -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_in__the_loss_pulls_to_the_reference(one_step, disturb, kind):
    settings = {"kl_in": "loss", "kl_estimator": kind, "beta": 0.3}

    def prepare(module):
        disturb(module.actor_critic)
        without_advantages(module)

    def mean_kl(module) -> Tensor:
        rollout = module.rollout
        k1 = (module.actor_critic.policy(rollout)[0] - rollout.ref_logprobs)[rollout.response_mask]
        return (k1.square() / 2 if kind == "k2" else (-k1).exp() - 1 + k1).mean()

    module = one_step(ppo=STILL | settings, reward=nothing, prepare=prepare)
    assert not module.rollout.rewards.any() and not module.rollout.advantages.any()
    before = mean_kl(module)
    assert float(before.detach()) > 0.01
    torch.testing.assert_close(
        first_gradient(module, "policy"), gradient_of(0.3 * before, module, "policy"), atol=1e-5, rtol=1e-3
    )
    module = one_step(ppo=settings | {"lr": 1e-3}, reward=nothing, prepare=prepare)
    assert float(mean_kl(module).detach()) < 0.95 * float(before.detach())


@pytest.mark.parametrize(("target", "horizon", "factor"), [(1e-3, 8, 1.2), (1e-3, 32, 1.05), (1e6, 80, 0.98)])
def test_kl_target__and_kl_horizon_steer_beta(one_step, disturb, target, horizon, factor):
    """An error of more than a fifth counts as a fifth; 8 answers act by 8 / horizon."""
    settings = {
        "iterations": 2,
        "beta": 0.1,
        "kl_estimator": "k3",
        "kl_target": target,
        "kl_horizon": horizon,
    }
    module = one_step(ppo=STILL | settings, prepare=lambda module: disturb(module.actor_critic))
    first, second = module.recorder.history
    assert first["ppo/beta"] == 0.1 and second["ppo/beta"] == pytest.approx(0.1 * factor)
    rollout = module.rollout  # the second: its rewards are made with the new beta
    expected = rollout.scores - 0.1 * factor * rollout.kl.sum(dim=1)
    torch.testing.assert_close(rollout.rewards.sum(dim=1), expected)


def test_kl_horizon__without_a_target_beta_stays(one_step, disturb):
    module = one_step(
        ppo={"iterations": 2, "beta": 0.1, "kl_horizon": 8},
        prepare=lambda module: disturb(module.actor_critic),
    )
    assert [row["ppo/beta"] for row in module.recorder.history] == [0.1, 0.1]


def test_target_kl__ends_the_epochs_and_steps_no_further(one_step):
    module = one_step(ppo=FAST | {"epochs": 4, "target_kl": 1e-4})
    once, never = one_step(ppo=FAST), one_step(ppo=FAST | {"epochs": 4, "target_kl": 1e6})
    assert module.counters["optimizer_steps"] == 1 and module.metrics["ppo/epochs_done"] == 1.0
    assert never.counters["optimizer_steps"] == 4
    assert all(
        torch.equal(tensor, once.recorder.states[-1][n]) for n, tensor in module.recorder.states[-1].items()
    )


# ---- the critic's loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.1, 0.7])
def test_vf_coef__is_the_weight_of_half_the_squared_error(one_step, weight):
    module = one_step(ppo=STILL | {"vf_coef": weight})
    rollout = module.rollout
    values = module.actor_critic.values(rollout)[:, :-1]
    loss = weight * 0.5 * (values - rollout.returns)[rollout.response_mask].square().mean()
    torch.testing.assert_close(
        first_gradient(module, "critic"), gradient_of(loss, module, "critic"), atol=1e-6, rtol=1e-3
    )


@pytest.mark.parametrize("limit", [None, 0.001, 0.05])
def test_clip_value__bounds_the_second_step(one_step, limit):
    module = one_step(ppo=FAST | {"clip_value": limit})
    rollout, mask = module.rollout, module.rollout.response_mask
    with torch.no_grad():
        value = module.actor_critic.values(rollout)[:, :-1][mask]
    old, target = rollout.values[mask], rollout.returns[mask]
    error = (value - target).square()
    bounded = error if limit is None else (old + (value - old).clamp(-limit, limit) - target).square()
    losses = 0.25 * ((old - target).square().mean() + torch.maximum(error, bounded).mean())
    module = one_step(ppo=FAST | {"clip_value": limit, "epochs": 2})
    assert module.metrics["critic/loss"] == pytest.approx(float(losses), rel=1e-4)
    share = float((bounded > error).float().mean())
    assert module.metrics["critic/clip_fraction"] == pytest.approx(share / 2, abs=1e-6)
    assert (share > 0) == (limit is not None)


# ---- the steps ----------------------------------------------------------------------------------------


def test_lr__is_the_size_of_the_policys_first_step(one_step):
    module = one_step(ppo={"lr": 3e-3, "critic_lr": 0.0})
    assert moved(module, ".policy.") == pytest.approx(3e-3, rel=1e-3)
    assert moved(module, ".critic.") == moved(module, "value_head") == 0.0
    assert module.metrics["ppo/lr"] == 3e-3 and module.metrics["ppo/critic_lr"] == 0.0


def test_critic_lr__is_the_size_of_the_critics_first_step(one_step):
    module = one_step(ppo={"lr": 0.0, "critic_lr": 3e-3})
    assert moved(module, ".policy.") == 0.0
    assert moved(module, ".critic.") == pytest.approx(3e-3, rel=1e-3)
    assert moved(module, "value_head") == pytest.approx(3e-3, rel=1e-3)


def test_max_grad_norm__bounds_each_roles_gradient(one_step):
    norms = {}
    for limit in (1e9, 1e-3):
        module = one_step(ppo={"max_grad_norm": limit})
        norms[limit] = {role: float(first_gradient(module, role).norm()) for role in ("policy", "critic")}
        for role in norms[limit]:  # the metric is the norm before
            assert module.metrics[f"{role}/grad_norm"] == pytest.approx(norms[1e9][role], rel=1e-3)
    assert all(norm > 2e-3 for norm in norms[1e9].values())
    assert norms[1e-3] == pytest.approx({"policy": 1e-3, "critic": 1e-3}, rel=1e-2)


def test_warmup__rises_linearly_in_steps(one_step):
    module = one_step(ppo={"iterations": 5, "warmup": 3, "lr": 4e-3, "critic_lr": 8e-3})
    history = module.recorder.history
    assert [row["ppo/lr"] for row in history] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3])
    assert [row["ppo/critic_lr"] for row in history] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3])
    assert moved(module, ".policy.", 0, 1) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_lr_schedule__over_the_run(one_step, schedule, factors):
    module = one_step(ppo={"iterations": 4, "lr_schedule": schedule, "lr": 1e-3, "critic_lr": 2e-3})
    assert [row["ppo/lr"] / 1e-3 for row in module.recorder.history] == pytest.approx(factors)
    assert [row["ppo/critic_lr"] / 2e-3 for row in module.recorder.history] == pytest.approx(factors)


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_critic_warmup__only_the_critic_learns_at_first(one_step, critic):
    settings = {"iterations": 3, "critic_warmup": 2, "lr": 1e-2, "critic_lr": 1e-2, "entropy_coef": 0.1}
    module = one_step(ppo=settings, model={"critic": critic})
    first, second, third = module.recorder.history
    for start, row in ((0, first), (1, second)):
        assert moved(module, ".policy.", start, start + 1) == 0.0
        assert moved(module, "value_head", start, start + 1) > 1e-3
        assert row["policy/grad_norm"] == 0.0 and row["critic/grad_norm"] > 0
    assert moved(module, ".policy.", 2, 3) > 1e-3 and third["policy/grad_norm"] > 0
    if critic == "adapter":
        assert moved(module, ".critic.", 0, 1) > 1e-3
