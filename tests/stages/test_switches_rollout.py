"""Every switch of the rollout, the scores and the advantages, and the model's that no other test flips.

``test_NAME__what`` is the test of the setting NAME; ``test_switches.py`` sees to it that none is missing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhf_lightning.config.schema import GenerationConfig
from rlhf_lightning.kernels import blocks
from rlhf_lightning.kernels.blocks import MLPHalf
from rlhf_lightning.rollout.generate import generate
from rlhf_lightning.types import Scores

STILL = {"lr": 0.0, "critic_lr": 0.0}
ENDS = {"stop": ["e", "a", "o", "t", "r"]}  # so that some of the answers end before the limit


def row_numbers(prompts, responses) -> Scores:
    return Scores(torch.arange(len(responses)) - 2.5, {})


def was_cut(rollout) -> Tensor:
    """Which answers ran to the limit, (B,); there are some of both kinds."""
    cut = torch.tensor([reason == "length" for reason in rollout.ended])
    assert cut.any() and not cut.all()
    return cut


# ---- which answers ------------------------------------------------------------------------------------


def test_prompts_per_iteration__times_samples_is_the_rollout(one_step):
    module = one_step(ppo=STILL | {"prompts_per_iteration": 3, "minibatch_size": 3, "micro_batch_size": 3})
    assert len(module.rollout) == module.counters["responses"] == 3 == len(set(module.rollout.prompts))


def test_samples_per_prompt__stand_side_by_side_and_differ(one_step):
    module = one_step(ppo=STILL | {"prompts_per_iteration": 2, "samples_per_prompt": 4})
    rollout = module.rollout
    assert len(rollout) == 8 and rollout.rows.tolist() == list(range(8))
    assert len(set(rollout.prompts[:4])) == len(set(rollout.prompts[4:])) == 1
    assert rollout.prompts[0] != rollout.prompts[4]
    for start in (0, 4):
        assert len({tuple(row) for row in rollout.response_ids[start : start + 4].tolist()}) == 4


def rows_computed(module) -> tuple[list[int], list[int]]:
    """Rows of every forward that samples and of every forward that scores, from now on."""
    model = module.actor_critic
    sampling: list[int] = []
    scoring: list[int] = []
    cells, speaker = model._cells, model.speaker

    def scored(ids, *args, **keywords):
        scoring.append(len(ids))
        return cells(ids, *args, **keywords)

    def spoken(*args, **keywords):
        made = speaker(*args, **keywords)
        made.start, made.step = counting(made.start), counting(made.step)
        return made

    def counting(own):
        def call(*args):
            hidden = own(*args)
            sampling.append(len(hidden))
            return hidden

        return call

    model._cells, model.speaker = scored, spoken
    return sampling, scoring


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_micro_batch_size__and_batch_size_bound_the_rows_of_a_forward(one_step, attention):
    """8 answers, 2 a pass: policy, reference and values for the rollout, policy and values for the step."""
    seen: list[tuple[list[int], list[int]]] = []
    one_step(
        ppo=STILL | {"micro_batch_size": 2}, generation={"batch_size": 4}, model={"attention": attention},
        prepare=lambda module: seen.append(rows_computed(module)),
    )  # fmt: skip
    ((sampling, scoring),) = seen
    assert scoring == [2] * (3 + 2) * 4
    assert max(sampling) == 4 and len(sampling) >= 2 * 8 - 7


@pytest.mark.parametrize("size", [1, 3, 8])
def test_batch_size__rows_sampled_side_by_side(one_step, size):
    seen: list[tuple[list[int], list[int]]] = []
    one_step(
        ppo=STILL, generation={"batch_size": size, "max_new_tokens": 1},
        prepare=lambda module: seen.append(rows_computed(module)),
    )  # fmt: skip
    assert seen[0][0] == {1: [1] * 8, 3: [3, 3, 2], 8: [8]}[size]


@pytest.mark.parametrize("ignored", [False, True])
def test_ignore_eos__samples_to_the_limit(one_step, ignored):
    ends = frozenset(range(0, 320, 3))

    def often(module):  # a third of all tokens would end an answer
        module.actor_critic.backbone = replace(module.actor_critic.backbone, end_ids=ends)

    rollout = one_step(ppo=STILL, generation={"ignore_eos": ignored}, prepare=often).rollout
    drawn = torch.isin(rollout.response_ids, torch.tensor(sorted(ends))) & rollout.response_mask
    followed = drawn[:, :-1] & rollout.response_mask[:, 1:]
    assert drawn.any() and bool(followed.any()) == ignored
    assert set(rollout.ended) == ({"length"} if ignored else {"eos", "length"})
    assert bool(rollout.response_mask.all()) == ignored


@pytest.mark.parametrize("limit", [1, 5])
def test_max_new_tokens__is_the_longest_answer(one_step, limit):
    module = one_step(ppo=STILL, generation={"max_new_tokens": limit})
    assert module.rollout.response_ids.shape == (8, limit) and "length" in module.rollout.ended


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature__divides_the_logits_of_every_pass(one_step, disturb, temperature):
    module = one_step(
        ppo=STILL,
        generation={"temperature": temperature},
        prepare=lambda module: disturb(module.actor_critic),
    )
    model, rollout = module.actor_critic, module.rollout
    width = rollout.prompt_ids.shape[1]
    row = int(rollout.prompt_mask.sum(dim=1).argmax())  # the longest prompt has no padding
    answer = rollout.response_ids[row, : rollout.lengths[row]]
    ids = torch.cat([rollout.prompt_ids[row], answer])[None]
    for role, found in (("policy", rollout.logprobs), ("reference", rollout.ref_logprobs)):
        with torch.no_grad(), model.roles.use(role):
            logits = model.backbone.model(ids).logits[0, width - 1 : -1]
        expected = (logits / temperature).log_softmax(dim=1).gather(1, answer[:, None])[:, 0]
        torch.testing.assert_close(found[row, : len(answer)], expected, atol=1e-4, rtol=1e-4)


def test_temperature__low_draws_the_likeliest(one_step):
    module = one_step(ppo=STILL, generation={"temperature": 1e-3})
    likeliest = generate(
        module.actor_critic,
        module.used_trainer.datamodule.dataset()[0],
        module.config.generation,
        seed=0,
        iteration=0,
        greedy=True,
    )
    assert torch.equal(module.rollout.response_ids, likeliest.response_ids)


def test_top_k__and_top_p_leave_the_likeliest(build, prompts_for):
    """PPO refuses both; the sampler has them."""
    model = build()
    prompts = prompts_for(model)

    def ids(greedy: bool = False, **settings) -> list[list[int]]:
        config = GenerationConfig(max_new_tokens=6, **settings)
        return generate(model, prompts, config, seed=0, iteration=0, greedy=greedy).response_ids.tolist()

    likeliest = ids(greedy=True)
    assert ids(top_k=1) == ids(top_p=1e-6) == likeliest != ids() == ids(top_k=320)


def test_top_p__keeps_the_fewest_that_hold_it(build, prompts_for):
    model = build()
    config = GenerationConfig(max_new_tokens=1, top_p=0.5)
    prompts = prompts_for(model, ("the soup",) * 200)
    drawn = set(generate(model, prompts, config, seed=0, iteration=0).response_ids[:, 0].tolist())
    with torch.no_grad(), model.roles.use("policy"):
        shares = model.backbone.model(torch.tensor([prompts.ids[0]])).logits[0, -1].softmax(dim=0)
    ranked, order = shares.sort(descending=True)
    kept = order[: int((ranked.cumsum(0) < 0.5).sum()) + 1].tolist()
    assert drawn <= set(kept) and len(kept) < 320


def test_stop__texts_end_an_answer(one_step):
    module = one_step(ppo=STILL, generation=ENDS)
    rollout = module.rollout
    was_cut(rollout)
    stopped = [
        text for text, reason in zip(rollout.responses, rollout.ended, strict=True) if reason == "stop"
    ]
    assert stopped and all(any(end in text for end in ENDS["stop"]) for text in stopped)
    running = [
        text for text, reason in zip(rollout.responses, rollout.ended, strict=True) if reason == "length"
    ]
    assert not any(end in text for text in running for end in ENDS["stop"])


# ---- scores -------------------------------------------------------------------------------------------


def test_missing_eos_penalty__is_taken_off_cut_answers(one_step):
    module = one_step(ppo=STILL | {"missing_eos_penalty": 0.75}, generation=ENDS)
    rollout = module.rollout
    expected = torch.where(was_cut(rollout), rollout.raw_scores - 0.75, rollout.raw_scores)
    assert torch.equal(rollout.scores, expected)
    assert module.metrics["objective/score"] == pytest.approx(float(rollout.raw_scores.mean()))


def test_normalize_scores__by_the_moments_of_all_so_far(one_step):
    module = one_step(ppo=STILL | {"normalize_scores": True, "iterations": 2})
    first, second = module.recorder.rollouts
    for rollout, seen in (
        (first, first.raw_scores),
        (second, torch.cat([first.raw_scores, second.raw_scores])),
    ):
        expected = (rollout.raw_scores - seen.mean()) / seen.std(correction=0)
        torch.testing.assert_close(rollout.scores, expected, atol=1e-5, rtol=1e-5)


def test_clip_scores__to_both_sides(one_step):
    rollout = one_step(ppo=STILL | {"clip_scores": 1.0}, reward=row_numbers).rollout
    assert rollout.scores.tolist() == [-1.0, -1.0, -0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert rollout.raw_scores.tolist() == [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 4.5]


# ---- rewards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_beta__times_the_kl_is_taken_off_the_score(one_step, disturb, beta):
    module = one_step(ppo=STILL | {"beta": beta}, prepare=lambda module: disturb(module.actor_critic))
    rollout, row = module.rollout, module.metrics
    kl = (rollout.logprobs - rollout.ref_logprobs).sum(dim=1)
    assert kl.abs().min() > 1e-3
    torch.testing.assert_close(
        rollout.rewards.sum(dim=1), rollout.raw_scores - beta * kl, atol=1e-5, rtol=1e-5
    )
    assert row["objective/kl"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert row["objective/reward"] == pytest.approx(
        row["objective/score"] - beta * row["objective/kl"], abs=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("k1", lambda k1: k1),
        ("k2", lambda k1: k1 * k1 / 2),
        ("k3", lambda k1: (-k1).exp() - 1 + k1),
    ],
)
def test_kl_estimator__is_what_each_token_pays(one_step, disturb, kind, formula):
    module = one_step(
        ppo=STILL | {"kl_estimator": kind, "beta": 0.4}, prepare=lambda module: disturb(module.actor_critic)
    )
    rollout = module.rollout
    kl = formula(rollout.logprobs - rollout.ref_logprobs)  # both 0 outside the mask
    torch.testing.assert_close(rollout.kl, kl, atol=1e-5, rtol=1e-4)
    inner = rollout.response_mask[:, 1:]  # all tokens of an answer but its last, which has the score as well
    torch.testing.assert_close(rollout.rewards[:, :-1][inner], -0.4 * kl[:, :-1][inner], atol=1e-5, rtol=1e-4)
    assert module.metrics["objective/kl"] == pytest.approx(float(kl.sum(dim=1).mean()), rel=1e-4)


def test_kl_in__loss_leaves_the_score_alone(one_step, disturb):
    module = one_step(
        ppo=STILL | {"kl_in": "loss", "kl_estimator": "k2", "beta": 0.4},
        prepare=lambda module: disturb(module.actor_critic),
    )
    rollout = module.rollout
    assert rollout.kl.sum(dim=1).min() > 1e-3
    torch.testing.assert_close(rollout.rewards.sum(dim=1), rollout.raw_scores)
    assert (rollout.rewards != 0).sum() <= 8


# ---- advantages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.6])
def test_gamma__discounts_the_score_a_token(one_step, gamma):
    """With lambda 1 a return is the discounted sum of rewards, here of one score at the end."""
    settings = {"gamma": gamma, "lam": 1.0, "whiten_advantages": False}
    rollout = one_step(ppo=STILL | settings, generation=ENDS, reward=row_numbers).rollout
    for row, length in enumerate(rollout.lengths.tolist()):
        expected = [gamma ** (length - 1 - t) * (row - 2.5) for t in range(length)]
        assert rollout.returns[row, :length].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_lam__weighs_the_errors_that_follow(one_step, disturb, lam):
    settings = {"lam": lam, "gamma": 1.0, "whiten_advantages": False, "beta": 0.4}
    rollout = one_step(
        ppo=STILL | settings, generation=ENDS, prepare=lambda module: disturb(module.actor_critic)
    ).rollout
    for row, length in enumerate(rollout.lengths.tolist()):
        values = [*rollout.values[row, :length].tolist(), 0.0]
        rewards = rollout.rewards[row, :length].tolist()
        errors = [rewards[t] + values[t + 1] - values[t] for t in range(length)]
        expected = [sum(lam ** (s - t) * errors[s] for s in range(t, length)) for t in range(length)]
        assert rollout.advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-5)


def test_whiten_advantages__to_mean_0_and_deviation_1_of_the_valid_tokens(one_step):
    white = one_step(ppo=STILL, generation=ENDS).rollout
    plain = one_step(ppo=STILL | {"whiten_advantages": False}, generation=ENDS).rollout
    mask = white.response_mask
    raw = (plain.returns - plain.values)[mask]
    torch.testing.assert_close(plain.advantages[mask], raw, atol=1e-6, rtol=1e-5)
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(white.advantages[mask], expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(white.returns, plain.returns) and not white.advantages[~mask].any()


@pytest.mark.parametrize("bootstrap", [False, True])
def test_bootstrap_truncated__values_the_state_after_a_cut_answer(one_step, bootstrap):
    settings = {"bootstrap_truncated": bootstrap, "gamma": 1.0, "lam": 1.0}
    module = one_step(ppo=STILL | settings, generation=ENDS)
    rollout = module.rollout
    with torch.no_grad():
        after = module.actor_critic.values(rollout).gather(1, rollout.lengths[:, None])[:, 0]
    assert after.abs().min() > 1e-3
    last = torch.where(was_cut(rollout), after, 0.0) if bootstrap else torch.zeros(8)
    expected = (rollout.raw_scores + last)[:, None].expand_as(rollout.returns)[rollout.response_mask]
    torch.testing.assert_close(rollout.returns[rollout.response_mask], expected, atol=1e-5, rtol=1e-4)


# ---- the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradient_checkpointing_runs_layers_again_and_changes_no_number(one_step, monkeypatch, attention):
    """Our decoder and the model's own modules: a first MLP that is opened again in each backward pass."""
    opened: list[int] = []
    right = MLPHalf._open
    monkeypatch.setattr(MLPHalf, "_open", lambda self, *a: opened.append(1) or right(self, *a))

    def watch(module):
        mlp = module.actor_critic.trunk.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_: opened.append(1))

    found = {}
    for checkpointing in (False, True):
        opened.clear()
        module = one_step(
            ppo={"lr": 1e-3, "critic_lr": 1e-3, "epochs": 2},
            model={"gradient_checkpointing": checkpointing, "attention": attention},
            prepare=watch,
        )
        found[checkpointing] = (len(opened), module)
    layers = 2 if attention == "sdpa" else 1  # policy and critic, two steps
    assert found[True][0] - found[False][0] == 2 * 2 * layers
    for name, tensor in found[False][1].recorder.states[-1].items():
        torch.testing.assert_close(found[True][1].recorder.states[-1][name], tensor, atol=1e-5, rtol=1e-3)
    assert not found[True][1].actor_critic.training


def test_lora_rank_scale_and_targets(build):
    model = build(lora={"r": 4, "alpha": 6.0, "target_modules": ["q_proj"]})
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if ".lora_" in name}
    assert len(shapes) == 2 * 2 * 2 and all("q_proj" in name for name in shapes)  # layers, roles, A and B
    assert set(shapes.values()) == {(4, 64), (64, 4)}
    layer = model.trunk.layers[0].self_attn.q_proj
    with torch.no_grad(), model.roles.use("policy"):
        x = torch.eye(64)
        before = layer(x)
        layer.lora_B["policy"].weight.fill_(0.5)
        expected = 6.0 / 4 * (x @ layer.lora_A["policy"].weight.T @ torch.full((4, 64), 0.5))
        torch.testing.assert_close(layer(x) - before, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "attention", "way"),
    [
        ("llama", "sdpa", "ours"),
        ("llama", "eager", "none"),
        ("gpt2", "sdpa", "torch"),
        ("gpt2", "eager", "none"),
    ],
)
def test_attention__chooses_the_kernel_and_no_number(
    build, prompts_for, disturb, monkeypatch, family, attention, way
):
    """Llama-like models: our packed kernels; others: torch's; eager: neither."""
    from torch.nn import functional

    calls: list[str] = []

    def watch(owner, function, name):
        own = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda *a, **k: calls.append(name) or own(*a, **k))

    watch(functional, "scaled_dot_product_attention", "torch")
    watch(blocks, "attend_and_keep", "ours")
    model, other = (disturb(build(family, attention=one)) for one in (attention, "eager"))
    batch = generate(other, prompts_for(other), GenerationConfig(max_new_tokens=6), seed=0, iteration=0)
    with torch.no_grad():
        expected = other.policy(batch)[0]
        calls.clear()
        torch.testing.assert_close(model.policy(batch)[0], expected, atol=1e-4, rtol=1e-4)
    assert set(calls) == {way} - {"none"}
