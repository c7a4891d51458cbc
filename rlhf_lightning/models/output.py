"""What the model does to its logits behind the head: found in its config, believed only where it shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlhf_lightning.errors import UserError
from rlhf_lightning.models.backbone import Backbone

# Cohere and HyperCLOVA multiply, Granite divides by a setting of the same name, Falcon-H1 has its own.
_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_TOLERANCE = 0.02  # of the largest logit; a bfloat16 head keeps two to three digits


def soft_cap(backbone: Backbone) -> float | None:
    """c where logits become c tanh(z/c) (Gemma 2), else None."""
    cap: float | None = getattr(backbone.model.config.get_text_config(), "final_logit_softcapping", None)
    return cap


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Logits of hidden states, (N, H) -> (N, V) float32, before any factor and temperature."""
    return capped(linear(hidden.to(weight.dtype), weight, bias), softcap)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(z / c) where there is a cap, in float32."""
    logits = logits.float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@torch.no_grad()
def logit_scale(backbone: Backbone) -> float:
    """The factor between head and logits, 1 for most models: the one of the config's that the logits show.

    Raises:
        UserError: trunk and head do not give the model's own logits, so that every log-probability would be
            another model's.
    """
    model: Any = backbone.model
    ids = torch.arange(4, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    head = model.get_output_embeddings()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    own = head_logits(hidden, head.weight, getattr(head, "bias", None), soft_cap(backbone))
    theirs = model(input_ids=ids, use_cache=False).logits[0].float()
    config = model.config.get_text_config()
    named = [float(value) for name in _FACTORS if (value := getattr(config, name, None))]
    candidates = [1.0, *named, *(1 / value for value in named)]
    for factor in candidates:
        if (own * factor - theirs).abs().max() <= _TOLERANCE * theirs.abs().max():
            return factor
    raise UserError(
        f"model.path: {type(model).__name__} changes its logits behind the head in a way that is not known "
        "here, and PPO would score another distribution; choose another model"
    )
