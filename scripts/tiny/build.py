"""Build the whole tiny world again: ``python -m scripts.tiny.build`` (20 minutes on two free CPU cores).

Everything is drawn from one seed. The same versions on the same machine give the same files; other machines
round differently and give a sibling of the same quality.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.assets.gold import gold
from scripts.tiny.grammar import lovely_review
from scripts.tiny.language_model import load_language_model, sample_reviews, sft_texts, train_language_model
from scripts.tiny.pairs import make_pairs
from scripts.tiny.prompts import distinct_prompts, heldout_places
from scripts.tiny.reward import Scorer, train_reward
from scripts.tiny.tokenizer import train_tokenizer

STAGES = ("prompts", "model", "pairs", "reward", "facts")
SFT_TEXTS, TRAIN_PROMPTS, PAIR_PROMPTS, HELDOUT_PROMPTS = 24_000, 256, 1_000, 64


def _write(name: str, rows: list[dict[str, str]]) -> None:
    tiny_path(name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of one of the JSON lines files of the tiny world."""
    return [json.loads(line) for line in tiny_path(name).read_text().splitlines()]


def _prompts(seed: int, *, heldout: bool) -> list[str]:
    count, purpose = (HELDOUT_PROMPTS, "heldout") if heldout else (PAIR_PROMPTS, "train")
    rng = random.Random(f"{seed}/prompts/{purpose}")
    return distinct_prompts(count, rng, heldout=heldout, kept_out=heldout_places(seed))


def build_prompts(seed: int) -> None:
    _write("prompts.jsonl", [{"prompt": p} for p in _prompts(seed, heldout=False)[:TRAIN_PROMPTS]])
    _write("prompts_heldout.jsonl", [{"prompt": p} for p in _prompts(seed, heldout=True)])


def build_model(seed: int, *, steps: int) -> None:
    texts = sft_texts(SFT_TEXTS, random.Random(f"{seed}/sft"), kept_out=heldout_places(seed))
    folder = tiny_path("model")
    tokenizer = train_tokenizer([p + r for p, r in texts], folder)
    train_language_model(texts, tokenizer, folder, seed=seed, steps=steps)


def load_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_path("model"), local_files_only=True)


def build_pairs(seed: int) -> None:
    model, tokenizer = load_language_model(tiny_path("model")), load_tokenizer()
    for name, heldout, each in (("pairs.jsonl", False, 4), ("pairs_heldout.jsonl", True, 6)):
        prompts = _prompts(seed, heldout=heldout)
        _write(name, make_pairs(prompts, model, tokenizer, each=each, seed=seed, purpose=name))


def build_reward(seed: int) -> None:
    train_reward(tiny_path("reward"), seed=seed)


def measure(seed: int) -> dict[str, float]:
    """What the finished parts are worth, on prompts that no training has seen."""
    model, tokenizer = load_language_model(tiny_path("model")), load_tokenizer()
    heldout, pairs = read_rows("prompts_heldout.jsonl"), read_rows("pairs_heldout.jsonl")
    prompts = [row["prompt"] for row in heldout] * 4
    samples, ended = sample_reviews(model, tokenizer, prompts, seed=seed + 1)
    rng = random.Random(f"{seed}/best")
    best = [lovely_review(p, rng, judge=lambda q, r: gold([q], [r])[0]) for p in prompts]
    true = torch.tensor(gold(prompts, samples))

    exact, four_bit = Scorer("none"), Scorer("nf4")
    start, top = exact.scores(prompts, samples), exact.scores(prompts, best)
    start4, top4 = four_bit.scores(prompts, samples), four_bit.scores(prompts, best)
    chosen, _ = exact.sides(pairs)
    sides = ([p["prompt"] for p in pairs], [p["chosen"] for p in pairs], [p["rejected"] for p in pairs])
    gaps = [a - b for a, b in zip(gold(sides[0], sides[1]), gold(sides[0], sides[2]), strict=True)]

    def together(x: torch.Tensor, y: torch.Tensor) -> float:
        return torch.corrcoef(torch.stack([x, y]))[0, 1].item()

    facts: dict[str, float] = {
        "pair_accuracy_heldout": exact.pair_accuracy(pairs),
        "pair_accuracy_heldout_nf4": four_bit.pair_accuracy(pairs),
        "pair_accuracy_ceiling": statistics.fmean(gap > 0 for gap in gaps),
        "pair_accuracy_first_100": exact.pair_accuracy(pairs[:100]),
        "chosen_mean": chosen.mean().item(),
        "chosen_mean_first_100": chosen[:100].mean().item(),
        "start_mean": start.mean().item(),
        "start_std": start.std().item(),
        "best_mean": top.mean().item(),
        "best_p95": top.quantile(0.95).item(),
        "start_mean_nf4": start4.mean().item(),
        "best_mean_nf4": top4.mean().item(),
        "gold_start_mean": true.mean().item(),
        "gold_correlation": together(start, true),
        "nf4_correlation": together(torch.cat([start, top]), torch.cat([start4, top4])),
        "ended_share": statistics.fmean(ended),
        "distinct_share": len(set(samples)) / len(samples),
    }
    return {name: round(value, 4) for name, value in facts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=480, help="language model: optimizer steps")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="build these parts only")
    args = parser.parse_args()
    torch.set_num_threads(2)  # sums are rounded by how they are split, so the count is part of the recipe
    Path(tiny_path("model")).parent.mkdir(parents=True, exist_ok=True)
    if "prompts" in args.only:
        build_prompts(args.seed)
    if "model" in args.only:
        build_model(args.seed, steps=args.steps)
    if "pairs" in args.only:
        build_pairs(args.seed)
    if "reward" in args.only:
        build_reward(args.seed)
    if "facts" in args.only:
        facts = measure(args.seed)
        (tiny_path("reward") / "reward.json").write_text(json.dumps(facts, indent=2) + "\n")
        print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
