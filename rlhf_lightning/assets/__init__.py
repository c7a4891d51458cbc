"""The embedded tiny world: a small language model, its tokenizer, prompts, preference pairs and reward.

The subject is short reviews of places to eat. Everything under ``tiny/`` is made by
``python -m scripts.tiny.build`` from text written for this project; ``gold`` is the rule that judges it.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent / "tiny"

TINY_FILES = (
    "model",
    "reward",
    "prompts.jsonl",
    "prompts_heldout.jsonl",
    "pairs.jsonl",
    "pairs_heldout.jsonl",
)


def tiny_path(name: str) -> Path:
    """Where one part of the tiny world lies.

    Args:
        name: one of ``TINY_FILES``: ``model`` and ``reward`` are folders, the others JSON lines files.

    Raises:
        ValueError: if there is no part of that name.
    """
    if name not in TINY_FILES:
        raise ValueError(f"no part {name!r} in the tiny world; there are: {', '.join(TINY_FILES)}")
    return _ROOT / name
