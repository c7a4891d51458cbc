"""Preference pairs: one prompt, the answer that was chosen and the one that was rejected."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.data.dialogue import split_pair
from rlhf_lightning.data.formats import Row, Source, read_rows
from rlhf_lightning.data.held_out import is_held_out
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
    margin: float = 0.0  # how much better the chosen answer is

    @property
    def key(self) -> str:
        """What decides on which side of a split the pair falls: its prompt, or its text where it has none."""
        return self.prompt if self.prompt.strip() else self.chosen


def load_split(config: DataConfig) -> tuple[list[Pair], list[Pair]]:
    """Pairs to learn from and pairs to measure on: those of ``data.held_out``, or a share of the former.

    Raises:
        UserError: see ``load_pairs``; or one side of the split is empty.
    """
    pairs = load_pairs(config)
    if config.held_out is not None:
        path = str(tiny_path("pairs_heldout.jsonl")) if config.held_out == "tiny" else config.held_out
        return pairs, load_pairs(config.model_copy(update={"path": path}))
    share = 0.1 if config.held_out_share is None else config.held_out_share
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs:
        sides[is_held_out(pair.key, share)].append(pair)
    if not sides[0] or (share and not sides[1]):
        raise UserError(
            f"data.held_out_share={share:g} of the {len(pairs)} pairs of data.path={config.path} leaves "
            f"{len(sides[0])} to learn from, {len(sides[1])} to measure on: change the share, or name other "
            "rows in data.held_out"
        )
    return sides


def load_pairs(config: DataConfig) -> list[Pair]:
    """All pairs of a file, a folder or a dataset.

    Rows with a prompt column (``data.prompt_field``) give all three texts; rows in the Anthropic HH form give
    two dialogues that are split where they part (``dialogue.split_pair``).

    Args:
        config: its path (``tiny``: the embedded pairs), format, split, fields, limit and ``drop_bad`` count;
            the last leaves out pairs that teach nothing (equal or empty sides) and logs how many.

    Raises:
        UserError: if rows cannot be read, a side is missing or not text, no pair is left, or, unless
            ``data.drop_bad``, two sides are equal or one is empty: with the first such row and their number.
    """
    path = str(tiny_path("pairs.jsonl")) if config.path == "tiny" else config.path
    source = read_rows(path, form=config.format, split=config.split, limit=config.limit)
    pairs: list[Pair] = []
    bad: list[str] = []
    for row in source.rows:
        pair = _pair(source, row, config)
        if not pair.chosen.strip() or not pair.rejected.strip():
            bad.append(f"{row.place}: the {'rejected' if pair.chosen.strip() else 'chosen'} answer is empty")
        elif pair.chosen == pair.rejected:
            bad.append(f"{row.place}: chosen and rejected are equal")
        else:
            pairs.append(pair)
    if bad:
        summary = f"data.path={source.path}: {len(bad)} of {len(source.rows)} pairs teach nothing ({bad[0]})"
        if not config.drop_bad or not pairs:
            raise UserError(f"{summary}; data.drop_bad=true leaves such pairs out")
        log.warning("%s; they are left out", summary)
    return pairs


def _pair(source: Source, row: Row, config: DataConfig) -> Pair:
    fields = {"data.chosen_field": config.chosen_field, "data.rejected_field": config.rejected_field}
    if not source.pairs:
        fields = {"data.prompt_field": config.prompt_field} | fields
    texts = []
    for key, name in fields.items():
        value = source.field(row, name, asked_by=f"{key}={name}")
        if not isinstance(value, str):
            kind = type(value).__name__
            raise UserError(f"data.path={source.path}: {row.place}: {name!r} must be text, not {kind}")
        texts.append(value)
    margin = _margin(source, row, config.margin_field)
    if not source.pairs:
        prompt, chosen, rejected = texts
        return Pair(prompt, chosen, rejected, margin)
    try:
        prompt, chosen, rejected = split_pair(*texts)
        return Pair(prompt, chosen, rejected, margin)
    except ValueError as error:
        raise UserError(f"data.path={source.path}: {row.place}: {error}") from error


def _margin(source: Source, row: Row, name: str | None) -> float:
    if name is None:
        return 0.0
    value = source.field(row, name, asked_by=f"data.margin_field={name}")
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if isinstance(value, bool) or not math.isfinite(margin) or margin < 0:
        raise UserError(
            f"data.path={source.path}: {row.place}: {name!r} must be a number of at least 0, not {value!r}"
        )
    return margin
