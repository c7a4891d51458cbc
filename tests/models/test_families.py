"""Families of models, each tiny with random weights: what we sample and score is what the model itself says.

Windows are shorter than the texts, prompts of very different lengths stand side by side, and rows end at
different times, so that the cache loses rows while windows slide.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_lightning.config.schema import GenerationConfig, ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import Backbone, load_backbone
from rlhf_lightning.models.cast import ppo_cast
from rlhf_lightning.rollout.generate import generate
from rlhf_lightning.types import Prompts

WORDS, TEMPERATURE = 320, 0.7
COMMON = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
OPT = {"ffn_dim": 96, "init_std": 0.3, "word_embed_proj_dim": 32, "do_layer_norm_before": False}
CAPS = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
# A tied head makes so small a Gemma 3 repeat its last token.
UNTIED = {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral, window 5": ("MistralConfig", {"sliding_window": 5}),
    "qwen 2": ("Qwen2Config", {}),
    "qwen 2, window 5": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen 3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma 2, capped, window 5": ("Gemma2Config", {"head_dim": 16, "sliding_window": 5} | CAPS),
    "gemma 3, window 5": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
    ),
    "pythia": ("GPTNeoXConfig", {"num_key_value_heads": None}),
    "phi, a bias in the head": ("PhiConfig", {}),
    "opt, blocks wider than the head": ("OPTConfig", OPT),
    "cohere, logits times 1/4": ("CohereConfig", {"logit_scale": 0.25}),
    "granite, logits over 8": ("GraniteConfig", {"logits_scaling": 8.0}),
}
LENGTHS = (1, 14, 3, 9, 5, 2)


def actor_critic_of(model, tokenizer, *, ends: frozenset[int]) -> ActorCritic:
    backbone = Backbone(model.eval().requires_grad_(False), tokenizer, ends, 0, 64)
    config = ModelConfig(quantization="none", dtype="float32")
    return ActorCritic(backbone, config, cast=ppo_cast(config, reward_path=None), temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def tokenizer(model_folders):
    return AutoTokenizer.from_pretrained(model_folders["llama"])


@pytest.fixture(params=FAMILIES)
def actor_critic(request, tokenizer, disturb) -> ActorCritic:
    name, settings = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{k: v for k, v in (COMMON | settings).items() if v is not None})
    attention = "eager" if name == "Gemma2Config" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.3)
    # A fifth of all tokens ends an answer, so that rows leave the batch one by one.
    return disturb(actor_critic_of(model, tokenizer, ends=frozenset(range(0, WORDS, 5))))


def test_sampled_and_scored_as_the_model_itself_says(actor_critic):
    generator = torch.Generator().manual_seed(1)
    ids = tuple(tuple(torch.randint(WORDS, (n,), generator=generator).tolist()) for n in LENGTHS)
    prompts = Prompts(ids, ("",) * len(ids), tuple(range(len(ids))))
    config = GenerationConfig(max_new_tokens=12)
    drawn = generate(actor_critic, prompts, config, seed=2, iteration=0)
    likeliest = generate(actor_critic, prompts, config, seed=2, iteration=0, greedy=True)
    assert len({*drawn.lengths.tolist(), *likeliest.lengths.tolist()}) > 1  # a row leaves while others go on
    logprobs, entropy = actor_critic.policy(drawn)
    with torch.no_grad():
        for b, prompt in enumerate(ids):
            for batch in (drawn, likeliest):
                answer = batch.response_ids[b, : batch.lengths[b]]
                text = torch.cat([torch.tensor(prompt), answer])[None]
                with actor_critic.roles.use("policy"):
                    logits = actor_critic.backbone.model(text, use_cache=False).logits[
                        0, len(prompt) - 1 : -1
                    ]
                if batch is likeliest:  # token for token what greedy decoding without padding and cache gives
                    assert answer.tolist() == logits.argmax(dim=1).tolist()
                    continue
                plain = (logits / TEMPERATURE).log_softmax(dim=1)
                n = len(answer)
                torch.testing.assert_close(
                    logprobs[b, :n], plain.gather(1, answer[:, None])[:, 0], atol=1e-4, rtol=0
                )
                torch.testing.assert_close(
                    entropy[b, :n], -(plain.exp() * plain).sum(dim=1), atol=1e-4, rtol=0
                )
    with actor_critic.roles.use("policy"):
        logprobs[drawn.response_mask].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in actor_critic.parameters_of("policy"))
    assert actor_critic.values(drawn).shape == (len(ids), drawn.response_ids.shape[1] + 1)


def test_noise_that_lives_in_the_config_is_off(tokenizer, tmp_path):
    """It fires in train mode, which gradient checkpointing needs: layers left out, routers shaken."""
    settings = COMMON | {"vocab_size": 330, "num_hidden_layers": 1, "num_local_experts": 2}
    noise = {"router_jitter_noise": 0.5, "attention_dropout": 0.5}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings | noise))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), quantization="none", dtype="float32")
    loaded = load_backbone(config).model.train()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, loaded(ids).logits)


class Louder(LlamaForCausalLM):
    """Does to its logits what no setting of its config tells."""

    def forward(self, *args, **keywords):
        output = super().forward(*args, **keywords)
        output.logits = output.logits * 3
        return output


def test_a_head_that_is_not_understood_is_refused(tokenizer):
    with pytest.raises(UserError, match="Louder changes its logits behind the head"):
        actor_critic_of(Louder(LlamaConfig(**COMMON)), tokenizer, ends=frozenset({0}))


def test_a_kernel_that_the_model_lacks_is_named_and_not_its_folder(tokenizer, tmp_path):
    """Soft-capped attention has no fused kernel; the folder is fine, and the answer is another setting."""
    settings = COMMON | {"vocab_size": 330, "head_dim": 16, "num_hidden_layers": 1}
    transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**settings)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    plain = {"path": str(tmp_path), "quantization": "none", "dtype": "float32"}
    with pytest.raises(UserError, match=r"model\.attention=sdpa .*set model\.attention=eager"):
        load_backbone(ModelConfig(**plain))
    assert load_backbone(ModelConfig(**plain, attention="eager")).hidden_size == 64


def test_recurrent_layers_are_refused_at_once_and_not_in_the_middle_of_a_rollout(tokenizer, tmp_path):
    settings = COMMON | {"vocab_size": 330, "layer_types": ["conv", "full_attention"]}
    transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**settings)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Lfm2ForCausalLM has recurrent layers"):
        load_backbone(ModelConfig(path=str(tmp_path), quantization="none", dtype="float32"))
