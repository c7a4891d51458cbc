"""Preference pairs: one prompt, the answer that was chosen and the one that was rejected."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.data.dialogue import Message, check_messages, hh_messages, split_pair
from rlhf_lightning.data.formats import Row, Source, read_rows
from rlhf_lightning.data.held_out import SHARE, held_out_source, prompt_key, split_rows
from rlhf_lightning.data.prompts import encode_prompts
from rlhf_lightning.data.rendering import PromptText, render_rows
from rlhf_lightning.errors import UserError

if TYPE_CHECKING:
    from rlhf_lightning.config.schema import DataConfig

log = logging.getLogger(__name__)


Prompt = str | tuple[Message, ...]


@dataclass(frozen=True)
class Pair:
    """Texts as the data has them; the prompt may be a conversation, which a chat template makes text."""

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float = 0.0  # how much better the chosen answer is
    place: str = field(default="", compare=False)  # of its row, for messages

    @property
    def key(self) -> str:
        """What decides on which side of a split the pair falls: its prompt, or its text where it has none."""
        key = prompt_key(self.prompt)
        return key if key.strip() else self.chosen


def pair_prompts(pairs: Sequence[Pair], config: DataConfig, tokenizer: Any) -> list[tuple[list[int], str]]:
    """The prompts as PPO has them: the ids that the policy is fed, and the text that the reward reads.

    Raises:
        UserError: a conversation without a chat template, or a setting that cannot be obeyed.
    """
    rows = [Row(pair.place, {config.prompt_field: pair.prompt}) for pair in pairs]
    some = [row for row in rows if row.values[config.prompt_field] != ""]
    source = Source(config.path, "jsonl", False, [_as_lists(row) for row in some])
    texts = iter(render_rows(source, config, tokenizer)) if some else iter(())
    every = [next(texts) if pair.prompt != "" else PromptText(pair.place, "") for pair in pairs]
    ids = encode_prompts(every, tokenizer)
    read = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return list(zip(ids, read if ids else [], strict=True))


def _as_lists(row: Row) -> Row:
    return Row(row.place, {k: list(v) if isinstance(v, tuple) else v for k, v in row.values.items()})


def load_split(config: DataConfig) -> tuple[list[Pair], list[Pair]]:
    """Pairs to learn from and pairs to measure on: those of ``data.held_out``, or a share of the former.

    Raises:
        UserError: see ``load_pairs``; or one side of the split is empty.
    """
    pairs = load_pairs(config)
    if config.held_out is not None:
        return pairs, load_pairs(held_out_source(config, "pairs_heldout.jsonl"))
    share = SHARE if config.held_out_share is None else config.held_out_share
    return split_rows(pairs, lambda pair: pair.key, share, path=config.path, what="pairs")


def load_pairs(config: DataConfig) -> list[Pair]:
    """All pairs of a file, a folder or a dataset.

    A row gives a prompt (``data.prompt_field``, text or messages) and two answers, texts or the last messages
    of two conversations that begin alike. Rows in the Anthropic HH form give two dialogues that are split
    where they part (``dialogue.split_pair``), and are conversations under ``data.chat_template=always``.

    Args:
        config: its path (``tiny``: the embedded pairs), format, split, fields, limit and ``drop_bad`` count;
            the last leaves out pairs that teach nothing (equal or empty sides) and logs how many.

    Raises:
        UserError: if rows cannot be read, a side is missing or not text, no pair is left, or, unless
            ``data.drop_bad``, two sides are equal or one is empty: with the first such row and their number.
    """
    if config.first_words is not None:
        raise UserError(
            f"data.first_words={config.first_words} cuts prompts, and those of pairs stay whole: leave it out"
        )
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
    names = {"data.chosen_field": config.chosen_field, "data.rejected_field": config.rejected_field}
    sides = [source.field(row, name, asked_by=f"{key}={name}") for key, name in names.items()]
    margin = _margin(source, row, config.margin_field)
    try:
        if source.pairs and all(isinstance(side, str) for side in sides):
            prompt, chosen, rejected = split_pair(*sides)
            if config.chat_template == "always":
                return Pair(tuple(hh_messages(prompt)), chosen.strip(), rejected.strip(), margin, row.place)
            return Pair(prompt, chosen, rejected, margin, row.place)
        turns, chosen = _last_turn(config.chosen_field, sides[0])
        other, rejected = _last_turn(config.rejected_field, sides[1])
        if turns != other:
            raise ValueError("chosen and rejected are conversations that differ before their last message")
        if turns:
            return Pair(tuple(turns), chosen, rejected, margin, row.place)
        name = config.prompt_field
        given = source.field(row, name, asked_by=f"data.prompt_field={name}")
        if isinstance(given, list):
            return Pair(tuple(check_messages(given)), chosen, rejected, margin, row.place)
        if not isinstance(given, str):
            raise ValueError(f"{name!r} must be text or a list of messages, not {type(given).__name__}")
        return Pair(given, chosen, rejected, margin, row.place)
    except ValueError as error:
        raise UserError(f"data.path={source.path}: {row.place}: {error}") from error


def _last_turn(name: str, side: Any) -> tuple[list[Message], str]:
    """The turns before an answer, none where it is plain text, and the answer."""
    if isinstance(side, str):
        return [], side
    if not isinstance(side, list) or not side:
        raise ValueError(f"{name!r} must be text or a list of messages, not {type(side).__name__}")
    last = side[-1]
    said = last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None
    if not isinstance(said, str):
        raise ValueError(f"the last message of {name!r} must be the assistant's")
    return (check_messages(side[:-1]) if len(side) > 1 else []), said


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
