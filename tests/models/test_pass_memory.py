"""No pass of the policy, forward or backward, allocates logits of all tokens or scores of all rows."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.functional import logprobs
from rlhf_lightning.kernels import attention
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import Backbone
from rlhf_lightning.models.cast import ppo_cast
from rlhf_lightning.types import Generation

ROWS, PROMPT, ANSWER, WORDS, HEADS, HIDDEN, INNER = 6, 16, 240, 2048, 4, 32, 64
LENGTH, TOKENS = PROMPT + ANSWER, PROMPT + ROWS * ANSWER


class Largest(TorchDispatchMode):
    """Elements of the largest storage that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                if elements > self.elements:
                    self.elements, self.operation = elements, str(func)
        return out


@pytest.fixture
def model(model_folders, disturb, monkeypatch) -> ActorCritic:
    # Budgets of bytes that suit a real model would hold this one whole.
    monkeypatch.setattr(logprobs, "default_chunk", lambda vocabulary, device: 16)
    monkeypatch.setattr(attention, "_SCORES", 1 << 12)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folders["llama"])
    backbone = Backbone(LlamaForCausalLM(config).requires_grad_(False), tokenizer, frozenset({0}), 0, LENGTH)
    settings = ModelConfig(quantization="none", dtype="float32", lora={"r": 2})
    cast = ppo_cast(settings, reward_path=None)
    return disturb(ActorCritic(backbone, settings, cast=cast, temperature=1.0))


def batch() -> Generation:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(WORDS, (1, PROMPT), generator=generator).expand(ROWS, -1)
    answers = torch.randint(WORDS, (ROWS, ANSWER), generator=generator)
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return Generation(
        prompt, real[:, :PROMPT], answers, real[:, PROMPT:], torch.arange(ROWS), ("length",) * ROWS
    )


@pytest.mark.parametrize("lean", [False, True])
def test_nothing_as_large_as_all_logits_or_all_scores(model, lean):
    model.decoder.lean = lean
    with Largest() as largest:
        model.policy(batch())[0].sum().backward()
    assert all(p.grad is not None for p in model.parameters_of("policy"))
    # The largest there may be: one group of heads of one row, or what the widest map gives for all tokens.
    allowed = max(HEADS // 2 * LENGTH * LENGTH, TOKENS * max(2 * INNER, WORDS // 16))
    assert largest.elements <= 1.2 * allowed, (largest.operation, largest.elements)
    assert 5 * allowed < min(TOKENS * WORDS, ROWS * HEADS * LENGTH * LENGTH)


def test_the_count_sees_what_the_modules_allocate(model):
    """Where it is allocated, it is seen: the eager modules' scores."""
    model.decoder = None
    model.backbone.model.set_attn_implementation("eager")
    with torch.no_grad(), Largest() as largest:
        model.policy(batch())
    assert largest.elements >= ROWS * HEADS * LENGTH * LENGTH
