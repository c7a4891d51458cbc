"""From something trained to its roles on one backbone, outside a run: for chat, export and servers."""

from __future__ import annotations

import warnings

import torch
import transformers

from rlhf_lightning.config.subject import Subject
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import Cast, Part


def pick_device(name: str) -> torch.device:
    """``auto``: the first GPU where there is one, else the CPU.

    Raises:
        UserError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name}: there is no such device ({str(error).splitlines()[0]})") from error
    return device


def subject_cast(subject: Subject, *, reference: bool = False, reward: str | None = None) -> Cast:
    """Who plays which role: nobody learns.

    Args:
        reference: also what the policy started from.
        reward: also this reward adapter, by path.
    """
    if subject.judges:
        return {"reward": Part("reward", subject.adapter, "RUN")}
    # A whole model has no adapter: its policy is a fresh one, which adds nothing.
    cast: Cast = {"policy": Part("policy", subject.adapter, "RUN")}
    if reference:
        start = subject.model.adapter
        cast["reference"] = Part(None) if start is None else Part("reference", start)
    if reward is not None:
        cast["reward"] = Part("reward", reward, "--reward")
    return cast


def load_roles(
    subject: Subject,
    *,
    device: torch.device,
    temperature: float = 1.0,
    reference: bool = False,
    reward: str | None = None,
) -> ActorCritic:
    """The roles of ``subject_cast`` on the subject's backbone, ready to be asked.

    Raises:
        UserError: the backbone cannot be loaded, or something does not fit it.
    """
    model = subject.model
    if device.type == "cpu" and model.attention == "flash_attention_2":
        model = model.model_copy(update={"attention": "sdpa"})
    backbone = load_backbone(model, device=device)
    cast = subject_cast(subject, reference=reference, reward=reward)
    return ActorCritic(backbone, model, cast=cast, temperature=temperature).eval()


def quiet() -> None:
    """Libraries speak only when something is wrong."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for message in ("`is_gradient_checkpointing` is deprecated", "fan_in_fan_out"):
        warnings.filterwarnings("ignore", message=f".*{message}")
