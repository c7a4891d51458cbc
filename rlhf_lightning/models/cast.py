"""Who plays which role in each stage, on one backbone."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.models.roles import Role


@dataclass(frozen=True)
class Part:
    """How one role is played: which adapter speaks, what that adapter starts from, whether it learns."""

    adapter: str | None
    """Name on the model; None: the bare backbone plays the role."""
    start: str | None = None
    """Folder of the adapter that it is a copy of; None: fresh, and adds nothing yet."""
    key: str = "model.adapter"
    """Setting that named ``start``, for messages."""
    trains: bool = False


Cast = dict[Role, Part]


def ppo_cast(model: ModelConfig, *, reward_path: str | None, critic: bool = True) -> Cast:
    """Policy and critic learn; reference and reward model are frozen.

    The reference is a frozen copy of ``model.adapter``, taken before anything is resumed, or the bare
    backbone. The critic starts from the reward adapter where there is one, or shares the policy's trunk.

    Args:
        reward_path: folder of a reward adapter with its score head; None: the reward lives elsewhere.
        critic: False where the advantages need no values.
    """
    cast: Cast = {"policy": Part("policy", model.adapter, trains=True)}
    if critic and model.critic == "shared":
        cast["critic"] = cast["policy"]
    elif critic:
        cast["critic"] = Part("critic", reward_path, "reward.path", trains=True)
    cast["reference"] = _reference(model)
    if reward_path is not None:
        cast["reward"] = Part("reward", reward_path, "reward.path")
    return cast


def sft_cast(model: ModelConfig) -> Cast:
    """The policy learns, from ``model.adapter`` where it is set."""
    return {"policy": Part("policy", model.adapter, trains=True)}


def dpo_cast(model: ModelConfig) -> Cast:
    """As for SFT, against a frozen copy of the policy's own beginning."""
    return sft_cast(model) | {"reference": _reference(model)}


def reward_cast(model: ModelConfig) -> Cast:
    """The reward adapter learns, a copy of ``model.adapter`` at first, with a new score head."""
    return {"reward": Part("reward", model.adapter, trains=True)}


def evaluate_cast(
    model: ModelConfig, *, run: str, against: str | None = None, reward_path: str | None = None
) -> Cast:
    """Nobody learns: the policy of ``run``, what it started from, and where asked another run's policy."""
    cast: Cast = {"policy": Part("policy", run, "run"), "reference": _reference(model)}
    if against is not None:
        cast["rival"] = Part("rival", against, "evaluate.against")
    if reward_path is not None:
        cast["reward"] = Part("reward", reward_path, "reward.path")
    return cast


def _reference(model: ModelConfig) -> Part:
    return Part(None) if model.adapter is None else Part("reference", model.adapter)
