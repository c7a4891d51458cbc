"""Who is speaking: the one place that chooses the active adapter on the shared backbone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from peft.tuners.lora import LoraLayer
from torch import nn

Role = Literal["policy", "critic", "reference", "reward", "rival"]


class Roles:
    """Maps each role to an adapter and switches between them.

    PEFT's own ``set_adapter`` and ``disable_adapter`` also change which tensors require grad, so that the
    second adapter would silently drop out of training. Here a switch touches only which low-rank term is
    added: who trains is decided once, when the model is built.

    With gradient checkpointing the backward pass runs the forward again, under whatever role is active then:
    keep forward and backward inside one ``with roles.use(...)``.
    """

    def __init__(self, model: nn.Module, adapters: dict[Role, str | None]) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self._adapters = dict(adapters)
        self._active: Role | None = None
        self._switch(None)

    def adapter(self, role: Role) -> str | None:
        """Name of the role's adapter; None where the bare backbone plays it."""
        return self._adapters[role]

    def __contains__(self, role: Role) -> bool:
        return role in self._adapters

    def __iter__(self) -> Iterator[Role]:
        return iter(self._adapters)

    @contextmanager
    def use(self, role: Role) -> Iterator[None]:
        """Play ``role`` inside the block; the role before it comes back afterwards, whatever happens."""
        before = self._active
        self._activate(role)
        try:
            yield
        finally:
            self._activate(before)

    def _activate(self, role: Role | None) -> None:
        if role != self._active:
            self._switch(None if role is None else self._adapters[role])
            self._active = role

    def _switch(self, adapter: str | None) -> None:
        for layer in self._layers:
            layer._disable_adapters = adapter is None
            layer._active_adapter = [] if adapter is None else [adapter]
