"""``python -m benchmarks.memory``: what four roles weigh over one backbone, and what the peak grows with.

Bytes by role are measured on a loaded model, and counted from shapes for Llama-2-7B's; the same count stands
beside the measured figures. The peak is measured in one process a point: against the tokens of a micro-batch
(same rollout), and against the answers of a rollout (same micro-batch). A line is fitted to each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from benchmarks.adapters import shape_at, write_reward_adapter
from benchmarks.fit import Line, fit
from benchmarks.floor import Shape
from benchmarks.machine import Clock, markdown, run_json, run_main, write_json
from benchmarks.phases import PhasePeaks
from benchmarks.race.ours import composed
from benchmarks.race.task import write_prompts
from benchmarks.training import train
from rlhf_lightning.build import build_parts
from rlhf_lightning.config.schema import Config
from rlhf_lightning.run import quiet
from rlhf_lightning.stages.ppo import PPO
from scripts.random_llama import llama_config

RANK, LORA_BYTES = 16, 4  # adapters are stored in float32, whatever the backbone's dtype
ROLES = ("backbone", "policy", "critic", "reference", "reward")
MICRO = (1, 2, 4, 8, 16)
ANSWERS = (8, 16, 32, 64)


def nf4_bytes(weights: int, block: int = 64, blocks: int = 256) -> float:
    """Bytes of so many weights in nf4 with double quantisation: half a byte each, a byte for each block's
    largest, and a float32 for each ``blocks`` of those; code books left out."""
    return weights * (0.5 + 1 / block + 4 / (block * blocks))


def counted(config: PreTrainedConfig, *, rank: int = RANK) -> dict[str, float]:
    """Bytes by role with nf4 matrices, bfloat16 embedding, head and norms, and an adapter for each of policy,
    critic and reward with a float32 head for the last two."""
    shape = Shape.of(config, rank=rank)
    tables = 1 if config.tie_word_embeddings else 2
    plain = tables * shape.vocab * shape.hidden + (2 * shape.layers + 1) * shape.hidden
    adapter, head = LORA_BYTES * shape.adapter, 4 * (shape.hidden + 1)
    return {
        "backbone": nf4_bytes(shape.matrices) + 2 * plain,
        "policy": adapter,
        "critic": adapter + head,
        "reference": 0,
        "reward": adapter + head,
    }


def measured(config: Config) -> dict[str, float]:
    """Bytes by role of the built run."""
    quiet()
    parts = build_parts(config)
    return {row.name: row.bytes for row in parts.module.actor_critic.weights()}


def over_one(roles: Mapping[str, float]) -> float:
    """Policy + critic + reference + reward on their backbone, over the backbone alone."""
    return sum(roles[name] for name in ROLES) / roles["backbone"]


def four_models(roles: Mapping[str, float]) -> float:
    """The same as four models: policy and critic with an adapter, reference and reward whole."""
    return (4 * roles["backbone"] + roles["policy"] + roles["critic"]) / roles["backbone"]


def point(words: Sequence[str]) -> dict[str, float]:
    """One iteration in this process; its peaks by phase in GB, and the tokens of a row."""
    config = composed(list(words))
    peaks = PhasePeaks(torch.device("cpu"))
    width = 0

    def tell(stage: PPO) -> None:
        nonlocal width
        peaks.mark("update")
        assert stage.rollout is not None
        width = stage.rollout.prompt_ids.shape[1] + stage.rollout.response_ids.shape[1]

    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), tell, started=peaks.watch)
    after = max(peak for phase, peak in peaks.peaks.items() if phase != "load")
    return peaks.peaks | {"peak": after, "row_tokens": width}


def sizes(*, answers: int, micro: int) -> list[str]:
    """Settings of one point: whatever is not measured against stays the same."""
    return [
        f"ppo.prompts_per_iteration={answers}", f"ppo.minibatch_size={max(micro, 8)}",
        f"ppo.micro_batch_size={micro}", "ppo.iterations=1", "ppo.epochs=1", "generation.batch_size=8",
    ]  # fmt: skip


def role_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Megabytes by role, and the ratios to the backbone alone."""
    cells = [
        [
            name,
            *(f"{roles[role] / 1e6:.1f}" for role in ROLES),
            f"{over_one(roles):.3f}",
            f"{four_models(roles):.2f}",
        ]
        for name, roles in rows.items()
    ]
    return markdown(["MB", *ROLES, "all over backbone", "as four models"], cells)


def growth_table(x: Sequence[float], y: Sequence[float], *, what: str) -> tuple[str, Line]:
    """Points and the line through them, y in GB."""
    line = fit(x, y)
    cells = [
        [f"{a:g}", f"{b:.3f}", f"{line.intercept + line.slope * a:.3f}"] for a, b in zip(x, y, strict=True)
    ]
    text = f"\n\npeak = {line.intercept:.3f} GB + {1000 * line.slope:.3f} MB x {what} (R² = {line.r2:.3f})"
    return markdown([what, "peak GB", "line"], cells) + text, line


def growth(place: Path, words: Sequence[str], micro: Sequence[int], answers: Sequence[int]) -> dict[str, Any]:
    """Measure every point, print both tables, return the figures."""
    points = [(m, max(8, *micro)) for m in micro] + [(4, a) for a in answers]
    clock = Clock([0.5 + count / 16 for _, count in points])
    found = []
    for size, count in points:
        prompts = write_prompts(place / f"{count}.jsonl", count)
        command = [sys.executable, "-m", "benchmarks.memory", "--point", *words, f"data.path={prompts}"]
        found.append(run_json([*command, *sizes(answers=count, micro=size)]))
        clock.tick(f"{count} answers in micro-batches of {size}: {found[-1]['peak']:.2f} GB")
    by_micro, by_answers = found[: len(micro)], found[len(micro) :]
    tokens = [size * one["row_tokens"] for size, one in zip(micro, by_micro, strict=True)]
    first, line = growth_table(tokens, [one["peak"] for one in by_micro], what="tokens in a micro-batch")
    second, other = growth_table(answers, [one["peak"] for one in by_answers], what="answers in a rollout")
    print(f"{first}\n\n{second}")
    return {"points": found, "micro_batch": vars(line), "rollout": vars(other)}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["--point"]:
        print(json.dumps(point(arguments[1:])))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Bytes and peaks.")
    parser.add_argument("--micro", default=",".join(map(str, MICRO)), help="micro-batch sizes, as 1,2,4")
    parser.add_argument(
        "--answers", default=",".join(map(str, ANSWERS)), help="rollout sizes, multiples of 8"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)
    micro, answers = ([int(n) for n in text.split(",")] for text in (options.micro, options.answers))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        first = write_prompts(place / "first.jsonl", 8)
        words = [*options.set]
        bare = composed([*words, f"data.path={first}", "reward=length"])
        shape, lora = shape_at(bare.model.path), bare.model.lora
        reward = write_reward_adapter(place / "reward", shape, rank=lora.r, alpha=lora.alpha)
        words.append(f"reward.path={reward}")
        real = measured(composed([*words, f"data.path={first}", *sizes(answers=8, micro=8)]))
        roles = {
            f"{bare.model.name}, measured": real,
            f"{bare.model.name}, counted": counted(shape, rank=lora.r),
            "Llama-2-7B's shape, counted": counted(llama_config()),
        }
        print(role_table(roles) + "\n")
        found = {"roles": roles} | growth(place, words, micro, answers)
    write_json(options.out, found)
    return 0


if __name__ == "__main__":
    run_main(main)
