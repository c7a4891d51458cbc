"""A PPO iteration that a signal cut between two optimizer steps: what goes on from there needs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple, Self

from rlhf_lightning.functional.policy_losses import SurrogateStats, ValueStats
from rlhf_lightning.stages.losses import UpdateStats
from rlhf_lightning.types import Rollout


class Unfinished(NamedTuple):
    """The experience, the seconds that it took by metric, and the figures of the steps taken so far."""

    rollout: Rollout
    clock: dict[str, float]
    stats: UpdateStats

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings, as a checkpoint may hold them."""
        return {"rollout": _plain(self.rollout), "clock": dict(self.clock), "stats": _plain(self.stats)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        stats = UpdateStats(**state["stats"])
        stats.policy = SurrogateStats(*stats.policy) if stats.policy else None
        stats.critic = ValueStats(*stats.critic) if stats.critic else None
        return cls(Rollout(**state["rollout"]), dict(state["clock"]), stats)


def _plain(record: Any) -> dict[str, Any]:
    """The fields by name; a named tuple becomes a plain one, which the safe loader takes."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: tuple(value) if isinstance(value, tuple) else value for name, value in values.items()}
