"""Exact figures against hand-worked numbers and identities, the enumeration against the code that trains."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_lightning.advantages import RunningBaseline
from rlhf_lightning.build import build_parts
from rlhf_lightning.config.algorithms import GAEConfig, PPOConfig
from rlhf_lightning.functional.moments import RunningMoments
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.rollout.collect import collect
from rlhf_lightning.rollout.generate import texts
from rlhf_lightning.rollout.minibatches import take
from rlhf_lightning.stages.losses import UpdateStats, policy_terms
from rlhf_lightning.types import Generation, Scores

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is no part of the package

from benchmarks.exact_optimum.__main__ import main, parse_setting
from benchmarks.exact_optimum.estimators import ESTIMATORS, comparison, settings_of
from benchmarks.exact_optimum.exact import Figures, figures, mean_figures, response_logprobs
from benchmarks.exact_optimum.measure import Result, measure
from benchmarks.exact_optimum.task import (
    END,
    MAX_NEW_TOKENS,
    PROMPTS,
    all_responses,
    judge,
    make_config,
    text_of,
    write_task,
)


def random_problem(seed: int, count: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, reference, rewards = torch.randn(3, count, generator=generator, dtype=torch.float64)
    return policy.log_softmax(0), reference.log_softmax(0), rewards


@pytest.fixture
def exact_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturb) -> ActorCritic:
    """The actor-critic of the task, its policy moved away from the reference."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    write_task(tmp_path, seed=3)
    return disturb(build_parts(make_config(tmp_path, beta=0.3, seed=3)).module.actor_critic)


def test_two_responses_by_hand():
    # ref 1/4 and 3/4, rewards ln 3 and 0, beta 1: exp(r) is 3 and 1, Z = 3/4 + 3/4 = 3/2, pi* = 1/2 and 1/2
    reference = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    rewards = torch.tensor([math.log(3), 0.0], dtype=torch.float64)
    uniform = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    found = figures(uniform, ref_logprobs=reference, rewards=rewards, beta=1.0)
    assert found.j_reference == pytest.approx(0.25 * math.log(3))
    assert found.j_optimum == pytest.approx(math.log(1.5))
    assert found.j_policy == pytest.approx(math.log(1.5))
    assert found.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert found.kl_optimum == pytest.approx(found.kl)
    assert found.kl_to_optimum == pytest.approx(0.0, abs=1e-12) and found.share == pytest.approx(1.0)
    still = figures(reference, ref_logprobs=reference, rewards=rewards, beta=1.0)
    assert still.share == 0.0 and still.kl == 0.0 and still.score == still.j_reference


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0, 10.0])
def test_what_is_missing_to_the_optimum_is_beta_times_the_kl_to_it(beta):
    for seed in range(5):
        policy, reference, rewards = random_problem(seed)
        found = figures(policy, ref_logprobs=reference, rewards=rewards, beta=beta)
        assert found.j_optimum - found.j_policy == pytest.approx(beta * found.kl_to_optimum, rel=1e-12)
        assert found.kl_to_optimum > 0 and found.j_reference < found.j_optimum
        assert found.j_policy == pytest.approx(found.score - beta * found.kl)
        optimum = (reference + rewards / beta).log_softmax(0)
        best = figures(optimum, ref_logprobs=reference, rewards=rewards, beta=beta)
        assert best.j_policy == pytest.approx(best.j_optimum) and best.share == pytest.approx(1.0)
        assert best.kl == pytest.approx(best.kl_optimum)


def test_the_mean_over_prompts_weighs_each_the_same():
    one, two = Figures(*map(float, range(7))), Figures(*map(float, range(2, 9)))
    assert mean_figures([one, two]) == Figures(*map(float, range(1, 8)))


def test_responses_and_texts_are_one_to_one():
    responses = all_responses()
    assert len(responses) == 1 + 7 + 49 + 343 == len(set(responses)) == len({text_of(y) for y in responses})
    assert all(END not in y[:-1] and (y[-1] == END or len(y) == MAX_NEW_TOKENS) for y in responses)


def test_the_rollout_reads_the_same_texts_and_scores(exact_task):
    responses = all_responses()
    batch = as_generation(exact_task, PROMPTS[0], responses)
    assert texts(batch, exact_task.backbone.tokenizer) == tuple(text_of(y) for y in responses)
    # "soup was warm": soup-was 0.7 + was-warm 0.2, words 0.1 + 0.5, two of them cost 0.7
    assert judge("soup", "was warm") == pytest.approx(0.8)
    assert judge("soup", "") == 0.0 and judge("the soup", "soup") == pytest.approx(-0.8 + 0.3 - 0.35)


def as_generation(model: ActorCritic, prompt: str, responses: list[tuple[int, ...]]) -> Generation:
    """All responses to a prompt as a rollout would hold them, with one pad cell too many on the left."""
    ids = model.backbone.tokenizer(prompt).input_ids
    lengths = torch.tensor([[len(y)] for y in responses])
    return Generation(
        prompt_ids=torch.tensor([[END, *ids]]).repeat(len(responses), 1),
        prompt_mask=torch.tensor([[False] + [True] * len(ids)]).repeat(len(responses), 1),
        response_ids=torch.tensor([[*y, *[END] * (MAX_NEW_TOKENS - len(y))] for y in responses]),
        response_mask=torch.arange(MAX_NEW_TOKENS) < lengths,
        rows=torch.arange(len(responses)),
        ended=tuple("eos" if y[-1] == END else "length" for y in responses),
    )


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_enumeration_sums_to_one_and_agrees_with_the_pass_that_scores(exact_task, role):
    responses = all_responses()
    for prompt in PROMPTS:
        batch = as_generation(exact_task, prompt, responses)
        ids = exact_task.backbone.tokenizer(prompt).input_ids
        with torch.no_grad(), exact_task.roles.use(role):
            whole = response_logprobs(exact_task.backbone.model, ids, responses)
            of_tokens = exact_task.policy(batch)[0] if role == "policy" else exact_task.reference(batch)
        assert float(whole.double().exp().sum()) == pytest.approx(1.0, abs=1e-5)
        scored = of_tokens.masked_fill(~batch.response_mask, 0.0).sum(dim=1)
        torch.testing.assert_close(scored, whole, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_gradient_of_an_update_is_the_exact_gradient_of_the_objective(exact_task, beta):
    """All responses as one rollout, each weighing its probability: at ratio 1 nothing is left to chance.

    Values are arbitrary (the critic is disturbed, too) and must drop out.
    """
    config = PPOConfig(beta=beta, lam=1.0, whiten_advantages=False, micro_batch_size=512)
    parameters = exact_task.parameters_of("policy")
    responses = all_responses()
    names = tuple(text_of(y) for y in responses)
    updates, exacts = [], []
    for prompt in PROMPTS:
        rewards = torch.tensor([judge(prompt, name) for name in names])
        batch = as_generation(exact_task, prompt, responses)
        rollout = collect(
            exact_task, batch, prompts=(prompt,) * len(names), responses=names, scored=Scores(rewards, {}),
            config=config, advantage=GAEConfig(kind="gae"), beta=beta, moments=RunningMoments(),
            baseline=RunningBaseline(),
        )  # fmt: skip
        assert rollout.values[:, 0].abs().min() > 1e-3
        weights = rollout.logprobs.sum(dim=1).exp()
        whole = take(rollout, torch.arange(len(names)))
        whole = replace(whole, advantages=whole.advantages * weights.unsqueeze(1))
        with exact_task.roles.use("policy"):
            stats = UpdateStats(steps=1, epochs=1)
            loss = policy_terms(
                *exact_task.policy(whole), whole, config=config, beta=beta, denominator=1, stats=stats
            )
            updates.append(torch.autograd.grad(loss, parameters))
            ids = exact_task.backbone.tokenizer(prompt).input_ids
            logprobs = response_logprobs(exact_task.backbone.model, ids, responses)
            ref_logprobs = rollout.ref_logprobs.sum(dim=1)
            objective = (logprobs.exp() * (rewards - beta * (logprobs - ref_logprobs))).sum()
            exacts.append(torch.autograd.grad(-objective, parameters))
        # The mean return at the first token is the objective: that is what the critic learns.
        mean_return = (weights * rollout.returns[:, 0]).sum()
        assert mean_return.item() == pytest.approx(objective.item(), abs=1e-4)
    for update, exact in zip(updates, exacts, strict=True):
        assert max(float(gradient.abs().max()) for gradient in exact) > 1e-2
        for mine, right in zip(update, exact, strict=True):
            torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-3)


def test_a_short_run_climbs_towards_the_optimum(monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    seen: list[tuple[int, int]] = []
    found = measure(
        1.0,
        0,
        overrides={"ppo.iterations": 5, "ppo.samples_per_prompt": 32, "ppo.minibatch_size": 128},
        tell=lambda done, total: seen.append((done, total)),
    ).figures
    assert seen[-1] == (5, 5)
    assert found.share > 0.3 and found.j_policy < found.j_optimum
    assert found.j_optimum - found.j_policy == pytest.approx(found.kl_to_optimum)


def test_the_command_says_so_where_a_run_falls_short(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    out = tmp_path / "result.json"
    arguments = ["--betas", "1", "--seeds", "0", "--out", str(out)]
    settings = ["ppo.iterations=1", "ppo.samples_per_prompt=4", "ppo.minibatch_size=16", "ppo.lr=0.0"]
    assert main(arguments + [word for setting in settings for word in ("--set", setting)]) == 1
    printed = capsys.readouterr().out
    assert "| 1 | 0 |" in printed and "0.0 %" in printed
    row = json.loads(out.read_text())["runs"][0]
    assert row["share"] == pytest.approx(0.0, abs=1e-6) and row["kl"] == pytest.approx(0.0, abs=1e-9)


def test_every_estimator_is_offered_and_is_set_as_the_command_line_sets_it(tmp_path):
    conf = Path(__file__).resolve().parents[2] / "conf"
    assert sorted(ESTIMATORS) == sorted(path.stem for path in (conf / "advantage").glob("*.yaml"))
    assert settings_of("rloo") == {"advantage.kind": "rloo"}
    assert settings_of("dr_grpo") == {
        "advantage.kind": "grpo",
        "advantage.scale": False,
        "ppo.loss_average": "constant",
    }
    for name in ESTIMATORS:
        config = make_config(tmp_path, beta=0.3, seed=0, overrides=settings_of(name))
        assert config.has_critic == (name == "gae")


def test_the_comparison_has_a_row_an_estimator_and_a_column_a_run():
    """J_ref 0, J* 2 and J 1, 1.5: shares 50 and 75 %; KL 1 and 3 where the optimum's is 2."""
    plain = Figures(
        j_reference=0.0, j_policy=1.0, j_optimum=2.0, score=0.0, kl=1.0, kl_optimum=2.0, kl_to_optimum=0.0
    )
    better = replace(plain, j_policy=1.5, kl=3.0)
    runs = [Result(0.3, 0, plain, 9.0, 4.0, "rloo"), Result(0.3, 1, better, 9.0, 6.0, "rloo")]
    lines = comparison([*runs, *(replace(run, advantage="gae") for run in runs)]).splitlines()
    assert lines[2] == "| RLOO | 50.0 % | 75.0 % | 62.5 % | 1.00 | 5 |"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") and len(lines) == 4


def test_a_short_run_without_a_critic_climbs_and_is_told_by_its_name(monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    line = ["--advantage", "rloo", "--betas", "1", "--seeds", "0", "--set", "ppo.iterations=4"]
    assert main([*line, "--set", "ppo.samples_per_prompt=32"]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row.startswith("| RLOO | ") and float(row.split("|")[2].strip(" %")) > 30


def test_settings_are_read_as_yaml():
    assert parse_setting("ppo.lr=1e-3") == ("ppo.lr", 1e-3)
    assert parse_setting("ppo.clip_value=null") == ("ppo.clip_value", None)
    assert parse_setting("model.critic=shared") == ("model.critic", "shared")
    with pytest.raises(ValueError, match=r"KEY=VALUE"):
        parse_setting("ppo.lr")
