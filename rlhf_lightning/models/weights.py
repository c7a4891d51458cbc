"""What the roles weigh: tensors and bytes of the backbone, and of what each role adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from rlhf_lightning.models.actor_critic import ActorCritic


@dataclass(frozen=True)
class RoleWeight:
    """What one role adds to the backbone: tensors that train, tensors that do not, bytes."""

    name: str
    adapter: str
    head: str
    trainable: int
    frozen: int
    bytes: int


def weigh(actor_critic: ActorCritic) -> list[RoleWeight]:
    """Tensors and bytes of the backbone and of what each role adds to it."""
    lora = {key: p for key, p in actor_critic.model.named_parameters() if ".lora_" in key}
    base = [p for key, p in actor_critic.model.named_parameters() if key not in lora]
    buffers = sum(_bytes(state) for state in _quantization_state(actor_critic.backbone.model))
    rows = [RoleWeight("backbone", "", "", 0, sum(map(_count, base)), sum(map(_bytes, base)) + buffers)]
    labels = {"critic": "value head", "reward": "score head"}
    for role in actor_critic.roles:
        name, head = actor_critic.roles.adapter(role), actor_critic.heads.get(role)
        label = labels.get(role, "language-model head")
        if role == "critic" and actor_critic.shared_critic:
            adapter, own = f"{name} (shared)", []
        else:
            adapter = name or "none: the backbone itself"
            own = [p for key, p in lora.items() if f".{name}." in key]
        own += list(head.parameters()) if head is not None else []
        trainable = sum(_count(p) for p in own if p.requires_grad)
        frozen = sum(map(_count, own)) - trainable
        rows.append(RoleWeight(role, adapter, label, trainable, frozen, sum(map(_bytes, own))))
    return rows


def _count(parameter: Tensor) -> int:
    """Weights behind a tensor: 4-bit storage holds two in a byte, and knows its own shape."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _quantization_state(model: nn.Module) -> list[Tensor]:
    """Block maxima and code books beside the 4-bit weights, which are no parameters and still take memory."""
    found = []
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            found += [t for t in (state.absmax, state.code) if t is not None]
            state = state.state2
    return found
