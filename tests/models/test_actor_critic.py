"""Roles on one backbone: the right position, the right adapter, the right gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import log_softmax

from rlhf_lightning.config.schema import GenerationConfig
from rlhf_lightning.rollout.generate import generate
from rlhf_lightning.types import Generation

FAMILIES = ["llama", "gpt2"]
QUANTIZATION = ["none", "nf4"]


def sampled(actor_critic, prompts, new_tokens: int = 6) -> Generation:
    return generate(actor_critic, prompts, GenerationConfig(max_new_tokens=new_tokens), seed=0, iteration=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", QUANTIZATION)
def test_logprobs_equal_the_models_own_logits_row_by_row(build, prompts_for, disturb, family, quantization):
    """Own head and slices against ``model(ids).logits`` without padding: index, temperature, positions."""
    actor_critic = disturb(build(family, quantization=quantization, temperature=0.5))
    prompts = prompts_for(actor_critic)
    batch = sampled(actor_critic, prompts)
    with torch.no_grad():
        logprobs, entropy = actor_critic.policy(batch)
        for b, ids in enumerate(prompts.ids):
            answer = batch.response_ids[b, : batch.lengths[b]]
            with actor_critic.roles.use("policy"):
                logits = actor_critic.backbone.model(torch.cat([torch.tensor(ids), answer])[None]).logits[0]
            plain = log_softmax(logits[len(ids) - 1 : -1].float() / 0.5, dim=-1)
            torch.testing.assert_close(
                logprobs[b, : len(answer)], plain.gather(1, answer[:, None])[:, 0], atol=1e-4, rtol=0
            )
            torch.testing.assert_close(
                entropy[b, : len(answer)], -(plain.exp() * plain).sum(dim=1), atol=1e-4, rtol=1e-4
            )
    assert logprobs.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_neighbours_change_nothing(build, prompts_for, disturb, family):
    actor_critic = disturb(build(family))
    batch = sampled(actor_critic, prompts_for(actor_critic))
    wide = replace(
        batch,
        prompt_ids=torch.nn.functional.pad(batch.prompt_ids, (7, 0), value=9),
        prompt_mask=torch.nn.functional.pad(batch.prompt_mask, (7, 0)),
        response_ids=torch.nn.functional.pad(batch.response_ids, (0, 5), value=11),
        response_mask=torch.nn.functional.pad(batch.response_mask, (0, 5)),
    )
    with torch.no_grad():
        for read in (lambda g: actor_critic.policy(g)[0], actor_critic.reference, actor_critic.values):
            narrow = read(batch)
            difference = (read(wide)[:, : narrow.shape[1]] - narrow)[:, : batch.response_mask.shape[1]]
            assert difference[batch.response_mask].abs().max() < 1e-4


def test_values_are_read_before_the_token_is_seen(build, prompts_for):
    """V(s_t) comes from position P + t - 1: changing a_t moves V(s_{t+1}) and not V(s_t)."""
    actor_critic = build()
    batch = sampled(actor_critic, prompts_for(actor_critic))
    other = batch.response_ids.clone()
    other[0, 2] = (other[0, 2] + 7) % 300
    with torch.no_grad():
        before, after = actor_critic.values(batch), actor_critic.values(replace(batch, response_ids=other))
    changed = (before - after)[0].abs() > 1e-7
    assert not changed[:3].any() and changed[3]
    assert before.shape == (4, batch.response_ids.shape[1] + 1)


@pytest.mark.parametrize("quantization", QUANTIZATION)
def test_fresh_policy_is_the_reference_to_the_last_bit(build, prompts_for, quantization):
    actor_critic = build(quantization=quantization)
    batch = sampled(actor_critic, prompts_for(actor_critic))
    with torch.no_grad():
        assert torch.equal(actor_critic.policy(batch)[0], actor_critic.reference(batch))


def test_reference_is_the_untouched_backbone_after_the_adapters_moved(build, prompts_for, disturb):
    actor_critic = build()
    batch = sampled(actor_critic, prompts_for(actor_critic))
    with torch.no_grad():
        before = actor_critic.reference(batch)
        disturb(actor_critic)
        assert torch.equal(actor_critic.reference(batch), before)
        assert not torch.allclose(actor_critic.policy(batch)[0], before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", QUANTIZATION)
def test_each_loss_reaches_its_own_adapter_and_head_only(build, prompts_for, disturb, family, quantization):
    actor_critic = disturb(build(family, quantization=quantization))
    batch = sampled(actor_critic, prompts_for(actor_critic))
    everything = dict(actor_critic.named_parameters())
    reads = {"policy": lambda: actor_critic.policy(batch)[0], "critic": lambda: actor_critic.values(batch)}
    for role, read in reads.items():
        actor_critic.zero_grad(set_to_none=True)
        with actor_critic.roles.use(role):
            read().sum().backward()
        touched = {name for name, p in everything.items() if p.grad is not None and p.grad.abs().sum() > 0}
        own = {id(p) for p in actor_critic.parameters_of(role)}
        assert touched == {name for name, p in everything.items() if id(p) in own}
        assert len(touched) > 4


def test_switching_roles_never_changes_who_trains(build, disturb):
    actor_critic = build()
    trains = {name for name, p in actor_critic.named_parameters() if p.requires_grad}
    assert trains and all(".lora_" in name or name.startswith("value_head") for name in trains)
    for role in ("policy", "reference", "critic", "policy"):
        with actor_critic.roles.use(role):
            assert {name for name, p in actor_critic.named_parameters() if p.requires_grad} == trains


def test_roles_nest_and_come_back_after_an_error(build, prompts_for, disturb):
    actor_critic = disturb(build())
    batch = sampled(actor_critic, prompts_for(actor_critic))
    with torch.no_grad():
        policy = actor_critic.policy(batch)[0]
        with actor_critic.roles.use("policy"):
            with pytest.raises(RuntimeError), actor_critic.roles.use("reference"):
                raise RuntimeError
            hidden = actor_critic._hidden(batch, "policy")[:, :-1]
            assert torch.equal(actor_critic._logprobs(hidden, batch)[0], policy)


def test_shared_critic_reads_policy_and_values_in_one_forward(build, prompts_for, disturb):
    actor_critic = disturb(build(critic="shared"))
    batch = sampled(actor_critic, prompts_for(actor_critic))
    logprobs, entropy, values = actor_critic.policy_and_values(batch)
    torch.testing.assert_close(values, actor_critic.values(batch))
    torch.testing.assert_close(logprobs, actor_critic.policy(batch)[0])
    torch.testing.assert_close(entropy, actor_critic.policy(batch)[1])
    values.sum().backward()
    assert any(p.grad is not None for p in actor_critic.parameters_of("policy"))
    actor_critic.zero_grad(set_to_none=True)
    actor_critic.policy_and_values(batch, head_only=True)[2].sum().backward()
    lora = [p for n, p in actor_critic.named_parameters() if ".lora_" in n]
    assert all(p.grad is None for p in lora) and actor_critic.value_head.weight.grad is not None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", QUANTIZATION)
def test_gradient_checkpointing_changes_no_gradient_of_either_adapter(
    build, prompts_for, disturb, family, quantization
):
    gradients = []
    for checkpointing in (False, True):
        actor_critic = disturb(build(family, quantization=quantization, gradient_checkpointing=checkpointing))
        batch = sampled(actor_critic, prompts_for(actor_critic))
        actor_critic.train()
        assert actor_critic.backbone.model.is_gradient_checkpointing is checkpointing
        with actor_critic.roles.use("policy"):
            actor_critic.policy(batch)[0].sum().backward()
        with actor_critic.roles.use("critic"):
            actor_critic.values(batch).sum().backward()
        gradients.append({n: p.grad for n, p in actor_critic.named_parameters() if p.requires_grad})
    assert all(g is not None and g.abs().sum() > 0 for g in gradients[1].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_train_mode_drops_nothing(build, prompts_for):
    """GPT-2's own dropouts are 0.1 in its config; two passes in train mode have to agree to the last bit."""
    actor_critic = build("gpt2")
    batch = sampled(actor_critic, prompts_for(actor_critic))
    actor_critic.train()
    with torch.no_grad():
        assert torch.equal(actor_critic.policy(batch)[0], actor_critic.policy(batch)[0])


def test_gradients_after_a_rollout_equal_gradients_before_it(build, prompts_for, disturb):
    actor_critic = disturb(build(quantization="nf4"))
    batch = sampled(actor_critic, prompts_for(actor_critic))

    def gradients() -> list[torch.Tensor]:
        actor_critic.zero_grad(set_to_none=True)
        with actor_critic.roles.use("policy"):
            actor_critic.policy(batch)[0].sum().backward()
        return [p.grad.clone() for p in actor_critic.parameters_of("policy")]

    before = gradients()
    actor_critic.eval()
    sampled(actor_critic, prompts_for(actor_critic))
    for one, two in zip(before, gradients(), strict=True):
        assert torch.equal(one, two)


def test_four_bit_weights_are_never_packed_for_the_cpu(build, prompts_for, monkeypatch):
    """On a CPU with AVX512-BF16 the library packs in eval mode, and a packed layer passes no gradient."""
    from bitsandbytes.nn import modules

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)

    def packed(*args, **kwargs):
        raise AssertionError("packed")

    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", packed)
    actor_critic = build(quantization="nf4")
    assert any(isinstance(m, modules.Linear4bit) for m in actor_critic.modules())
    sampled(actor_critic.eval(), prompts_for(actor_critic))
    bare = modules.Linear4bit(64, 64, quant_type="nf4").to("cpu").eval()
    with pytest.raises(AssertionError, match="packed"):  # the guard above is what keeps it from happening
        bare(torch.zeros(1, 64))


def test_adapters_cover_every_linear_layer_and_not_the_head(build):
    for family, per_layer in (("llama", 7), ("gpt2", 4)):
        actor_critic = build(family)
        names = [n for n, _ in actor_critic.named_parameters() if ".lora_A.policy." in n]
        assert len(names) == 2 * per_layer and not any("lm_head" in n for n in names)


def test_embeddings_and_head_keep_the_compute_dtype(build):
    model = build(quantization="nf4", dtype="bfloat16").backbone.model
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("quantization", QUANTIZATION)
def test_first_ratio_is_one_within_a_thousandth_in_bfloat16(build, prompts_for, disturb, quantization):
    actor_critic = disturb(build(quantization=quantization, dtype="bfloat16"))
    batch = sampled(actor_critic, prompts_for(actor_critic))
    with torch.no_grad():
        one, two = actor_critic.policy(batch)[0], actor_critic.policy(batch)[0]
    assert one.dtype == torch.float32
    assert ((one - two).exp() - 1)[batch.response_mask].abs().max() < 1e-3


def test_weights_by_role_count_what_is_there(build):
    actor_critic = build(quantization="nf4")
    rows = {row.name: row for row in actor_critic.weights()}
    r, h, m, kv = 16, 64, 128, 32
    per_layer = r * (2 * (h + h) + 2 * (h + kv) + 2 * (h + m) + (m + h))
    assert rows["policy"].trainable == 2 * per_layer and rows["policy"].frozen == 0
    assert rows["critic"].trainable == 2 * per_layer + h + 1
    assert rows["reference"].trainable == rows["reference"].frozen == rows["reference"].bytes == 0
    assert "reward" not in rows
    linear = 2 * (2 * h * h + 2 * h * kv + 3 * h * m)
    assert rows["backbone"].frozen == linear + 320 * h + 5 * h
    assert rows["policy"].bytes == 4 * rows["policy"].trainable
    plain = {row.name: row for row in build().weights()}
    assert rows["backbone"].bytes < plain["backbone"].bytes - 3 * linear
