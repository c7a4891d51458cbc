"""The counted arithmetic against hand-worked numbers and against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.floor import Floor, Shape, Work, floor

CONFIG = LlamaConfig(
    num_hidden_layers=1, hidden_size=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8,
    vocab_size=10, tie_word_embeddings=True,
)  # fmt: skip


def test_a_shape_by_hand():
    # q and o 4x4, k and v 4x2, three of 4x8; rank 1 adds width in + width out of each
    assert Shape.of(CONFIG, rank=1) == Shape(
        matrices=16 + 16 + 8 + 8 + 3 * 32, adapter=8 + 8 + 6 + 6 + 3 * 12, layers=1, hidden=4, vocab=10, kv=2
    )


def test_an_iteration_by_hand():
    work = Work(answers=1, prompt=2, response=1, epochs=1, critic=False, learned_reward=False)
    found = floor(Shape.of(CONFIG, rank=1), work, weight_bytes=1000)
    # trunk of 3 tokens: 2 * (144 + 64) * 3 = 1248, attention 2 * 4 * 3 * 4 = 96; head of 1: 2 * 10 * 4 = 80
    assert found.score == 2 * (1248 + 96) + 2 * 80
    assert found.update == 3 * (1248 + 96 + 80) + 2 * 64 * 3
    # 2 tokens go through the trunk: 2 * 208 * 2 = 832, attention 2 * 4 * 2 * 3 = 48
    assert found.rollout == 832 + 48 + 80
    assert found.rollout_bytes == 1000 + 2 * 2 * 2 * 2  # keys and values of two tokens, two wide, 2 bytes


def test_roles_answers_and_epochs_multiply():
    shape = Shape.of(CONFIG, rank=1)
    one = floor(shape, Work(1, 2, 3, 1, critic=False), weight_bytes=0)
    many = floor(shape, Work(5, 2, 3, 4, critic=False), weight_bytes=0)
    assert many.score == 5 * one.score and many.update == 20 * one.update and many.rollout == 5 * one.rollout
    own = floor(shape, Work(1, 2, 3, 1, critic=True), weight_bytes=0)
    trunk = own.score - one.score
    assert own.update - one.update == 3 * trunk + 2 * shape.adapter * 5


def test_products_are_those_that_torch_counts():
    model = LlamaForCausalLM(CONFIG)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(3, 5, dtype=torch.long))
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    shape = Shape.of(CONFIG, rank=0)
    assert products == 3 * 5 * 2 * (shape.matrices + shape.vocab * shape.hidden)


def test_the_slower_of_arithmetic_and_reading_is_the_floor():
    found = Floor(rollout=100, score=40, update=60, rollout_bytes=30)
    assert found.seconds(flops=10, bandwidth=10) == {"rollout": 10, "score": 4, "update": 6}
    assert found.seconds(flops=10, bandwidth=1)["rollout"] == 30


def test_seven_billion():
    assert Shape.of(LlamaConfig(), rank=16).matrices == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert Shape.of(LlamaConfig(), rank=16).adapter == pytest.approx(40e6, rel=0.01)
