"""What a reward is, and the one check that every number passes before it can train anything."""

from __future__ import annotations

import numbers
import traceback
from collections.abc import Sequence
from decimal import Decimal
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_lightning.errors import UserError
from rlhf_lightning.types import Scores

SHOWN = 80  # characters of a text that an error message repeats


class Reward(Protocol):
    """Judges B finished answers from their texts, specials stripped."""

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        """Scores (B,) float32 on the CPU, every one finite; higher is better.

        Raises:
            UserError: a score cannot be had; the message shows the row.
        """
        ...


class WrongCount(UserError):
    """Not one score for each response."""


def checked(values: object, *, name: str, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
    """``values`` as (B,) float32 on the CPU, or the sentence that says which row is wrong.

    Taken: a list, tuple, NumPy array or tensor of one dimension, holding Python, NumPy or torch numbers.
    True and False count as 1 and 0, so that a test can be a reward. Not taken: text that looks like a
    number, None, nested lists, NaN, infinity, and what float32 cannot hold.

    Raises:
        WrongCount: B values were asked for and another number came.
        UserError: a value is no finite number, or ``values`` is no flat list of them.
    """
    items = _flat(values, name)
    rows = len(responses)
    if len(items) != rows:
        where = ""
        if rows > len(items):
            where = f"; nothing for {shown_row(len(items), prompts, responses)}"
        elif rows:
            where = (
                f"; {shown_value(items[rows])} came after that of {shown_row(rows - 1, prompts, responses)}"
            )
        raise WrongCount(f"{name} returned {len(items)} scores for {rows} responses{where}")
    numbers_: list[float] = []
    for row, item in enumerate(items):
        number = _number(item)
        if number is None:
            rule = f"must be a number, got {shown_value(item)} of type {type(item).__name__}"
        elif not np.isfinite(number):
            rule = f"must be finite, got {number}"
        elif abs(number) > torch.finfo(torch.float32).max:
            rule = f"must fit float32, got {number}"
        else:
            numbers_.append(number)
            continue
        raise UserError(f"{name}: the score of {shown_row(row, prompts, responses)} {rule}")
    return torch.tensor(numbers_, dtype=torch.float32)


def shown(text: str, limit: int = SHOWN) -> str:
    """``text`` in quotes, its middle left out where it is long, control and format characters escaped.

    Model text can hold escape sequences that move the cursor or colour the terminal, and marks that reverse
    the line.
    """
    if len(text) > limit:
        tail = limit // 3
        text = f"{text[: limit - tail]}...{text[-tail:]}"
    return repr(text)


def shown_row(row: int, prompts: Sequence[str], responses: Sequence[str]) -> str:
    """``row 3 (prompt '...', response '...')``."""
    return f"row {row} (prompt {shown(prompts[row])}, response {shown(responses[row])})"


def shown_value(value: object) -> str:
    """Any object on one short line, nothing in it that a terminal obeys."""
    text = value if isinstance(value, str) else repr(value)
    quoted = shown(text)
    return quoted if isinstance(value, str) else quoted[1:-1]


def shown_error(error: BaseException) -> str:
    """Type, message and place of an exception, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error)
    return f"{type(error).__name__}{': ' + shown(text)[1:-1] if text else ''}{place}"


def _flat(values: object, name: str) -> Sequence[object]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    if isinstance(values, Tensor | np.ndarray):
        if values.ndim != 1:
            raise UserError(
                f"{name} must return one score a response, shape (B,), got shape {tuple(values.shape)}"
            )
        return values.tolist()
    if hasattr(values, "__array__") and hasattr(values, "tolist"):  # a column of a data frame
        return values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return values
    raise UserError(
        f"{name} must return a list of numbers, got {shown_value(values)} of type {type(values).__name__}"
    )


def _number(item: object) -> float | None:
    if isinstance(item, Tensor | np.ndarray):
        item = item.item() if item.ndim == 0 else None
    if isinstance(item, numbers.Real | np.bool_ | Decimal):
        try:
            return float(item)
        except (OverflowError, ValueError):
            return float("inf")
    return None
