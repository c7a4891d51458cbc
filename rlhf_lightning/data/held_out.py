"""Which rows are only measured on, where no file of them is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.errors import UserError
from rlhf_lightning.randomness import counted_seed

if TYPE_CHECKING:
    from rlhf_lightning.config.schema import DataConfig

T = TypeVar("T")
Part = Literal["train", "held_out", "all"]
SHARE = 0.1  # where the user says nothing


def share_held_out(share: float | None, *, stage: str, evaluating: bool) -> float:
    """Share of the rows that a run keeps apart where ``data.held_out`` names none.

    Args:
        share: ``data.held_out_share``; None: nothing was said.
        stage: the run's.
        evaluating: whether PPO evaluates while it trains; if not, it learns from every prompt.
    """
    if share is not None:
        return share
    return 0.0 if stage == "ppo" and not evaluating else SHARE


def held_out_source(config: DataConfig, embedded: str) -> DataConfig:
    """The settings with ``data.held_out`` in the place of ``data.path``.

    Args:
        embedded: the file that ``tiny`` stands for; its form is its own, whatever that of ``data.path``.
    """
    path, form = config.held_out, config.format
    if path == "tiny":
        path, form = str(tiny_path(embedded)), "auto"
    return config.model_copy(update={"path": path, "format": form})


def prompt_key(prompt: Any) -> str:
    """What decides on which side a row falls, the same in every stage: its prompt before any template.

    Args:
        prompt: text, or a list of messages, which counts as what they say.
    """
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


def split_rows(
    rows: Sequence[T], key: Callable[[T], str], share: float, *, path: str, what: str
) -> tuple[list[T], list[T]]:
    """Rows to learn from and rows to measure on.

    Args:
        path, what: name the rows in messages.

    Raises:
        UserError: one of the sides is empty.
    """
    sides: tuple[list[T], list[T]] = ([], [])
    for row in rows:
        sides[is_held_out(key(row), share)].append(row)
    if not sides[0] or (share and not sides[1]):
        raise UserError(
            f"data.held_out_share={share:g} of the {len(rows)} {what} of data.path={path} leaves "
            f"{len(sides[0])} to learn from, {len(sides[1])} to measure on: change the share, or name other "
            "rows in data.held_out"
        )
    return sides


def is_held_out(text: str, share: float) -> bool:
    """Whether a row is kept for measuring, by its prompt: equal prompts fall on one side.

    The answer depends on the text alone, not on the run's seed, the file's order or its other rows: two runs,
    and two stages on the same prompts, keep the same ones apart.

    Args:
        text: the prompt, or what else stands for the row.
        share: expected share of texts that are held out, 0 to 1.
    """
    return counted_seed(0, "held_out", text) / 2**63 < share
