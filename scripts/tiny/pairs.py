"""Preference pairs: two different answers to one prompt, ordered by the gold rule through a noisy judge."""

from __future__ import annotations

import math
import random
import re

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_lightning.assets.gold import gold_score
from scripts.tiny.grammar import lovely_review, review
from scripts.tiny.language_model import sample_reviews

CLEAR = 0.2
"""The least difference in gold score: closer answers are no pair, the judge calls them a tie."""
FLIPPED = 0.02
"""The share of pairs that the judge gets wrong, mostly the close ones."""
OWN_SHARE = 0.5


def spoiled(text: str, rng: random.Random) -> str:
    """A broken answer: cut in the middle, or one sentence said over and over."""
    sentences = re.findall(r" [^.]+\.", text)
    if rng.random() < 0.5:
        words = text.split(" ")
        return " ".join(words[: rng.randrange(len(words) // 2, len(words))]).rstrip(".")
    return "".join(sentences[:-1] + [rng.choice(sentences)] * rng.choice((2, 3)))


def candidate_answers(
    prompts: list[str],
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    *,
    seed: int,
) -> list[str]:
    """One answer for each prompt: half the model's own, the rest the grammar's, some perfect, some broken."""
    draws = [rng.random() for _ in prompts]
    asked = [p for p, draw in zip(prompts, draws, strict=True) if draw < OWN_SHARE]
    own = iter(sample_reviews(model, tokenizer, asked, seed=seed)[0])
    answers = []
    for prompt, draw in zip(prompts, draws, strict=True):
        if draw < OWN_SHARE:
            answers.append(next(own))
        elif draw < 0.78:
            answers.append(review(prompt, rng, quality=rng.random(), fit=0.75, careless=0.03))
        elif draw < 0.92:
            answers.append(lovely_review(prompt, rng, judge=gold_score))
        else:
            answers.append(spoiled(review(prompt, rng, quality=rng.random(), fit=0.9), rng))
    return answers


def _temperature(gaps: list[float], share: float) -> float:
    """The temperature at which a Bradley-Terry judge turns ``share`` of pairs with these gold gaps around."""
    low, high = 1e-4, 10.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        flipped = sum(1 / (1 + math.exp(min(500.0, gap / middle))) for gap in gaps) / len(gaps)
        low, high = (middle, high) if flipped < share else (low, middle)
    return low


def make_pairs(
    prompts: list[str],
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    each: int,
    seed: int,
    purpose: str,
) -> list[dict[str, str]]:
    """Up to ``each`` pairs for every prompt; answers that the judge cannot tell apart are left out."""
    rng = random.Random(f"{seed}/pairs/{purpose}")
    asked = [p for p in prompts for _ in range(each)]
    first = candidate_answers(asked, model, tokenizer, rng, seed=rng.randrange(2**31))
    second = candidate_answers(asked, model, tokenizer, rng, seed=rng.randrange(2**31))
    ordered = []
    for prompt, a, b in zip(asked, first, second, strict=True):
        gap = gold_score(prompt, a) - gold_score(prompt, b)
        if a.strip() and b.strip() and abs(gap) > CLEAR - 1e-9:
            ordered.append((prompt, a, b, gap) if gap > 0 else (prompt, b, a, -gap))
    temperature = _temperature([gap for *_, gap in ordered], FLIPPED)
    pairs = []
    for prompt, better, worse, gap in ordered:
        flip = rng.random() < 1 / (1 + math.exp(min(500.0, gap / temperature)))
        chosen, rejected = (worse, better) if flip else (better, worse)
        if not (better.startswith(" ") and worse.startswith(" ")):
            continue  # once in a thousand the model begins inside a word; the texts would not meet at a token
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return pairs
