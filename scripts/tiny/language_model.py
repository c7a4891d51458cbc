"""The language model: a stock Llama of under two million parameters, trained on the generated text."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.tiny.grammar import review
from scripts.tiny.prompts import sample_prompt
from scripts.tiny.tokenizer import REVIEW, USER

CHAT_SHARE = 0.1


def sft_texts(count: int, rng: random.Random, *, kept_out: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """``count`` (prompt, review) pairs of mixed quality; no prompt is about a kept-out place."""
    pairs = []
    for _ in range(count):
        prompt = sample_prompt(rng, heldout=False, kept_out=kept_out)
        quality = rng.betavariate(1.1, 0.9)
        pairs.append((prompt, review(prompt, rng, quality=quality, fit=0.85, careless=0.03)))
    return pairs


def right_padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(ids, attention mask), both (B, longest) int64."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def _rows(
    pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> list[list[int]]:
    end = tokenizer.eos_token_id
    texts = [f"{USER}{p}{REVIEW}{r}" if rng.random() < CHAT_SHARE else p + r for p, r in pairs]
    return [[*ids, end] for ids in tokenizer(texts)["input_ids"]]


def train_language_model(
    pairs: list[tuple[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    seed: int,
    steps: int,
    batch_size: int = 48,
    lr: float = 3e-3,
) -> None:
    """Train on the whole text (prompt, review, end token), save to ``folder`` in float16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).train()
    print(f"language model: {model.num_parameters():,} parameters", flush=True)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    warmup = 100

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    rng = random.Random(f"{seed}/order")
    rows = _rows(pairs, tokenizer, rng)
    order: list[int] = []
    began = time.monotonic()
    for step in range(steps):
        if len(order) < batch_size:
            order = rng.sample(range(len(rows)), len(rows))
        batch, order = order[:batch_size], order[batch_size:]
        ids, mask = right_padded([rows[i] for i in batch], tokenizer.pad_token_id)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"  step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.half().save_pretrained(folder)


def load_language_model(folder: Path) -> LlamaForCausalLM:
    """The shipped weights (rounded to float16 on disk) as a float32 model in eval mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@torch.no_grad()
def sample_reviews(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    *,
    seed: int,
    max_new_tokens: int = 64,
    batch_size: int = 128,
) -> tuple[list[str], list[bool]]:
    """One sample at temperature 1 for each prompt, and whether it ended by itself."""
    torch.manual_seed(seed)
    texts: list[str] = []
    ended: list[bool] = []
    for at in range(0, len(prompts), batch_size):
        batch = tokenizer(
            prompts[at : at + batch_size], return_tensors="pt", padding=True, padding_side="left"
        )
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
        )[:, batch["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(out, skip_special_tokens=True)
        ended += (out == tokenizer.eos_token_id).any(dim=1).tolist()
    return texts, ended
