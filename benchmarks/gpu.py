"""``python -m benchmarks.gpu``: a 7B model's PPO on one GPU, and its rollout against ``generate()``.

Llama-2-7B's shape with random weights, drawn on the device and quantised one matrix at a time: no files. nf4,
LoRA r=16, four roles (the reward an adapter with random weights), gradient checkpointing, 64 prompts of 256
tokens, 256 new tokens each, micro-batches of 4. Memory is the allocator's peak; the first iteration warms up.
Runs on a CPU too, with a small shape (``--layers 2 --hidden 64 ...``), where memory is resident memory.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.adapters import write_reward_adapter
from benchmarks.machine import ROOT, Clock, markdown, middle, run_main, write_json
from benchmarks.phases import PhasePeaks
from benchmarks.rollout import Timed, our_sampler, peer_sampler, race
from benchmarks.rollout import table as rollout_table
from benchmarks.seven_b import SENTENCE
from benchmarks.training import train
from rlhf_lightning.assets import tiny_path
from rlhf_lightning.build import pick_device
from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.preflight import plan
from rlhf_lightning.config.schema import Config, ModelConfig
from rlhf_lightning.data.prompts import load_prompts
from rlhf_lightning.models.backbone import DTYPES, Backbone, as_backbone, quantization
from rlhf_lightning.stages.ppo import PPO
from rlhf_lightning.types import Prompts
from scripts.random_llama import add_shape, draw, shape_of, shards


class Drawn:
    """A weight that exists once it is asked for, as Transformers asks for a slice of a file."""

    def __init__(self, shape: tuple[int, ...], generator: torch.Generator) -> None:
        self.shape, self.generator = shape, generator

    def __getitem__(self, _: object) -> torch.Tensor:
        return draw(self.shape, self.generator)


def random_model(shape: LlamaConfig, config: ModelConfig, device: torch.device) -> LlamaForCausalLM:
    """A Llama of this shape on the device, stored as ``config`` says."""
    generator = torch.Generator(device).manual_seed(0)
    weights: Any = {name: Drawn(size, generator) for file in shards(shape) for name, size in file.items()}
    return LlamaForCausalLM.from_pretrained(
        None,
        config=shape,
        state_dict=weights,
        dtype=DTYPES[config.dtype],
        quantization_config=quantization(config),
        attn_implementation=config.attention,
        device_map={"": device},
    )


def compose(shape: LlamaConfig, place: Path, options: argparse.Namespace) -> Config:
    """``model=llama7b`` at the sizes asked for; prompts and reward adapter are written to ``place``."""
    prompts = place / "prompts.txt"
    prompts.write_text(options.batch * (SENTENCE * options.prompt + "\n"), encoding="utf-8")
    words = [
        "model=llama7b", "model.gradient_checkpointing=true", "data=text", f"data.path={prompts}",
        f"data.max_prompt_length={options.prompt}", f"generation.max_new_tokens={options.new}",
        f"generation.batch_size={options.batch}", "generation.ignore_eos=true", "logger=none",
        f"ppo.iterations={options.iterations}", f"ppo.prompts_per_iteration={options.batch}",
        f"ppo.minibatch_size={options.batch}", f"ppo.micro_batch_size={options.micro}",
        f"ppo.epochs={options.epochs}", f"model.critic={options.critic}", "reward=learned",
    ]  # fmt: skip
    reward = write_reward_adapter(place / "reward", shape, rank=16, alpha=32)
    # The adapter's folder says nothing of a backbone: the shape is not that of model.path, which is not read.
    return plan(Command(ROOT / "conf", [*words, f"reward.path={reward}", *options.set])).jobs[0]


def iterate(config: Config, backbone: Backbone, place: Path, last: Callable[[PPO], None]) -> dict[str, Any]:
    """Train: median seconds by phase without the first iteration, peaks by phase, generated tokens/s.

    Args:
        last: called at the end, while the model is still on its device: Lightning takes it off afterwards.
    """
    peaks = PhasePeaks(backbone.model.device)
    clock = Clock([1.0] * config.ppo.iterations)
    stamps: list[float] = []
    phases: dict[str, list[float]] = {"rollout": [], "score": [], "update": []}

    def begin(stage: PPO) -> None:
        peaks.watch(stage)
        stamps.append(time.perf_counter())

    def tell(stage: PPO) -> None:
        peaks.mark("update")
        stamps.append(time.perf_counter())
        for name, seconds in phases.items():
            seconds.append(stage.metrics[f"time/{name}_s"])
        clock.tick(f"iteration in {stamps[-1] - stamps[-2]:.1f} s")
        if len(stamps) > config.ppo.iterations:
            last(stage)

    train(config, place, tell, started=begin, backbone=backbone)
    seconds = [after - before for before, after in itertools.pairwise(stamps[1:])]
    tokens = config.ppo.responses * config.generation.max_new_tokens
    return {
        "peaks_gb": peaks.peaks,
        "peak_gb": peaks.highest,
        "seconds": {name: middle(times[1:]) for name, times in phases.items()},
        "seconds_an_iteration": middle(seconds),
        "tokens_per_s": tokens / middle(seconds),
    }


def rollouts(stage: PPO, shape: LlamaConfig, options: argparse.Namespace) -> list[Timed]:
    """Our rollout against ``generate()`` of nf4 with an adapter and of bfloat16 without one."""
    config, roles = stage.config, stage.actor_critic
    room = roles.backbone.context_length - config.generation.max_new_tokens
    read = load_prompts(config.data, roles.backbone.tokenizer, room=room)
    prompts = Prompts(tuple(map(tuple, read.ids)), tuple(read.texts), tuple(range(len(read))))
    ours = our_sampler(roles, options.new)
    rows = []
    for name, kind, adapter in (
        ("nf4 with adapter", "nf4", True),
        ("bfloat16 without adapter", "none", False),
    ):
        stored = config.model.model_copy(update={"quantization": kind})
        model = random_model(shape, stored, roles.device)
        peer = peer_sampler(model, options.new, pad=roles.backbone.pad_id, adapter=adapter)
        names = (name, "nf4 with adapter")
        rows.append(race(peer, ours, prompts, names=names, length=options.new, repeats=options.repeats))
        print(f"{name}: {rows[-1].ratio:.2f} times as fast", file=sys.stderr, flush=True)
        del model, peer
    return rows


def card(device: torch.device) -> str:
    """Name of what was measured on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def report(found: dict[str, Any], rows: Sequence[Timed], *, name: str) -> str:
    """Both tables under the card's name."""
    cells = [["load", "", f"{found['peaks_gb']['load']:.2f}"]]
    cells += [[p, f"{s:.1f}", f"{found['peaks_gb'][p]:.2f}"] for p, s in found["seconds"].items()]
    cells.append(["whole iteration", f"{found['seconds_an_iteration']:.1f}", f"{found['peak_gb']:.2f}"])
    head = f"{name}: {found['tokens_per_s']:.0f} generated tokens/s end to end"
    return f"{head}\n\n{markdown(['phase', 'seconds', 'peak GB'], cells)}\n\n{rollout_table(rows)}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="7B PPO on one GPU.")
    add_shape(parser)
    parser.add_argument("--batch", type=int, default=64, help="prompts of an iteration")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="new tokens of an answer")
    parser.add_argument("--micro", type=int, default=4, help="answers in one forward of the update")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--critic", choices=["adapter", "shared"], default="shared")
    parser.add_argument("--iterations", type=int, default=3, help="the first does not count")
    parser.add_argument("--repeats", type=int, default=3, help="of the rollout against generate()")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.iterations < 2:
        parser.error("--iterations must be at least 2: the first warms up")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    shape = shape_of(options)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        config = compose(shape, place, options)
        device = pick_device(config)
        tokenizer = AutoTokenizer.from_pretrained(str(tiny_path("model")))
        backbone = as_backbone(random_model(shape, config.model, device), tokenizer)
        rows: list[Timed] = []
        found = iterate(config, backbone, place, lambda stage: rows.extend(rollouts(stage, shape, options)))
    print(report(found, rows, name=card(device)))
    write_json(options.out, found | {"device": card(device), "rollout": [vars(row) for row in rows]})
    return 0


if __name__ == "__main__":
    run_main(main)
