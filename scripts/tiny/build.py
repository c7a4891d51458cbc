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
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.assets.gold import gold
from scripts.tiny.grammar import lovely_review
from scripts.tiny.language_model import load_language_model, sample_reviews, sft_texts, train_language_model
from scripts.tiny.pairs import make_pairs
from scripts.tiny.prompts import distinct_prompts, heldout_places
from scripts.tiny.reward import TEXT_RULE, centre_on, load_scorer, new_scorer, save_scorer, train_reward
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


def build_reward(seed: int, *, epochs: int) -> None:
    torch.manual_seed(seed)
    scorer = new_scorer(load_language_model(tiny_path("model")), load_tokenizer()).train()
    train_reward(scorer, read_rows("pairs.jsonl"), seed=seed, epochs=epochs)
    centre_on(scorer.eval(), read_rows("pairs_heldout.jsonl"))
    save_scorer(scorer, tiny_path("reward"), {"text": TEXT_RULE})


def _load_nf4() -> torch.nn.Module:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    return AutoModelForCausalLM.from_pretrained(
        tiny_path("model"),
        quantization_config=config,
        dtype=torch.float32,
        device_map="cpu",
        local_files_only=True,
    )


def measure(seed: int) -> dict[str, float | str]:
    """What the finished parts are worth, on prompts that no training has seen."""
    model, tokenizer = load_language_model(tiny_path("model")), load_tokenizer()
    heldout, pairs = read_rows("prompts_heldout.jsonl"), read_rows("pairs_heldout.jsonl")
    prompts = [row["prompt"] for row in heldout] * 4
    samples, ended = sample_reviews(model, tokenizer, prompts, seed=seed + 1)
    rng = random.Random(f"{seed}/best")
    best = [lovely_review(p, rng, judge=lambda q, r: gold([q], [r])[0]) for p in prompts]
    texts = [p + r for p, r in zip(prompts, samples, strict=True)]
    best_texts = [p + r for p, r in zip(prompts, best, strict=True)]
    true = torch.tensor(gold(prompts, samples))

    exact = load_scorer(model, tokenizer, tiny_path("reward"))
    start, top = exact.scores(texts), exact.scores(best_texts)
    chosen = exact.scores([p["prompt"] + p["chosen"] for p in pairs])
    gap_gold = [
        a - b
        for a, b in zip(
            gold([p["prompt"] for p in pairs], [p["chosen"] for p in pairs]),
            gold([p["prompt"] for p in pairs], [p["rejected"] for p in pairs]),
            strict=True,
        )
    ]
    four_bit = load_scorer(_load_nf4(), tokenizer, tiny_path("reward"))
    start4, top4 = four_bit.scores(texts), four_bit.scores(best_texts)

    def together(x: torch.Tensor, y: torch.Tensor) -> float:
        return torch.corrcoef(torch.stack([x, y]))[0, 1].item()

    facts: dict[str, float] = {
        "pair_accuracy_heldout": exact.pair_accuracy(pairs),
        "pair_accuracy_heldout_nf4": four_bit.pair_accuracy(pairs),
        "pair_accuracy_ceiling": statistics.fmean(g > 0 for g in gap_gold),
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
    return {"text": TEXT_RULE, **{name: round(value, 4) for name, value in facts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=480, help="language model: optimizer steps")
    parser.add_argument("--epochs", type=int, default=4, help="reward: passes over the pairs")
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
        build_reward(args.seed, epochs=args.epochs)
    if "facts" in args.only:
        facts = measure(args.seed)
        (tiny_path("reward") / "reward.json").write_text(json.dumps(facts, indent=2) + "\n")
        print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
