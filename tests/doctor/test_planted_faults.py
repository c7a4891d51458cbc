"""Every check fails when its fault is planted: that is what makes a pass worth something.

The small Llama is read by our decoder, GPT-2 and everything with ``model.attention=eager`` by the model's own
modules; a fault that both can have is planted in both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rlhf_lightning.doctor import PROOFS, judge
from rlhf_lightning.doctor.exam import Exam
from rlhf_lightning.kernels import blocks, packing
from rlhf_lightning.kernels.blocks import MLPHalf
from rlhf_lightning.kernels.linears import Linears
from rlhf_lightning.models import actor_critic as passes
from rlhf_lightning.models import decoder
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.decoder import Decoder
from rlhf_lightning.models.speaking import DecoderSpeaker, ModuleSpeaker
from rlhf_lightning.rewards.classifier import ClassifierReward
from rlhf_lightning.rollout import generate as loop
from rlhf_lightning.rollout import sampling
from rlhf_lightning.stages import ppo
from rlhf_lightning.types import Scores

PLANTS = []
MODULES = {"attention": "eager"}


def plant(check: str, **settings):
    """Register a fault: ``f(parts, monkeypatch)`` plants it, ``check`` has to fail."""

    def register(f):
        PLANTS.append(pytest.param(check, f, settings, id=f"{check}-{f.__name__}"))
        return f

    return register


@pytest.mark.parametrize("check,fault,settings", PLANTS)
def test_a_planted_fault_fails_its_check(make_parts, monkeypatch, check, fault, settings):
    parts = make_parts(**settings)
    fault(parts, monkeypatch)
    proof = next(proof for proof in PROOFS if proof.run.__name__ == check)
    with Exam(parts.module, parts.data) as exam:
        finding = judge(proof, exam)
    assert not finding.passed, finding.figure


def test_every_check_has_a_planted_fault():
    assert {p.values[0] for p in PLANTS} == {proof.run.__name__ for proof in PROOFS}


# ---- ratios


@plant("ratio_is_one", family="gpt2", reward="length")
def positions_one_too_far_in_the_update_only(parts, monkeypatch):
    right = passes.position_ids
    monkeypatch.setattr(passes, "position_ids", lambda mask: right(mask) + int(torch.is_grad_enabled()))


@plant("ratio_is_one", generation={"temperature": 0.5}, reward="length")
def temperature_forgotten_in_the_update(parts, monkeypatch):
    right = passes.chunked_token_logprobs

    def forget(*args, temperature, **keywords):
        return right(*args, temperature=1.0 if torch.is_grad_enabled() else temperature, **keywords)

    monkeypatch.setattr(passes, "chunked_token_logprobs", forget)


@plant("ratio_is_one", model=MODULES | {"gradient_checkpointing": True}, reward="length")
def dropout_in_the_adapter_during_the_update(parts, monkeypatch):
    _set_lora_dropout(parts)


@plant("ratio_is_one", reward="length")
def layers_that_differ_where_gradients_are_wanted(parts, monkeypatch):
    right = MLPHalf.__call__

    def differs(self, x):
        return right(self, x) * (1.01 if torch.is_grad_enabled() else 1.0)

    monkeypatch.setattr(MLPHalf, "__call__", differs)


@plant("kl_is_zero", reward="length")
def policy_that_does_not_start_at_its_reference(parts, monkeypatch):
    b = next(p for n, p in parts.module.named_parameters() if ".lora_B.policy." in n)
    with torch.no_grad():
        b.add_(1e-3)


@plant("kl_is_zero", sft=True, reward="length")
def reference_without_the_sft_adapter(parts, monkeypatch):
    parts.module.actor_critic.roles._adapters["reference"] = None


@plant("numbers_are_float32", reward="length")
def logprobs_rounded_to_bfloat16(parts, monkeypatch):
    right = ActorCritic._logprobs

    def rounded(self, *args, **keywords):
        return tuple(x if x is None else x.bfloat16().float() for x in right(self, *args, **keywords))

    monkeypatch.setattr(ActorCritic, "_logprobs", rounded)


# ---- scoring


@plant("padding_changes_nothing", family="gpt2", reward="length")
def default_positions_under_left_padding(parts, monkeypatch):
    monkeypatch.setattr(passes, "position_ids", lambda mask: torch.arange(mask.shape[1]).expand(mask.shape))


@plant("padding_changes_nothing", reward="length")
@plant("padding_changes_nothing", reward="length", model=MODULES)
def mask_that_lets_padding_through(parts, monkeypatch):
    right = ActorCritic._cells

    def all_seen(self, ids, mask, role, **keywords):
        return right(self, ids, torch.ones_like(mask), role, **keywords)

    monkeypatch.setattr(ActorCritic, "_cells", all_seen)


@plant("padding_changes_nothing", reward="length")
def beginnings_that_are_not_shared_and_taken_for_it(parts, monkeypatch):
    right = packing.common

    def careless(a, b):
        return max(right(a, b), min(2, len(a), len(b)))

    monkeypatch.setattr(packing, "common", careless)


@plant("own_head_agrees", reward="length")
def log_probabilities_read_one_position_early(parts, monkeypatch):
    right = ActorCritic._hidden
    monkeypatch.setattr(ActorCritic, "_hidden", lambda self, *a: right(self, *a).roll(1, dims=1))


@plant("own_head_agrees", reward="length")
def adapter_with_another_scale(parts, monkeypatch):
    right = decoder._term

    def louder(module, adapter):
        term = right(module, adapter)
        return term and term._replace(scale=term.scale * 1.5)

    monkeypatch.setattr(decoder, "_term", louder)


@plant("own_head_agrees", reward="length")
def rotation_of_neighbouring_pairs(parts, monkeypatch):
    right = blocks.rotate

    def rotate(x, cos, sin, **keywords):
        apart = right(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1), cos, sin, **keywords)
        return torch.stack(apart.chunk(2, dim=-1), dim=-1).flatten(-2)

    monkeypatch.setattr(blocks, "rotate", rotate)


@plant("own_head_agrees", family="gpt2", reward="length")
def positions_one_too_far_in_every_pass(parts, monkeypatch):
    right = passes.position_ids
    monkeypatch.setattr(passes, "position_ids", lambda mask: right(mask) + 1)


@plant("own_head_agrees", reward="length")
def head_with_a_scale_that_we_do_not_know(parts, monkeypatch):
    head = parts.module.actor_critic.backbone.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: output * 1.01)


@plant("temperature_reaches_scoring", reward="length")
def temperature_in_the_sampling_only(parts, monkeypatch):
    right = passes.chunked_token_logprobs
    monkeypatch.setattr(
        passes, "chunked_token_logprobs", lambda *a, temperature, **k: right(*a, temperature=1.0, **k)
    )


@plant("temperature_reaches_scoring", reward="length")
def temperature_in_the_scoring_only(parts, monkeypatch):
    right = ActorCritic.logits
    monkeypatch.setattr(ActorCritic, "logits", lambda self, hidden: right(self, hidden) * self.temperature)


@plant("temperature_reaches_scoring", reward="length")
def model_built_with_another_temperature(parts, monkeypatch):
    parts.module.actor_critic.temperature = 0.9


@plant("time_axis", reward="length")
def values_read_after_the_token(parts, monkeypatch):
    right = ActorCritic.values
    monkeypatch.setattr(ActorCritic, "values", lambda self, batch: right(self, batch).roll(-1, dims=1))


@plant("time_axis", reward="length")
def values_read_one_position_early(parts, monkeypatch):
    right = ActorCritic.values
    monkeypatch.setattr(ActorCritic, "values", lambda self, batch: right(self, batch).roll(1, dims=1))


# ---- sampling


@plant("cached_forward_agrees", family="gpt2", reward="length")
@plant("cached_forward_agrees", reward="length")
def positions_that_do_not_advance_over_the_cache(parts, monkeypatch):
    for speaker in (ModuleSpeaker, DecoderSpeaker):
        right = speaker.step

        def stuck(self, tokens, right=right):
            before = self.positions.clone()
            hidden = right(self, tokens)
            self.positions = before
            return hidden

        monkeypatch.setattr(speaker, "step", stuck)


@plant("cached_forward_agrees", reward="length")
def cache_that_keeps_the_wrong_rows(parts, monkeypatch):
    backbone = parts.module.actor_critic.backbone  # a third of all tokens ends an answer: rows leave
    parts.module.actor_critic.backbone = replace(backbone, end_ids=frozenset(range(0, 320, 3)))
    right = DecoderSpeaker.keep
    monkeypatch.setattr(DecoderSpeaker, "keep", lambda self, rows: right(self, (rows - 1).clamp_min(0)))


@plant("cached_forward_agrees", reward="length")
def sampling_from_the_reference(parts, monkeypatch):
    right = loop.generate

    def generate(actor_critic, *args, **keywords):
        adapters = actor_critic.roles._adapters
        own, adapters["policy"] = adapters["policy"], adapters["reference"]
        try:
            return right(actor_critic, *args, **keywords)
        finally:
            adapters["policy"] = own

    monkeypatch.setattr("rlhf_lightning.doctor.exam.generate", generate)


@plant("frequencies_match", reward="length")
def top_k_in_the_loop(parts, monkeypatch):
    monkeypatch.setattr(
        loop, "filter_logits", lambda logits, **_: sampling.filter_logits(logits, top_k=20, top_p=1.0)
    )


@plant("frequencies_match", reward="length", generation={"top_p": 0.9})
def top_p_asked_for(parts, monkeypatch):
    pass


@plant("frequencies_match", reward="length")
def second_temperature_in_the_draw(parts, monkeypatch):
    monkeypatch.setattr(loop, "draw", lambda logits, u: sampling.draw(logits / 0.8, u))


@plant("frequencies_match", reward="length")
def uniform_numbers_that_are_not_uniform(parts, monkeypatch):
    monkeypatch.setattr(
        "rlhf_lightning.doctor.sampling.uniforms", lambda *a, **k: sampling.uniforms(*a, **k) ** 1.3
    )


@plant("rollout_repeats", reward="length")
def draws_from_the_global_generator(parts, monkeypatch):
    monkeypatch.setattr(
        loop, "uniforms", lambda rows, length, **_: torch.rand(len(rows), length, dtype=torch.float64)
    )


# ---- endings


@plant("end_token_is_learned", reward="length")
def mask_made_by_comparing_with_the_pad_id(parts, monkeypatch):
    right = loop.right_pad

    def by_value(tokens, pad):
        ids, _ = right(tokens, pad)
        return ids, ids != pad

    monkeypatch.setattr(loop, "right_pad", by_value)


@plant("end_token_is_learned", reward="length")
def loop_that_runs_past_the_end_token(parts, monkeypatch):
    monkeypatch.setattr(loop._Batch, "_reason", lambda self, answer, *, last: "length" if last else None)


@plant("end_token_is_learned", reward="length")
def update_that_masks_the_last_token_out(parts, monkeypatch):
    right = ppo.micro_batches

    def shorter(rollout, rows, size):
        for batch in right(rollout, rows, size):
            mask = batch.response_mask.clone()
            mask[torch.arange(len(mask)), mask.sum(dim=1) - 1] = False
            yield replace(batch, response_mask=mask)

    monkeypatch.setattr(ppo, "micro_batches", shorter)


@plant("end_token_is_learned", reward="length")
def surrogate_with_its_sign_turned(parts, monkeypatch):
    right = ppo.policy_terms
    monkeypatch.setattr(ppo, "policy_terms", lambda *a, **k: -right(*a, **k))


# ---- gradients


@plant("adapters_and_heads_learn", reward="length")
def policy_adapter_loaded_frozen(parts, monkeypatch):
    for name, parameter in parts.module.named_parameters():
        if ".policy." in name:
            parameter.requires_grad_(False)


@plant("adapters_and_heads_learn", reward="length")
def backbone_tensor_that_trains(parts, monkeypatch):
    _train_a_norm(parts, monkeypatch)


@plant("adapters_and_heads_learn", reward="length")
def optimizer_without_the_critic(parts, monkeypatch):
    policy = parts.module.actor_critic.parameters_of("policy")
    groups = [{"params": policy, "name": "policy"}, {"params": policy[:0], "name": "critic"}]
    monkeypatch.setattr(ppo.PPO, "configure_optimizers", lambda self: torch.optim.AdamW(groups))


@plant("adapters_and_heads_learn", reward="length", model=MODULES)
def adapter_cut_off_from_its_input(parts, monkeypatch):
    model = parts.module.actor_critic.backbone.model.base_model
    model.layers[0].register_forward_hook(lambda module, inputs, output: _detached(output))


@plant("adapters_and_heads_learn", reward="length")
def first_layer_of_our_decoder_cut_off(parts, monkeypatch):
    layers = parts.module.actor_critic.decoder.layers
    firsts = [layers(role)[0][1] for role in ("policy", "critic")]
    right = MLPHalf.__call__

    def cut(self, x):
        return right(self, x).detach() if any(self is first for first in firsts) else right(self, x)

    monkeypatch.setattr(MLPHalf, "__call__", cut)


@plant("gradients_are_autograds", reward="length")
def rotation_turned_the_same_way_in_the_backward(parts, monkeypatch):
    right = blocks.rotate
    monkeypatch.setattr(blocks, "rotate", lambda x, cos, sin, back=False: right(x, cos, sin))


@plant("gradients_are_autograds", reward="length")
def gradient_of_one_answer_where_two_share_a_token(parts, monkeypatch):
    monkeypatch.setattr(
        blocks, "_sum_by_token", lambda rows, packed: rows.transpose(1, 2).flatten(0, 1)[packed.owner]
    )


@plant("gradients_are_autograds", reward="length")
def adapter_that_learns_at_another_scale(parts, monkeypatch):
    right = Linears.backward

    def unscaled(self, *args, **keywords):
        of_x, found = right(self, *args, **keywords)
        scales = [scale for term in self.terms if term is not None for scale in (1.0, term.scale)]
        return of_x, [g / scale for g, scale in zip(found, scales, strict=True)]

    monkeypatch.setattr(Linears, "backward", unscaled)


@plant("gradients_are_autograds", family="gpt2", reward="length")
def gradient_doubled_on_its_way(parts, monkeypatch):
    right = ActorCritic._forward

    def steeper(self, *args, **keywords):
        hidden = right(self, *args, **keywords)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 2 * gradient)
        return hidden

    monkeypatch.setattr(ActorCritic, "_forward", steeper)


@plant("losses_stay_apart", reward="length")
def values_under_the_policys_adapter(parts, monkeypatch):
    monkeypatch.setattr(
        ActorCritic, "values", lambda self, batch: self.value_head(self._hidden(batch, "policy"))
    )


@plant("losses_stay_apart", reward="length")
def critic_mapped_to_the_policys_adapter(parts, monkeypatch):
    parts.module.actor_critic.roles._adapters["critic"] = "policy"


@plant("losses_stay_apart", reward="length", model={"critic": "shared"})
def value_loss_that_ignores_its_weight(parts, monkeypatch):
    right = ppo.value_terms

    def full(values, batch, *, config, **k):
        return right(values, batch, config=config.model_copy(update={"vf_coef": 0.1}), **k)

    monkeypatch.setattr(ppo, "value_terms", full)


@plant("losses_stay_apart", reward="length")
def advantages_that_carry_a_gradient_to_the_critic(parts, monkeypatch):
    right = ActorCritic.policy

    def policy(self, batch, **keywords):
        logprobs, entropy = right(self, batch, **keywords)
        return logprobs + 1e-3 * self.values(batch)[:, :-1], entropy

    monkeypatch.setattr(ActorCritic, "policy", policy)


@plant("rollout_leaves_gradients", reward="length", model={"quantization": "nf4"})
def copy_of_the_weights_that_sampling_leaves_rounded(parts, monkeypatch):
    right = DecoderSpeaker.__init__

    def rounded(self, decoder, *args, **keywords):
        right(self, decoder, *args, **keywords)
        for layer in decoder._weights:
            for frozen in layer.frozen:
                frozen._kept = frozen().bfloat16().float()

    monkeypatch.setattr(DecoderSpeaker, "__init__", rounded)


@plant("rollout_leaves_gradients", reward="length", model=MODULES | {"quantization": "nf4"})
def packing_after_a_forward_in_eval_mode(parts, monkeypatch):
    """As bitsandbytes does on a CPU with AVX512-BF16: packed once, no gradient to the input ever again."""
    packed = set()
    for module in parts.module.modules():
        if type(module).__name__ == "Linear4bit" and hasattr(module, "compute_dtype"):

            def pack(layer, inputs):
                if not layer.training:
                    packed.add(layer)
                return tuple(x.detach() for x in inputs) if layer in packed else None

            module.register_forward_pre_hook(pack)


@plant("rollout_leaves_gradients", reward="length", model=MODULES | {"quantization": "nf4"})
def packing_by_the_library_itself(parts, monkeypatch):
    """The library's own branch for AVX512-BF16, with a kernel in place of the one that this CPU may lack."""
    from bitsandbytes import functional
    from bitsandbytes.nn import modules

    def pack(data, state):
        state.packing_format_for_cpu = True
        return data, state

    def kernel(a, b, *, out, state):
        return nn.functional.linear(a.detach(), functional.dequantize_4bit(b.view(-1, 1), state).to(a.dtype))

    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", pack)
    monkeypatch.setattr(functional, "gemv_4bit", kernel)
    for module in parts.module.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = True


@plant("reference_stays", reward="length")
def reference_that_uses_the_policys_adapter(parts, monkeypatch):
    parts.module.actor_critic.roles._adapters["reference"] = "policy"


@plant("reference_stays", reward="length")
def optimizer_without_the_policy(parts, monkeypatch):
    critic = parts.module.actor_critic.parameters_of("critic")
    groups = [{"params": critic[:0], "name": "policy"}, {"params": critic, "name": "critic"}]
    monkeypatch.setattr(ppo.PPO, "configure_optimizers", lambda self: torch.optim.AdamW(groups))


@plant("frozen_bytes_unchanged", reward="length")
def backbone_tensor_in_the_optimizer(parts, monkeypatch):
    _train_a_norm(parts, monkeypatch)


@plant("frozen_bytes_unchanged", reward="length")
def adapter_merged_into_its_base(parts, monkeypatch):
    right = ppo.PPO._step

    def step(self, *args):
        done = right(self, *args)
        next(m for m in self.modules() if hasattr(m, "lora_A") and hasattr(m, "merge")).merge(
            adapter_names=["policy"]
        )
        return done

    monkeypatch.setattr(ppo.PPO, "_step", step)


@plant("dropouts_are_off", reward="length")
def dropout_in_the_adapters_own_config(parts, monkeypatch):
    _set_lora_dropout(parts)


@plant("dropouts_are_off", reward="length")
def attention_rate_above_zero(parts, monkeypatch):
    parts.module.actor_critic.backbone.model.base_model.layers[0].self_attn.attention_dropout = 0.1


@plant("dropouts_are_off", reward="length")
def dropout_in_our_decoder(parts, monkeypatch):
    right = Decoder.forward

    def drop(self, *args):
        return nn.functional.dropout(right(self, *args), 0.1, self.trunk.training)

    monkeypatch.setattr(Decoder, "forward", drop)


@plant("dropouts_are_off", reward="length", model=MODULES)
def dropout_under_another_name(parts, monkeypatch):
    layer = parts.module.actor_critic.backbone.model.base_model.layers[0]
    drop = nn.functional.dropout
    layer.register_forward_hook(lambda m, i, out: drop(out, 0.1, m.training) if torch.is_tensor(out) else out)


# ---- reward


@plant("one_finite_score_each", reward="length")
def one_score_too_few(parts, monkeypatch):
    parts.module.reward = lambda prompts, responses: Scores(torch.zeros(len(responses) - 1), {})


@plant("one_finite_score_each", reward="length")
def nan_for_an_empty_answer(parts, monkeypatch):
    def mean_letter(prompts, responses):
        return Scores(torch.tensor([sum(map(ord, r)) / len(r) if r else float("nan") for r in responses]), {})

    parts.module.reward = mean_letter


@plant("one_finite_score_each", reward="length")
def crash_on_an_empty_answer(parts, monkeypatch):
    parts.module.reward = lambda prompts, responses: Scores(torch.tensor([1 / len(r) for r in responses]), {})


@plant("order_does_not_matter", reward="length")
def reward_that_is_random(parts, monkeypatch):
    parts.module.reward = lambda prompts, responses: Scores(torch.rand(len(responses)), {})


@plant("order_does_not_matter", reward="length")
def reward_by_place_in_the_batch(parts, monkeypatch):
    parts.module.reward = lambda prompts, responses: Scores(torch.arange(len(responses)).float(), {})


@plant("right_token_is_read", model=MODULES)
def reward_read_at_the_last_column(parts, monkeypatch):
    def score(self, ids, mask):
        columns = torch.full((len(ids), 1), ids.shape[1] - 1)
        return self.score_head(self._cells(ids, mask.bool(), "reward", columns=columns)[:, 0])

    _score_with(parts, score)


@plant("right_token_is_read")
def reward_read_before_the_last_token(parts, monkeypatch):
    right = ActorCritic.score

    def score(self, ids, mask):
        return right(self, ids, mask * (mask.flip(1).cumsum(1).flip(1) > 1))

    _score_with(parts, score)


@plant("right_token_is_read")
def reward_under_the_policys_adapter(parts, monkeypatch):
    def score(self, ids, mask):
        last = mask.long().cumsum(dim=1).argmax(dim=1)
        return self.score_head(self._cells(ids, mask.bool(), "policy", columns=last.unsqueeze(1))[:, 0])

    _score_with(parts, score)


@plant("right_token_is_read", reward="classifier")
def classifier_padded_with_its_end_id(parts, monkeypatch):
    monkeypatch.setattr(ClassifierReward, "_pad_id", lambda self, rows: rows[0][-1])


# ---- helpers


def _set_lora_dropout(parts) -> None:
    for module in parts.module.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["policy"] = nn.Dropout(0.2)


def _train_a_norm(parts, monkeypatch) -> None:
    norm = parts.module.actor_critic.backbone.model.base_model.norm.weight
    norm.requires_grad_(True)
    right = ppo.PPO.configure_optimizers

    def more(self):
        optimizer = right(self)
        optimizer.param_groups[0]["params"].append(norm)
        return optimizer

    monkeypatch.setattr(ppo.PPO, "configure_optimizers", more)


def _detached(output):
    return output.detach() if torch.is_tensor(output) else (output[0].detach(), *output[1:])


def _score_with(parts, score) -> None:
    model = parts.module.actor_critic
    parts.module.reward.score = lambda ids, mask: score(model, ids, mask)
