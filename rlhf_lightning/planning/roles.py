"""Who is on the backbone in each stage, and the parameters that each of them adds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_lightning.config.locate import ADAPTER, Want, locate
from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError
from rlhf_lightning.planning.shape import Linear, Shape

FLOAT = 4
"""Adapters, heads, their gradients and Adam's moments are float32, whatever the backbone's dtype."""


@dataclass(frozen=True)
class RolePlan:
    """What one role adds to the backbone."""

    name: str
    what: str
    parameters: int
    trains: bool
    first_layer: int
    """Lowest layer with an adapter of this role: the backward pass ends there."""
    stacked: int = 0
    """Numbers of its low-rank terms as the packed decoder multiplies them, see ``kernels.linears.Low``."""

    @property
    def bytes(self) -> int:
        return self.parameters * FLOAT


def roles_of(config: Config, shape: Shape) -> tuple[RolePlan, ...]:
    """The roles of a stage that trains, in the order of the cast.

    Raises:
        UserError: ``model.lora.target_modules`` names no layer of this model.
    """
    model, head = config.model, shape.sizes.hidden + 1
    started = _lora(config, shape, model.adapter, "model.adapter", "policy")
    match config.stage.name:
        case "sft":
            return (_role("policy", started, trains=True),)
        case "dpo":
            return _role("policy", started, trains=True), _reference(config, started)
        case "reward":
            return (_role("reward", started, trains=True, head=head),)
    roles = [_role("policy", started, trains=True)]
    judge = None
    if (found := _learned(config)) is not None:
        key, path = found
        judge = _lora(config, shape, path, f"{key}.path", "reward")
    if config.has_critic and model.critic == "shared":
        roles.append(RolePlan("critic", "value head on the policy's adapter", head, True, started.first))
    elif config.has_critic:
        own = judge or _lora(config, shape, None, "", "reward")
        roles.append(_role("critic", own, trains=True, head=head))
    roles.append(_reference(config, started))
    if judge is not None:
        roles.append(_role("reward", judge, trains=False, head=head))
    return tuple(roles)


@dataclass(frozen=True)
class _Lora:
    r: int
    parameters: int
    first: int
    stacked: int


def _role(name: str, lora: _Lora, *, trains: bool, head: int = 0) -> RolePlan:
    what = f"LoRA r={lora.r}" + (" and a head" if head else "")
    return RolePlan(name, what, lora.parameters + head, trains, lora.first, lora.stacked)


def _reference(config: Config, started: _Lora) -> RolePlan:
    if config.model.adapter is None:
        return RolePlan("reference", "the backbone itself", 0, False, 0)
    return RolePlan("reference", f"frozen copy, LoRA r={started.r}", started.parameters, False, started.first)


def _learned(config: Config) -> tuple[str, str] | None:
    """Key and path of the reward model that is an adapter on this backbone."""
    for key, reward in config.single_rewards.items():
        if isinstance(reward, LearnedRewardConfig):
            return key, reward.path
    return None


def _lora(config: Config, shape: Shape, path: str | None, key: str, want: Want) -> _Lora:
    """A fresh adapter of the config's shape, or the shape of the one that lies at ``path`` on this disk."""
    r, targets = config.model.lora.r, config.model.lora.target_modules
    if path is not None:
        file = Path(locate(path, key=key, want=want).folder) / ADAPTER
        if file.is_file():
            saved = json.loads(file.read_text(encoding="utf-8"))
            r, targets = saved["r"], saved["target_modules"]
    chosen = [linear for linear in shape.linears() if _targeted(linear, targets)]
    if not chosen:
        raise UserError(
            f"model.lora.target_modules={targets!r} names no layer of this model: it has "
            f"{', '.join(dict.fromkeys(linear.name.rpartition('.')[2] for linear in shape.linears()))}"
        )
    parameters = sum(r * (linear.inputs + linear.outputs) for linear in chosen)
    stacked = sum(r * (linear.inputs + shape.beside(linear)) for linear in chosen)
    return _Lora(r, parameters, min(linear.layer for linear in chosen), stacked)


def _targeted(linear: Linear, targets: Any) -> bool:
    """As PEFT matches: a list holds whole names or their endings, a text is a pattern."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, f"model.{linear.name}") is not None
    return any(linear.name == one or linear.name.endswith(f".{one}") for one in targets)
