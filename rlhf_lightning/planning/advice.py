"""What each switch would save: the plan again with one setting changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from rlhf_lightning.config.schema import Config
from rlhf_lightning.planning.plan import Plan, make_plan

SECTIONS = {"ppo": "ppo", "sft": "sft", "reward": "reward_model", "dpo": "dpo"}
"""Stage -> the section that holds its micro_batch_size."""


@dataclass(frozen=True)
class Advice:
    """One setting to change, as typed, and the bytes that the peak loses by it."""

    setting: str
    saved: int


@dataclass(frozen=True)
class Switch:
    """A dotted key and the value that takes less memory."""

    key: str
    value: Any

    def __str__(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={shown}"


def advise(config: Config, plan: Plan) -> tuple[tuple[Advice, ...], int]:
    """Every switch that a config has left, by what it saves at the peak, the most first.

    Returns:
        The advice, and the peak in bytes with all of it taken.
    """
    switches = list(_switches(config))
    advice = [Advice(str(s), plan.peak.bytes - make_plan(_turn(config, s)).peak.bytes) for s in switches]
    together = make_plan(reduce(_turn, switches, config)).peak.bytes
    return tuple(sorted(advice, key=lambda one: -one.saved)), together


def _switches(c: Config) -> Iterator[Switch]:
    if not c.model.gradient_checkpointing:
        yield Switch("model.gradient_checkpointing", True)
    if c.model.quantization == "none":
        yield Switch("model.quantization", "nf4")
    if c.stage.name == "ppo" and c.has_critic and c.model.critic == "adapter":
        yield Switch("model.critic", "shared")
    section = SECTIONS[c.stage.name]
    micro = getattr(c, section).micro_batch_size
    if micro % 2 == 0:
        yield Switch(f"{section}.micro_batch_size", micro // 2)
    if c.stage.name == "ppo" and c.generation.batch_size > 1:
        yield Switch("generation.batch_size", c.generation.batch_size // 2)
    if c.stage.name == "ppo" and c.model.rollout_weights != "nf4":
        yield Switch("model.rollout_weights", "nf4")
    if c.model.lora.r > 1:
        yield Switch("model.lora.r", c.model.lora.r // 2)


def _turn(config: Config, switch: Switch) -> Config:
    section, *inside, name = switch.key.split(".")
    part = getattr(config, section)
    if inside:
        value = getattr(part, inside[0]).model_copy(update={name: switch.value})
        return config.model_copy(update={section: part.model_copy(update={inside[0]: value})})
    return config.model_copy(update={section: part.model_copy(update={name: switch.value})})
