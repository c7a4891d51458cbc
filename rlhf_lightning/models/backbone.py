"""The frozen model that every role stands on: weights, tokenizer, and the facts that all passes share."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    PreTrainedModel,
    modeling_utils,
)

from rlhf_lightning.allocator import bound_shape_caches, give_back_freed_memory
from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Backbone:
    """A causal language model ready to carry adapters, with its tokenizer.

    ``end_ids`` is the one set of end tokens used for stopping, masks, lengths and penalties alike; ``pad_id``
    only fills cells that every mask hides.
    """

    model: PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    end_ids: frozenset[int]
    pad_id: int
    context_length: int

    @property
    def hidden_size(self) -> int:
        """Width of what the language-model head reads; OPT-350M's blocks are wider than that."""
        return self.model.get_output_embeddings().weight.shape[1]


def load_backbone(config: ModelConfig, *, device: torch.device | str = "cpu") -> Backbone:
    """Load the frozen backbone on ``device``, quantised where asked, with every dropout off.

    Raises:
        UserError: weights or tokenizer cannot be had, or the model is not a causal language model.
    """
    path = str(tiny_path("model")) if config.path == "tiny" else str(Path(config.path).expanduser())
    common = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    reading = nullcontext() if config.quantization == "none" else _read_weight_by_weight()
    with _explained(config, path), reading:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        model_config = AutoConfig.from_pretrained(path, **common)
        _switch_dropout_off(model_config)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=DTYPES[config.dtype],
            quantization_config=quantization(config),
            attn_implementation=config.attention,
            device_map={"": device},
            **common,
        )
    return as_backbone(model, tokenizer)


def as_backbone(model: PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase) -> Backbone:
    """Freeze a loaded model, switch its dropout layers off, and gather what every pass has to know of it.

    Raises:
        UserError: the tokenizer is not the model's, no token ends an answer, or rows cannot leave the cache.
    """
    bound_shape_caches()
    give_back_freed_memory()
    silence_dropout(model)
    _forbid_packed_weights(model)
    model.requires_grad_(False)
    model.eval()
    end_ids = _end_ids(model, tokenizer)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    _check_vocabulary(model, tokenizer)
    _check_cache(model)
    context = min(int(positions or tokenizer.model_max_length), _same_frequencies(model))
    return Backbone(model, tokenizer, end_ids, _pad_id(tokenizer, end_ids), context)


@contextmanager
def _read_weight_by_weight() -> Iterator[None]:
    """Copy each weight out of its file when its turn comes.

    Transformers maps the files into memory instead. Weights that are kept as they are then lie where the file
    lies, but of those that are quantised every page read stays resident until the last one is loaded: 13.5 GB
    for a 7B model that takes 3.9 in 4 bits.
    """
    opened = modeling_utils.safe_open

    def read(*args: Any, **keywords: Any) -> Any:
        return opened(*args, **(keywords | {"backend": "pread"}))

    modeling_utils.safe_open = read  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        modeling_utils.safe_open = opened  # type: ignore[misc]


@contextmanager
def _explained(config: ModelConfig, path: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
        if re.search("attention implementation|flash.?attention", said, flags=re.IGNORECASE):
            raise UserError(
                f"model.attention={config.attention} does not go with this model ({said[:120]}): "
                "set model.attention=eager"
            ) from error
        if Path(path).is_dir():
            found = f"the folder holds no model that can be loaded ({said[:200]})"
        else:
            found = "there is no such folder, and the hub cannot be reached or does not hand it out"
        raise UserError(
            f"model.path={config.path!r}: {found}. Point model.path at a folder with the weights in "
            f"Transformers' format, for example model.path=~/models/{config.name}"
        ) from error


def quantization(config: ModelConfig) -> BitsAndBytesConfig | None:
    """How Transformers is to store the frozen weights; None: as they are."""
    if config.quantization == "none":
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[config.dtype],
    )


def silence_dropout(model: nn.Module) -> None:
    """Make every dropout layer drop nothing, in train mode too: old and new ratios have to match."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _switch_dropout_off(config: transformers.PreTrainedConfig) -> None:
    """Dropout of attention and of layers, and jitter of routers, live in the config and fire in train mode,
    which gradient checkpointing needs.
    """
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)


def _forbid_packed_weights(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights on CPUs with AVX512-BF16.

    A packed ``Linear4bit`` passes no gradient to its input ever again, and one forward in eval mode packs it.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _same_frequencies(model: PreTrainedModel) -> int:
    """Positions within which a row's rotary frequencies are its own.

    Longrope takes the frequencies of all rows by the longest one beside them: scoring and update, which group
    rows differently, would read different models.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return sys.maxsize
    return int(rope["original_max_position_embeddings"])


def _end_ids(model: PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase) -> frozenset[int]:
    found: set[int] = set()
    for owner in (tokenizer, model.config.get_text_config(), getattr(model, "generation_config", None)):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise UserError(
            "model.path: neither tokenizer nor model names an end token, so no answer could ever end"
        )
    return frozenset(found)


def _pad_id(tokenizer: transformers.PreTrainedTokenizerBase, end_ids: frozenset[int]) -> int:
    """An existing id: adding a token would resize the embeddings, and masks come from lengths anyway."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids)


def _check_vocabulary(model: PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr, index]
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise UserError(
            f"model.path: the tokenizer's largest id is {largest} but the model's embedding has {rows} rows: "
            "they do not belong together"
        )


def _check_cache(model: PreTrainedModel) -> None:
    """A recurrent state has no rows to take out, and rows that end leave the rollout's batch."""
    layers = DynamicCache(config=model.config).layers
    if any(not hasattr(layer, "batch_select_indices") for layer in layers):
        raise UserError(
            f"model.path: {type(model).__name__} has recurrent layers, whose state the rollout cannot thin "
            "out as answers end; choose a model with attention alone"
        )


def cache_keyword(trunk: nn.Module) -> str:
    """Transformers renamed ``past_key_values`` to ``cache`` in 5.x; both names are in the supported range."""
    return "cache" if "cache" in inspect.signature(trunk.forward).parameters else "past_key_values"
