"""The short README.md that lies in an exported folder."""

from __future__ import annotations

from rlhf_lightning import __version__
from rlhf_lightning.config.subject import Subject

_FIGURES = 8
"""Figures of the last iteration that the card shows at most; the objective comes first."""


def card(subject: Subject, *, base: str, library: str, how: str, notes: list[str]) -> str:
    """Markdown with the front matter that model hubs read.

    Args:
        base: folder or hub id of the base model.
        library: ``peft`` or ``transformers``.
        how: Python that loads the folder.
        notes: further sentences.
    """
    stage = subject.config.stage.name if subject.config is not None else "unknown"
    kind = "Reward model" if subject.judges else "Language model"
    form = "a LoRA adapter" if library == "peft" else "a whole model"
    lines = [
        "---",
        f"base_model: {base}",
        f"library_name: {library}",
        "tags: [rlhf, lora]",
        "---",
        "",
        f"# {kind} tuned from {base}",
        "",
        f"{form[0].upper()}{form[1:]}, trained by rlhf_lightning {__version__} (stage {stage}).",
        *notes,
        "",
        "## Loading",
        "",
        "```python",
        how.strip(),
        "```",
    ]
    if figures := _figures(subject):
        lines += ["", "## Figures of the last iteration", "", "| metric | value |", "|---|---|", *figures]
    return "\n".join(lines) + "\n"


def _figures(subject: Subject) -> list[str]:
    summary = subject.summary
    last = summary.get("last") or {}
    families = ("eval/", "objective/", "reward_model/", "dpo/", "sft/")
    names = [name for name in last if name.startswith(families)]
    names.sort(key=lambda name: name != summary.get("objective"))
    numbers = [(name, last[name]) for name in names if isinstance(last[name], int | float)]
    return [f"| {name} | {value:.4g} |" for name, value in numbers[:_FIGURES]]
