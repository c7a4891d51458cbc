"""Preference pairs from two public data sets, split so that nothing is trained and measured on.

    python -m benchmarks.real_pairs rt-polarity FOLDER OUT     # FOLDER: rt-polarity.pos, rt-polarity.neg
    python -m benchmarks.real_pairs hh FILE OUT                # FILE: .jsonl.gz of chosen and rejected

OUT gets train.jsonl and heldout.jsonl, and of sentences also prompts.txt and prompts_heldout.txt: sentences
of pairs from the 1,201st on, and of the held-out ones, for PPO to go on from their first words. Sentences: a
positive one is preferred to a negative one, no sentence is in two pairs, and none is on both sides of the
split. Dialogues: the last 312 whose prompts are in no other row are held out, 2,000 others are to learn from.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import Counter
from pathlib import Path

from rlhf_lightning.data.dialogue import split_pair

HELD_OUT_SENTENCES = 400
HELD_OUT_DIALOGUES, TRAIN_DIALOGUES = 312, 2000
REWARD_PAIRS, PROMPTS, HELD_OUT_PROMPTS = 1200, 2000, 256


def sentence_pairs(folder: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Positive against negative sentences; the held-out pairs first drawn."""
    sides = []
    for name in ("pos", "neg"):
        text = (folder / f"rt-polarity.{name}").read_text(encoding="latin-1")
        lines = sorted({" ".join(line.split()) for line in text.splitlines() if line.strip()})
        sides.append(lines)
    both = set(sides[0]) & set(sides[1])
    for number, lines in enumerate(sides):
        kept = [line for line in lines if line not in both]
        random.Random(f"rt-polarity/{number}").shuffle(kept)
        sides[number] = kept
    pairs = [{"prompt": "", "chosen": good, "rejected": bad} for good, bad in zip(*sides, strict=False)]
    return pairs[HELD_OUT_SENTENCES:], pairs[:HELD_OUT_SENTENCES]


def dialogue_pairs(file: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Dialogues in the file's order; what is held out shares no prompt with any other row."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    prompts = [split_pair(row["chosen"], row["rejected"])[0] for row in rows]
    count = Counter(prompts)
    alone = [number for number, prompt in enumerate(prompts) if count[prompt] == 1]
    held_out = set(alone[-HELD_OUT_DIALOGUES:])
    train = [row for number, row in enumerate(rows) if number not in held_out][:TRAIN_DIALOGUES]
    return train, [rows[number] for number in sorted(held_out)]


def sentences(pairs: list[dict[str, str]], count: int, draw: random.Random) -> str:
    """Both sides of pairs, shuffled, one a line."""
    lines = [pair[side] for pair in pairs for side in ("chosen", "rejected")]
    draw.shuffle(lines)
    return "\n".join(lines[:count]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["rt-polarity", "hh"])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    train, held_out = (sentence_pairs if args.kind == "rt-polarity" else dialogue_pairs)(args.source)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("heldout", held_out)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(rows)} pairs")
    if args.kind == "rt-polarity":
        draw = random.Random(0)
        prompts = sentences(train[REWARD_PAIRS : REWARD_PAIRS + 1500], PROMPTS, draw)
        (args.out / "prompts.txt").write_text(prompts, encoding="utf-8")
        others = sentences(held_out, HELD_OUT_PROMPTS, draw)
        (args.out / "prompts_heldout.txt").write_text(others, encoding="utf-8")


if __name__ == "__main__":
    main()
