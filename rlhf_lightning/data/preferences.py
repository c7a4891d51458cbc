"""Preference pairs: one prompt, the answer that was chosen and the one that was rejected."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.data.dialogue import split_pair
from rlhf_lightning.data.formats import Row, Source, read_rows
from rlhf_lightning.errors import UserError

if TYPE_CHECKING:
    from rlhf_lightning.config.schema import DataConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """Texts as the data has them: ``prompt + chosen`` is one dialogue, ``prompt + rejected`` the other."""

    prompt: str
    chosen: str
    rejected: str


def load_pairs(config: DataConfig, *, drop_bad: bool = False) -> list[Pair]:
    """All pairs of a file, a folder or a dataset.

    Rows with a prompt column (``data.prompt_field``) give all three texts; rows in the Anthropic HH form give
    two dialogues that are split where they part (``dialogue.split_pair``).

    Args:
        config: its path (``tiny``: the embedded pairs), format, split, prompt_field and limit count.
        drop_bad: leave out pairs that teach nothing (equal or empty sides) and log how many.

    Raises:
        UserError: if rows cannot be read, a side is missing or not text, no pair is left, or, unless
            ``drop_bad``, two sides are equal or one is empty: with the first such row and their number.
    """
    path = str(tiny_path("pairs.jsonl")) if config.path == "tiny" else config.path
    source = read_rows(path, form=config.format, split=config.split, limit=config.limit)
    pairs: list[Pair] = []
    bad: list[str] = []
    for row in source.rows:
        pair = _pair(source, row, config.prompt_field)
        if not pair.chosen.strip() or not pair.rejected.strip():
            bad.append(f"{row.place}: the {'rejected' if pair.chosen.strip() else 'chosen'} answer is empty")
        elif pair.chosen == pair.rejected:
            bad.append(f"{row.place}: chosen and rejected are equal")
        else:
            pairs.append(pair)
    if bad:
        summary = f"data.path={source.path}: {len(bad)} of {len(source.rows)} pairs teach nothing ({bad[0]})"
        if not drop_bad or not pairs:
            raise UserError(summary)
        log.warning("%s; they are left out", summary)
    return pairs


def _pair(source: Source, row: Row, prompt_field: str) -> Pair:
    names = ("chosen", "rejected") if source.pairs else (prompt_field, "chosen", "rejected")
    texts = []
    for name in names:
        asked_by = f"data.prompt_field={name}" if name == prompt_field else "preference pairs"
        value = source.field(row, name, asked_by=asked_by)
        if not isinstance(value, str):
            kind = type(value).__name__
            raise UserError(f"data.path={source.path}: {row.place}: {name!r} must be text, not {kind}")
        texts.append(value)
    if not source.pairs:
        return Pair(*texts)
    try:
        return Pair(*split_pair(*texts))
    except ValueError as error:
        raise UserError(f"data.path={source.path}: {row.place}: {error}") from error
