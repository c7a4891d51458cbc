"""``python -m benchmarks.rollout``: sampled tokens per second, ours against ``generate()`` of Transformers.

The same chat prompts, the same number of new tokens to each with no early end, temperature 0.7, no filter.
Three peers: a bitsandbytes nf4 model with a LoRA adapter as a user has it (eval mode, its own packing of the
weights on the CPU allowed), bfloat16 with the adapter, and bfloat16 without any adapter, the strictest. Our
side always carries the adapter. Peer and ours are timed in turn, ``--repeats`` times after one warm-up; a
figure is the median, a ratio is taken within a repeat before its median.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.machine import Clock, markdown, middle, run_main, write_json
from benchmarks.race.subjects import questions
from rlhf_lightning.config.schema import GenerationConfig as Sampling
from rlhf_lightning.config.schema import LoRAConfig, ModelConfig
from rlhf_lightning.data.padding import left_pad
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone, quantization
from rlhf_lightning.models.cast import sft_cast
from rlhf_lightning.rollout.generate import generate
from rlhf_lightning.run import quiet
from rlhf_lightning.types import Prompts

MODEL = "~/.cache/rlhf_lightning/smollm2-135m-instruct"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEMPERATURE = 0.7
Sampler = Callable[[Prompts], int]
"""Samples an answer to each prompt; returns the new tokens."""


@dataclass(frozen=True)
class Timed:
    """One pairing at one batch size."""

    peer: str
    ours: str
    batch: int
    peer_tokens_per_s: list[float]
    ours_tokens_per_s: list[float]

    @property
    def ratio(self) -> float:
        pairs = zip(self.ours_tokens_per_s, self.peer_tokens_per_s, strict=True)
        return middle([ours / peer for ours, peer in pairs])


def our_roles(path: str, **settings: Any) -> ActorCritic:
    """A policy with an adapter that is not zero, and nothing else."""
    lora = LoRAConfig(target_modules=MODULES)
    config = ModelConfig(path=path, dtype="bfloat16", lora=lora, **settings)
    roles = ActorCritic(load_backbone(config), config, cast=sft_cast(config), temperature=TEMPERATURE).eval()
    fill(roles)
    return roles


def our_sampler(roles: ActorCritic, length: int) -> Sampler:
    """Our rollout."""

    def sample(prompts: Prompts) -> int:
        how = Sampling(max_new_tokens=length, ignore_eos=True, batch_size=len(prompts.ids))
        return int(generate(roles, prompts, how, seed=0, iteration=0).response_mask.sum())

    return sample


def peer_model(path: str, *, nf4: bool) -> Any:
    """A causal language model as Transformers' users load it."""
    quantized = quantization(ModelConfig(quantization="nf4" if nf4 else "none", dtype="bfloat16"))
    return AutoModelForCausalLM.from_pretrained(
        Path(path).expanduser(), dtype=torch.bfloat16, quantization_config=quantized
    )


def peer_sampler(model: Any, length: int, *, pad: int, adapter: bool) -> Sampler:
    """``generate()`` as a user calls it."""
    if adapter:
        lora = LoraConfig(r=16, lora_alpha=32, target_modules=MODULES, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        fill(model)
    model.eval()
    model.generation_config.eos_token_id = None  # nothing ends early
    how = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=length, pad_token_id=pad
    )

    def sample(prompts: Prompts) -> int:
        ids, mask = (t.to(model.device) for t in left_pad(prompts.ids, pad))
        torch.manual_seed(0)
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask.long(), generation_config=how)
        return (out.shape[1] - ids.shape[1]) * len(ids)

    return sample


def fill(model: torch.nn.Module) -> None:
    """Random B matrices: no side may find out that an adapter adds nothing."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.01)


def prompts_for(roles: ActorCritic, count: int) -> Prompts:
    """Chat prompts where the model has a template, plain ones elsewhere."""
    tokenizer = roles.backbone.tokenizer
    texts = tuple(questions(count))
    if tokenizer.chat_template is None:
        ids = [tokenizer(text).input_ids for text in texts]
    else:
        chats = [[{"role": "user", "content": text}] for text in texts]
        ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)  # type: ignore[assignment]
    return Prompts(tuple(map(tuple, ids)), texts, tuple(range(count)))


def race(
    peer: Sampler, ours: Sampler, prompts: Prompts, *, names: tuple[str, str], length: int, repeats: int
) -> Timed:
    """Time both in turn.

    Raises:
        ValueError: a side sampled another number of tokens than the prompts times ``length``.
    """
    speeds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        for side in order:
            started = time.perf_counter()
            tokens = (peer, ours)[side](prompts)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            speed = tokens / (time.perf_counter() - started)
            if tokens != len(prompts.ids) * length:
                raise ValueError(f"{names[side]} sampled {tokens} tokens, not {len(prompts.ids)} x {length}")
            if turn:  # the first warms up
                speeds[side].append(speed)
    return Timed(*names, len(prompts.ids), *speeds)


def table(rows: Sequence[Timed]) -> str:
    """Medians and ratios."""
    cells = [
        [
            f"{row.peer}; ours {row.ours}",
            row.batch,
            f"{middle(row.peer_tokens_per_s):.1f}",
            f"{middle(row.ours_tokens_per_s):.1f}",
            f"{row.ratio:.2f}",
        ]
        for row in rows
    ]
    return markdown(["generate() of", "batch", "its tokens/s", "our tokens/s", "times as fast"], cells)


def pairings() -> list[tuple[str, bool, bool, str, dict[str, str]]]:
    """(peer's name, whether in nf4, whether with an adapter, our name, our settings)."""
    field = ModelConfig.model_fields.get("rollout_weights")
    ways = get_args(field.annotation) if field else ()
    own = [(f"nf4, {way}", {"quantization": "nf4", "rollout_weights": way}) for way in ways]
    plain = ("bfloat16", {"quantization": "none"})
    return [
        *(("nf4 with adapter", True, True, *side) for side in own or [("nf4", {"quantization": "nf4"})]),
        ("bfloat16 with adapter", False, True, *plain),
        ("bfloat16 without adapter", False, False, *plain),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description="Against generate().")
    parser.add_argument("--model", default=MODEL, help="folder of a causal language model")
    parser.add_argument("--batches", default="1,16,64", help="answers side by side, as 1,16,64")
    parser.add_argument("--length", type=int, default=48, help="new tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)
    quiet()
    batches = [int(text) for text in options.batches.split(",")]
    clock = Clock([1.0 + batch / 16 for _ in pairings() for batch in batches])
    rows = []
    for theirs, nf4, adapter, name, settings in pairings():
        roles = our_roles(options.model, **settings)
        ours = our_sampler(roles, options.length)
        model = peer_model(roles.backbone.model.config._name_or_path, nf4=nf4)
        peer = peer_sampler(model, options.length, pad=roles.backbone.pad_id, adapter=adapter)
        for batch in batches:
            prompts = prompts_for(roles, batch)
            names = (theirs, name)
            rows.append(
                race(peer, ours, prompts, names=names, length=options.length, repeats=options.repeats)
            )
            clock.tick(f"{theirs} against ours {name}, batch {batch}: {rows[-1].ratio:.2f} times as fast")
        del ours, peer, roles, model
    print(table(rows))
    write_json(options.out, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    run_main(main)
