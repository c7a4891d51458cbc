"""``python -m scripts.random_llama FOLDER``: a Llama of any size with random weights, a Transformers folder.

For measuring memory and time where the real weights cannot be had: the defaults are Llama-2-7B's shape
(6.74e9 weights, 13.5 GB in bfloat16). Matrices are N(0, 0.02²), norms are 1. One layer is one file, and no
more than one file's tensors is ever in memory. The tokenizer is the embedded model's, whose ids all fit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.errors import UserError

DEVIATION = 0.02
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Shapes = dict[str, tuple[int, ...]]


def llama_config(
    *,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    intermediate: int = 11008,
    vocab: int = 32000,
    context: int = 4096,
) -> LlamaConfig:
    """The config of such a model, with its own output matrix; the defaults are Llama-2-7B's shape.

    Raises:
        UserError: the heads do not divide the hidden size, or the vocabulary is below the tokenizer's.
    """
    if hidden % heads:
        raise UserError(f"--heads {heads} must divide --hidden {hidden} exactly")
    if heads % (kv_heads or heads):
        raise UserError(f"--kv-heads {kv_heads} must divide --heads {heads} exactly")
    tiny = LlamaConfig.from_pretrained(str(tiny_path("model")))
    if vocab < tiny.vocab_size:
        raise UserError(f"--vocab {vocab} must be at least the tokenizer's {tiny.vocab_size}")
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tiny.eos_token_id,
        pad_token_id=tiny.pad_token_id,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def shards(config: LlamaConfig) -> Iterator[Shapes]:
    """Names and shapes of the tensors, file by file: embedding, each layer, final norm and head."""
    width, inner = config.hidden_size, config.intermediate_size
    small = config.num_key_value_heads * (width // config.num_attention_heads)
    yield {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        yield {
            f"{at}.self_attn.q_proj.weight": (width, width),
            f"{at}.self_attn.k_proj.weight": (small, width),
            f"{at}.self_attn.v_proj.weight": (small, width),
            f"{at}.self_attn.o_proj.weight": (width, width),
            f"{at}.mlp.gate_proj.weight": (inner, width),
            f"{at}.mlp.up_proj.weight": (inner, width),
            f"{at}.mlp.down_proj.weight": (width, inner),
            f"{at}.input_layernorm.weight": (width,),
            f"{at}.post_attention_layernorm.weight": (width,),
        }
    yield {"model.norm.weight": (width,), "lm_head.weight": (config.vocab_size, width)}


def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A matrix N(0, 0.02²), or a norm's ones, in bfloat16, where the generator lives."""
    tensor = torch.ones(shape, dtype=torch.bfloat16, device=generator.device)
    return tensor if len(shape) == 1 else tensor.normal_(0.0, DEVIATION, generator=generator)


def write(folder: Path, config: LlamaConfig, *, seed: int = 0) -> int:
    """Fill ``folder`` with config, tokenizer, weights and their index.

    Returns:
        Bytes of the weights.

    Raises:
        UserError: the folder holds files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} holds files: take another folder, or empty this one")
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    files = list(shards(config))
    started, size, places = time.monotonic(), 0, {}
    for number, shapes in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {key: draw(shape, generator) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        left = (time.monotonic() - started) * (len(files) / number - 1)
        print(f"[{number}/{len(files)}] {size / 1e9:.2f} GB, {left:.0f} s left", file=sys.stderr, flush=True)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    for name in TOKENIZER:
        shutil.copy(tiny_path("model") / name, folder / name)
    config.save_pretrained(folder)  # last: without it no folder looks finished
    return size


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The flags of ``llama_config``."""
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as many as heads")
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--vocab", type=int, default=32000)


def shape_of(options: argparse.Namespace) -> LlamaConfig:
    """The config that the flags describe."""
    names = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab")
    return llama_config(**{name: getattr(options, name) for name in names})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.random_llama", description="Write a Llama with random weights."
    )
    parser.add_argument("folder", type=Path)
    add_shape(parser)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        size = write(options.folder.expanduser(), shape_of(options), seed=options.seed)
    except UserError as error:
        print(f"random_llama: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder}: {size / 1e9:.2f} GB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
