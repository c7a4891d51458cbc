"""Which backbone an adapter was trained on: written beside each saved adapter, compared when it is loaded.

Shapes alone do not tell: a base model and its instruct version have the same. The embedding does; it is never
quantised, so that nf4 and plain loads agree, and it is compared in bfloat16, so that float32 and bfloat16
loads of the same weights agree. Two models that share their embedding to the bit, such as a base and the same
base with an adapter merged into it, cannot be told apart.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.errors import UserError
from rlhf_lightning.models.backbone import Backbone

log = logging.getLogger(__name__)

FILE = "backbone.json"
ROWS = 64
"""Rows of the embedding that the digest reads, evenly spread over the tokenizer's vocabulary."""
_SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclass(frozen=True)
class Identity:
    """What is known of a backbone; the digests are SHA-256 in hexadecimal."""

    path: str
    """``model.path`` or what Transformers was given, for messages; never compared."""
    config: str
    embedding: str | None
    """None where the weights were loaded in float16: rounding them twice does not give the same numbers."""
    vocabulary: str
    chat_template: str

    def save(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def identify(backbone: Backbone, path: str) -> Identity:
    """The identity of a loaded backbone, named ``path`` in messages."""
    tokenizer, config = backbone.tokenizer, backbone.model.config.get_text_config()
    vocabulary = sorted(tokenizer.get_vocab().items())
    embedding: Any = backbone.model.get_input_embeddings()
    return Identity(
        path,
        _digest([getattr(config, name, None) for name in _SHAPE]),
        _embedding_digest(embedding.weight, len(vocabulary)),
        _digest(vocabulary),
        _digest(tokenizer.chat_template),
    )


def compare(folder: Path, own: Identity, *, at: str) -> None:
    """Refuse an adapter that was trained on another backbone; a folder that does not say is let through.

    Args:
        folder: an adapter's folder, perhaps with ``backbone.json``.
        own: the backbone that it is put on.
        at: setting and value, for messages.

    Raises:
        UserError: another embedding, shape or vocabulary. Another chat template is only warned of.
    """
    if not (folder / FILE).is_file():
        return
    try:
        theirs = Identity(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{at}: {FILE} in it cannot be read ({error})") from None
    made = f"{at} was trained on another model: on {theirs.path}, not on model.path={own.path}"
    if theirs.config != own.config:
        raise UserError(f"{made} (their architectures differ)")
    if theirs.vocabulary != own.vocabulary:
        raise UserError(
            f"{at} was trained with another tokenizer: that of {theirs.path}, whose vocabulary is not that "
            f"of model.path={own.path}"
        )
    if None not in (theirs.embedding, own.embedding) and theirs.embedding != own.embedding:
        raise UserError(f"{made} (their embeddings differ)")
    if theirs.chat_template != own.chat_template:
        log.warning(
            "%s was trained with another chat template than that of model.path=%s: conversations will look "
            "different to it",
            at,
            own.path,
        )


def _embedding_digest(weight: Tensor, vocabulary: int) -> str | None:
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    last = min(vocabulary, len(weight)) - 1
    rows = torch.linspace(0, last, ROWS, dtype=torch.float64).round().long().to(weight.device)
    values = weight.detach()[rows].to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(values.view(torch.int16).numpy().tobytes()).hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()
