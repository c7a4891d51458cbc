"""Demonstrations: texts to imitate, of which the prompt is given and the answer is learned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.data.dialogue import split_pair
from rlhf_lightning.data.encoding import answer_ids
from rlhf_lightning.data.formats import Row, Source, read_rows
from rlhf_lightning.data.held_out import is_held_out, share_held_out
from rlhf_lightning.data.prompts import encode_prompts
from rlhf_lightning.data.rendering import PromptText, render_rows
from rlhf_lightning.errors import UserError
from rlhf_lightning.types import Demonstration

if TYPE_CHECKING:
    from rlhf_lightning.config.schema import DataConfig

log = logging.getLogger(__name__)

MESSAGES = "messages"


@dataclass(frozen=True)
class _Text:
    prompt: PromptText
    answer: str
    key: str  # decides on which side of the split it falls


def load_demonstrations(
    config: DataConfig, tokenizer: Any, *, max_length: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to learn from, and those to measure on.

    A row gives a prompt (``data.prompt_field``, text or messages, rendered as for PPO) and an answer: its
    ``data.completion_field``, or the better side of a pair. Of a ``messages`` column the last turn, the
    assistant's, is the answer. A line of plain text is an answer without a
    prompt. The prompt's ids are those that PPO feeds for the same row; the answer ends with the end token.

    Args:
        config: ``tiny`` stands for the embedded pairs. ``drop_bad`` leaves out rows with nothing to learn.
        max_length: tokens of prompt and answer. What is longer loses the beginning of its prompt, then the
            end of its answer.

    Raises:
        UserError: rows cannot be read, an answer is missing, or one side of the split is empty.
    """
    if config.held_out is None:
        share = share_held_out(config.held_out_share, stage="sft", evaluating=True)
        sides: tuple[list[_Text], list[_Text]] = ([], [])
        for text in _texts(config, config.path, tokenizer, tiny="pairs.jsonl"):
            sides[is_held_out(text.key, share)].append(text)
        if not sides[0] or (share and not sides[1]):
            raise UserError(
                f"data.held_out_share={share:g} of the rows of data.path={config.path} leaves "
                f"{len(sides[0])} to learn from, {len(sides[1])} to measure on: change the share, or name "
                "other rows in data.held_out"
            )
    else:
        sides = (
            _texts(config, config.path, tokenizer, tiny="pairs.jsonl"),
            _texts(config, config.held_out, tokenizer, tiny="pairs_heldout.jsonl"),
        )
    return _encode(sides[0], tokenizer, max_length), _encode(sides[1], tokenizer, max_length)


def _texts(config: DataConfig, path: str, tokenizer: Any, *, tiny: str) -> list[_Text]:
    path = str(tiny_path(tiny)) if path == "tiny" else path
    source = _without_messages(
        read_rows(path, form=config.format, split=config.split, limit=config.limit), config
    )
    if source.form == "text":
        answers = [str(row.values["text"]) for row in source.rows]
        prompts = [PromptText(row.place, "") for row in source.rows]
    else:
        answers = [_answer(source, row, config) for row in source.rows]
        prompts = render_rows(source, config, tokenizer)
    empty = [p.place for p, answer in zip(prompts, answers, strict=True) if not answer.strip()]
    if empty:
        summary = f"data.path={source.path}: {len(empty)} of {len(answers)} answers are empty ({empty[0]})"
        if not config.drop_bad or len(empty) == len(answers):
            raise UserError(f"{summary}; data.drop_bad=true leaves such rows out")
        log.warning("%s; they are left out", summary)
    return [
        _Text(prompt, answer, prompt.text.strip() or answer)
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.strip()
    ]


def _without_messages(source: Source, config: DataConfig) -> Source:
    """Conversations in one column as prompt and completion: the last assistant turn is learned."""
    if MESSAGES not in source.columns or config.prompt_field in source.columns:
        return source
    rows = []
    for row in source.rows:
        turns = source.field(row, MESSAGES, asked_by=MESSAGES)
        last = turns[-1] if isinstance(turns, list) and turns else None
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise UserError(
                f"data.path={source.path}: {row.place}: {MESSAGES!r} must be a list of messages that ends "
                "with the assistant's"
            )
        rows.append(
            Row(row.place, {config.prompt_field: turns[:-1], config.completion_field: last.get("content")})
        )
    return replace(source, rows=rows)


def _answer(source: Source, row: Row, config: DataConfig) -> str:
    """The text to learn: the completion, or the better side of a pair."""
    key, name = "data.completion_field", config.completion_field
    if name not in source.columns and config.chosen_field in source.columns:
        key, name = "data.chosen_field", config.chosen_field
    value = source.field(row, name, asked_by=f"{key}={name}")
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")  # a conversation: its last message is the answer
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"data.path={source.path}: {row.place}: {name!r} must be text, not {kind}")
    if not source.pairs:
        return value
    other = source.field(row, config.rejected_field, asked_by=f"data.rejected_field={config.rejected_field}")
    try:
        return split_pair(value, other)[1]
    except ValueError as error:
        raise UserError(f"data.path={source.path}: {row.place}: {error}") from error


def _encode(texts: Sequence[_Text], tokenizer: Any, max_length: int) -> list[Demonstration]:
    ids = encode_prompts([text.prompt for text in texts], tokenizer)
    return [_demonstration(row, text, tokenizer, max_length) for row, text in zip(ids, texts, strict=True)]


def _demonstration(prompt: list[int], text: _Text, tokenizer: Any, max_length: int) -> Demonstration:
    answer = answer_ids(tokenizer, prompt, text.answer)
    least = min(len(prompt), 1)
    room = max(least, max_length - len(answer))
    kept = _end(prompt, room, tokenizer.bos_token_id)
    return Demonstration((*kept, *answer[: max_length - len(kept)]), len(kept))


def _end(prompt: list[int], room: int, bos: int | None) -> list[int]:
    """The last ids; the first place stays the BOS where there is one and room for it."""
    if len(prompt) <= room:
        return prompt
    if room > 1 and bos is not None and prompt[0] == bos:
        return [bos, *prompt[1 - room :]]
    return prompt[-room:]
