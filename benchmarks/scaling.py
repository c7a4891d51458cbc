"""``python -m benchmarks.scaling``: how each phase's seconds grow, one setting at a time, with fitted lines.

A small Llama with random weights, written here, in bfloat16; one process a point, its first iteration warms
up. Against answers, answer length, epochs, vocabulary and layers, everything else as in ``BASE``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.adapters import write_reward_adapter
from benchmarks.fit import fit
from benchmarks.machine import Clock, markdown, middle, run_json, run_main, write_json
from benchmarks.race.ours import PHASES
from benchmarks.race.task import write_prompts
from scripts.random_llama import llama_config, write

BASE = {"answers": 16, "tokens an answer": 32, "epochs": 2, "vocabulary": 16_384, "layers": 4}
POINTS = {
    "answers": (8, 16, 32, 64),
    "tokens an answer": (16, 32, 64, 128),
    "epochs": (1, 2, 4),
    "vocabulary": (8_192, 16_384, 32_768, 65_536),
    "layers": (2, 4, 8, 16),
}


def words(place: Path, point: dict[str, int]) -> list[str]:
    """The settings of one point; its model, adapter and prompts are written where they are not there yet."""
    config = llama_config(
        layers=point["layers"], hidden=512, heads=8, kv_heads=4, intermediate=1536, vocab=point["vocabulary"]
    )
    model = place / f"model-{point['layers']}-{point['vocabulary']}"
    if not model.is_dir():
        write(model, config)
        write_reward_adapter(model / "reward", config, rank=16, alpha=32.0)
    prompts = write_prompts(place / f"{point['answers']}.jsonl", point["answers"])
    return [
        f"model.path={model}", "model.name=random", "model.quantization=none", f"reward.path={model}/reward",
        f"data.path={prompts}", "data.chat_template=never", "ppo.iterations=3",
        f"ppo.prompts_per_iteration={point['answers']}", f"ppo.epochs={point['epochs']}",
        f"generation.max_new_tokens={point['tokens an answer']}",
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="Seconds by phase.")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)
    series = [(name, value) for name, values in POINTS.items() for value in values]
    clock = Clock([1.0] * len(series))
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in POINTS}
    with tempfile.TemporaryDirectory() as folder:
        for name, value in series:
            point = BASE | {name: value}
            command = [sys.executable, "-m", "benchmarks.race.ours", *words(Path(folder), point)]
            phases = run_json(command)["phases"]
            found[name][value] = {phase: middle(phases[phase][1:]) for phase in PHASES}
            clock.tick(f"{name} {value}")
    cells = []
    for name, by_value in found.items():
        for phase in PHASES:
            x, y = list(by_value), [one[phase] for one in by_value.values()]
            line = fit(x, y)
            shown = " ".join(f"{seconds:.3f}" for seconds in y)
            law = f"{line.intercept:.3f} + {1000 * line.slope:.4g} ms x"
            cells.append([f"{name}: {', '.join(map(str, x))}", phase, shown, law, f"{line.r2:.3f}"])
    print(markdown(["x", "phase", "seconds", "line", "R²"], cells))
    write_json(options.out, found)
    return 0


if __name__ == "__main__":
    run_main(main)
