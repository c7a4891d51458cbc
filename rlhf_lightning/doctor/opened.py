"""A PPO module opened for examination: slightly disturbed inside, as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from rlhf_lightning.randomness import counted_seed
from rlhf_lightning.stages.ppo import PPO

DISTURBANCE = 0.02  # deviation of the noise on B


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding explains."""

    same: float
    """Two passes over the same batch: |ratio - 1|."""
    recut: float
    """The same tokens in batches cut another way: |ratio - 1|."""
    other: float
    """The same row in a batch of another shape, as a share of the largest number or of 1."""
    gradient: float
    """All gradients by another way, as a share of their norm."""


class Opened:
    """Holds what the module was before, so that every tensor, counter and flag can be put back.

    Between ``open`` and ``restore`` the module takes optimizer steps without a Trainer.
    """

    def __init__(self, module: PPO) -> None:
        self.module = module
        self.model = module.actor_critic
        self.config = module.config
        half = self.model.backbone.model.dtype != torch.float32
        self.tolerance = Tolerance(1e-3, 0.2, 0.1, 0.1) if half else Tolerance(1e-6, 1e-3, 1e-4, 1e-3)

    def open(self) -> None:
        """Note everything that an examination may move."""
        module, device = self.module, self.model.device
        self._start = {name: p.detach().clone() for name, p in module._trainable().items()}
        self._training = {name: part.training for name, part in module.named_modules()}
        self._random = torch.get_rng_state()
        names = ("counters", "metrics", "rollout", "progress", "config", "_fabric", "_fabric_optimizers")
        self._attributes = {name: getattr(module, name) for name in names}
        self._beta, self._moments = module.beta.state_dict(), module.moments.state_dict()
        module.counters = dict(module.counters)
        module.progress = lambda phase, done, total: None
        # Fabric stands in for the Trainer: the module's own update runs, without a fit around it.
        devices = 1 if device.index is None else [device.index]
        module._fabric = Fabric(accelerator=device.type, devices=devices)

    def restore(self) -> None:
        """Put back what the examination touched."""
        self._load(self._start)
        for name, value in self._attributes.items():
            setattr(self.module, name, value)
        self.module.beta.load_state_dict(self._beta)
        self.module.moments.load_state_dict(self._moments)
        for name, part in self.module.named_modules():
            part.training = self._training[name]
        torch.set_rng_state(self._random)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Trainable tensors come back as they were at the start of the block."""
        before = {name: p.detach().clone() for name, p in self.module._trainable().items()}
        try:
            yield
        finally:
            self._load(before)
            self.model.eval()

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """The undisturbed set-up inside the block, as training would meet it."""
        with self.undone():
            self._load(self._start)
            yield

    def _load(self, tensors: dict[str, Tensor]) -> None:
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        self.module.zero_grad(set_to_none=True)

    @torch.no_grad()
    def disturb(self) -> int:
        """Add noise to every trainable B; returns how many there are."""
        generator = torch.Generator().manual_seed(counted_seed(self.config.seed, "doctor", "disturb"))
        count = 0
        for name, p in self.module._trainable().items():
            if ".lora_B." in name or ".lora_embedding_B." in name:
                p.add_(torch.randn(p.shape, generator=generator).to(p) * DISTURBANCE)
                count += 1
        return count

    def unchanging(self) -> dict[str, Tensor]:
        """All tensors that no update may touch: backbone, quantisation states, frozen adapters and heads."""
        found: dict[str, Tensor] = {}
        own = self.own_names()
        for name, p in self.module.named_parameters():
            if name not in own:
                found[name] = p
            state = getattr(p, "quant_state", None)
            if state is not None:
                found[f"{name}.absmax"] = state.absmax
        return found | dict(self.module.named_buffers())

    def own_names(self) -> set[str]:
        """Names of what should train, told by adapter and head and not by ``requires_grad``."""
        roles = self.model.roles
        adapters = {roles.adapter(role) for role in ("policy", "critic") if role in roles}
        found = set()
        for name, _ in self.module.named_parameters():
            lora = ".lora_" in name and any(f".{adapter}." in name for adapter in adapters)
            if lora or ".value_head." in name:
                found.add(name)
        return found

    def own_role(self, name: str) -> str:
        """Whose tensor it is: ``policy`` or ``critic``."""
        policy = self.model.roles.adapter("policy")
        return "policy" if ".lora_" in name and f".{policy}." in name else "critic"

    def four_bit(self) -> list[nn.Module]:
        return [m for m in self.model.modules() if hasattr(getattr(m, "weight", None), "quant_state")]
