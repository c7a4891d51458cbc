"""``python -m benchmarks.lr_zero``: at learning rate 0 nothing may move.

Ten iterations of PPO on the embedded model in float32. With rates of 0 the policy stays the reference, so
every ratio has to be 1 and every KL 0: whatever differs is a fault in a mask, a position, a cache,
an adapter switch or a dropout that was left on. Exit code 1 where a figure leaves its tolerance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import run_main
from benchmarks.training import train
from rlhf_lightning.config.schema import Config

RATIO_TOLERANCE = 1e-5  # the update cuts its batches otherwise than the rollout, so float32 rounds otherwise
ITERATIONS = 10
PROMPTS = ("The soup", "We came back for", "A slow waiter brought us", "Nothing on the menu of this place")


@dataclass(frozen=True)
class Row:
    """The largest deviation over all iterations of a run."""

    quantization: str
    critic: str
    ratio_off: float
    """max |policy/ratio_max - 1|"""
    kl: float
    """max |objective/kl|, nats a response"""
    seconds: float


def measure(quantization: str, critic: str, *, iterations: int = ITERATIONS, model: str = "tiny") -> Row:
    """Run PPO with both learning rates 0 and report what moved.

    Args:
        quantization: ``nf4`` or ``none``.
        critic: ``adapter`` or ``shared``.
        iterations: rollouts.
        model: ``tiny`` for the embedded one, or a folder.
    """
    started = time.perf_counter()
    history: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
        config = Config.model_validate(
            {
                "ppo": {
                    "iterations": iterations, "prompts_per_iteration": 16, "minibatch_size": 8,
                    "micro_batch_size": 4, "epochs": 2, "lr": 0.0, "critic_lr": 0.0,
                },
                "model": {"path": model, "quantization": quantization, "critic": critic, "dtype": "float32"},
                "data": {"path": str(prompts)},
                "generation": {"max_new_tokens": 16},
                "reward": {"kind": "length", "target": 8},
                "trainer": {"accelerator": "cpu", "threads": 1},
            }
        )  # fmt: skip
        train(config, Path(folder), lambda ppo: history.append(dict(ppo.metrics)))
    return Row(
        quantization,
        critic,
        max(abs(row["policy/ratio_max"] - 1) for row in history),
        max(abs(row["objective/kl"]) for row in history),
        time.perf_counter() - started,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """All four set-ups; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lr_zero", description="Nothing moves at rate 0."
    )
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--model", default="tiny", help="tiny, or a folder with a causal language model")
    options = parser.parse_args(arguments)
    rows = []
    pairs = [(quantization, critic) for quantization in ("none", "nf4") for critic in ("adapter", "shared")]
    for quantization, critic in pairs:
        rows.append(measure(quantization, critic, iterations=options.iterations, model=options.model))
        left = sum(row.seconds for row in rows) * (len(pairs) / len(rows) - 1)
        print(f"[{len(rows)}/{len(pairs)}] {quantization} {critic}, {left:.0f} s left", file=sys.stderr)
    print("| quantization | critic | iterations | max abs(ratio_max - 1) | max abs(objective/kl) | seconds |")
    print("|---|---|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row.quantization} | {row.critic} | {options.iterations} "
            f"| {row.ratio_off:.1e} | {row.kl:.1e} | {row.seconds:.0f} |"
        )
    return 0 if all(row.ratio_off <= RATIO_TOLERANCE and row.kl == 0.0 for row in rows) else 1


if __name__ == "__main__":
    run_main(main)
