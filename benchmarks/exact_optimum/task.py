"""A language of seven words in which every response can be written down, and a rule that judges it.

A response is one to three words long, or empty: at each of three steps the model names a word or ends. That
makes 1 + 7 + 49 responses that end by themselves and 343 that the limit cuts, 400 for each prompt. The text
of a response and its tokens determine each other, so a reward that reads text is a function of the response.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_lightning.config.schema import Config

WORDS = ("the", "soup", "bread", "was", "warm", "cold", "very")
PROMPTS = ("soup", "the bread", "bread was very", "the soup was warm")  # of uneven length: they get padded
END = 0
MAX_NEW_TOKENS = 3

# What a word gives wherever it stands, and what it gives right after another, the prompt's last included.
WORTH = {"the": 0.0, "soup": 0.3, "bread": -0.2, "was": 0.1, "warm": 0.5, "cold": -0.6, "very": 0.2}
FOLLOWS = {
    ("the", "soup"): 0.6,
    ("the", "bread"): 0.3,
    ("soup", "was"): 0.7,
    ("bread", "was"): 0.4,
    ("was", "very"): 0.5,
    ("was", "warm"): 0.2,
    ("very", "warm"): 0.8,
    ("very", "cold"): 0.9,
    ("warm", "the"): 0.4,
    ("warm", "soup"): -0.3,
    ("cold", "bread"): 0.7,
}
REPEATED = -0.8  # a word right after itself
WORD_COST = 0.35  # a response that stops early saves it


def judge(prompt: str, response: str) -> float:
    """The reward of a response: of its words, their order, their number, and the prompt's last word."""
    words = response.split()
    pairs = itertools.pairwise([prompt.split()[-1], *words])
    joined = sum(REPEATED if a == b else FOLLOWS.get((a, b), 0.0) for a, b in pairs)
    return joined + sum(WORTH[word] - WORD_COST for word in words)


def reward(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """``judge`` in the form that ``reward.function`` takes."""
    return [judge(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def all_responses() -> list[tuple[int, ...]]:
    """Every response as token ids, the end token included where one was sampled."""
    words = range(1, len(WORDS) + 1)
    ended = [
        (*body, END) for length in range(MAX_NEW_TOKENS) for body in itertools.product(words, repeat=length)
    ]
    return ended + list(itertools.product(words, repeat=MAX_NEW_TOKENS))


def text_of(response: Sequence[int]) -> str:
    """What the reward reads, said without the tokenizer."""
    return " ".join(WORDS[token - 1] for token in response if token != END)


def write_task(folder: Path, *, seed: int) -> None:
    """Write ``model`` (a random stock Llama with a word-level tokenizer) and ``prompts.txt`` into a folder.

    Args:
        folder: an existing folder.
        seed: of the weights: each seed is another reference, with its own optimum.
    """
    vocabulary = {"<eos>": END} | {word: number for number, word in enumerate(WORDS, start=1)}
    words = Tokenizer(models.WordLevel(vocabulary))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(vocabulary),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=32,
                tie_word_embeddings=False,
                eos_token_id=END,
                bos_token_id=None,
                pad_token_id=END,
                initializer_range=0.2,
            )
        )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")


SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "iterations": 70,
        "prompts_per_iteration": len(PROMPTS),
        "samples_per_prompt": 64,
        "epochs": 4,
        "minibatch_size": 128,
        "micro_batch_size": 128,
        "lr": 1e-2,
        "critic_lr": 1e-2,
        "lr_schedule": "linear",
        "whiten_advantages": False,  # advantages vanish at the optimum: whitening would blow up noise
        "vf_coef": 1.0,
        "clip_value": None,
    },
    "model": {
        "name": "seven-words",
        "quantization": "none",
        "dtype": "float32",
        "lora": {"r": 8, "alpha": 16.0},
    },
    "generation": {"max_new_tokens": MAX_NEW_TOKENS, "batch_size": 256},
    "reward": {"kind": "function", "function": "benchmarks.exact_optimum.task:reward"},
    "trainer": {"accelerator": "cpu", "threads": 1},
}


def make_config(
    folder: Path, *, beta: float, seed: int, overrides: Mapping[str, Any] | None = None
) -> Config:
    """The validated config of one run on the task in ``folder``.

    Args:
        overrides: dotted key -> value, laid over ``SETTINGS``.
    """
    values: dict[str, Any] = {section: dict(settings) for section, settings in SETTINGS.items()}
    values["seed"] = seed
    values["ppo"]["beta"] = beta
    values["model"]["path"] = str(folder / "model")
    values["data"] = {"path": str(folder / "prompts.txt")}
    for key, value in (overrides or {}).items():
        *path, name = key.split(".")
        section = values
        for part in path:
            section[part] = dict(section.get(part) or {})
            section = section[part]
        section[name] = value
    return Config.model_validate(values)
