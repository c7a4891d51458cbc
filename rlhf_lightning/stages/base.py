"""What every stage that trains has in common: one epoch of Lightning's Trainer is one iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.stages.schedule import rate_factor


class Stage(LightningModule):
    """Adapters on one backbone under manual optimization, an iteration an epoch, and what is saved of them.

    After each iteration ``metrics`` holds its figures by name. ``counters`` are of the whole run.

    Args:
        actor_critic: the roles on their backbone.
        config: the whole validated config.
    """

    def __init__(self, actor_critic: ActorCritic, config: Config) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters(config.model_dump(mode="json"))
        self.actor_critic = actor_critic
        self.config = config
        self.counters = {"iteration": 0, "optimizer_steps": 0, "responses": 0, "tokens": 0}
        self.metrics: dict[str, float] = {}
        self.progress: Callable[[str, int, int], None] = lambda phase, done, total: None
        self.pause: Callable[[Any], None] = lambda phase: None

    @property
    def total_iterations(self) -> int:
        """Iterations of the whole run."""
        raise NotImplementedError

    # ---- the optimizer ----------------------------------------------------------------------------

    def optimizer(self) -> Any:
        return self.optimizers()

    def set_rates(
        self, peaks: Mapping[str, float], *, step: int, total: int, warmup: int, schedule: str
    ) -> None:
        """Give each parameter group, by its name, its rate at optimizer step ``step`` of ``total``."""
        factor = rate_factor(step, total=total, warmup=warmup, schedule=schedule)
        for group in self.optimizer().param_groups:
            group["lr"] = peaks[group["name"]] * factor

    def step(self, *, max_grad_norm: float, keys: Mapping[str, str]) -> dict[str, float]:
        """Clip each group's gradient by its own norm, take one optimizer step, forget the gradients.

        Args:
            keys: setting to lower where a group's gradient blows up, by the group's name.
        Returns:
            Norms before clipping, by the group's name; 0 where nothing has a gradient.
        Raises:
            UserError: a gradient is not finite; nothing was stepped.
        """
        optimizer = self.optimizer()
        norms = {group["name"]: _clip(group["params"], max_grad_norm) for group in optimizer.param_groups}
        for name, norm in norms.items():
            if not math.isfinite(norm):
                raise UserError(
                    f"the gradient of the {name} is not finite in iteration {self.counters['iteration']}: "
                    f"nothing was stepped; lower {keys[name]}, or set model.dtype=float32"
                )
        optimizer.step()
        optimizer.zero_grad()
        self.counters["optimizer_steps"] += 1
        return norms

    # ---- saving -----------------------------------------------------------------------------------

    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The tensors that train, and nothing of the backbone."""
        return {name: parameter.detach() for name, parameter in self._trainable().items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Copy a checkpoint's tensors; the names have to match exactly.

        Raises:
            UserError: a tensor is missing, left over, or of another shape.
        """
        own = self._trainable()
        odd = sorted(set(own) ^ set(state_dict)) or [k for k in own if own[k].shape != state_dict[k].shape]
        if odd:
            raise UserError(
                f"resume: the checkpoint does not belong to this model and config: {len(odd)} tensors do not "
                f"match (first: {odd[0]})"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state_dict[name])
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["stage"] = {"name": self.config.stage.name, "counters": dict(self.counters)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counters = dict(checkpoint["stage"]["counters"])

    def save_adapters(self, folder: Path) -> None:
        """The adapters that train, one folder a role in PEFT's format, each with its scalar head."""
        self.actor_critic.save(folder)


def _clip(parameters: list[Tensor], limit: float) -> float:
    """Scale gradients down to ``limit``; the norm before, 0 where nothing has a gradient."""
    return float(torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], limit))
