"""Demonstrations: texts to imitate, of which the prompt is given and the answer is learned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.data.encoding import answer_ids
from rlhf_lightning.data.formats import TEXT_COLUMN, Row, Source, read_rows
from rlhf_lightning.data.held_out import held_out_source, prompt_key, share_held_out, split_rows
from rlhf_lightning.data.preferences import load_pairs, pair_prompts
from rlhf_lightning.data.prompts import encode_prompts, keep_end
from rlhf_lightning.data.rendering import PromptText, render_rows
from rlhf_lightning.errors import UserError
from rlhf_lightning.types import Demonstration

if TYPE_CHECKING:
    from rlhf_lightning.config.schema import DataConfig

log = logging.getLogger(__name__)

MESSAGES = "messages"


@dataclass(frozen=True)
class _Text:
    place: str  # of its row, for messages
    prompt: list[int]  # as PPO feeds it, whole
    answer: str
    key: str  # decides on which side of a split it falls


def load_demonstrations(
    config: DataConfig, tokenizer: Any, *, max_length: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to learn from, and those to measure on: ``data.held_out``, or a share of the former.

    - Rows with ``data.completion_field``: the prompt is given, and the completion, a text or a list of one
      assistant's message, is learned.
    - Pairs: the chosen answer is learned.
    - Conversations, in a column ``messages`` or as prompts that end with the assistant's answer: one
      demonstration for each answer, behind all that was said before it, rendered as a prompt.
    - Lines of plain text: all is learned, or what follows the first ``data.first_words``.

    The prompt's ids are those that PPO feeds for the same row; the answer is tokenised with them where the
    seam falls between two tokens, and apart elsewhere (``encoding.answer_ids``). It ends with the end token.

    Args:
        config: ``tiny`` stands for the embedded pairs. ``drop_bad`` leaves out rows with nothing to learn.
        max_length: tokens of prompt and answer. What is longer loses the beginning of its prompt, then the
            end of its answer, and with it the end token.

    Raises:
        UserError: rows cannot be read, an answer is missing, or one side of the split is empty.
    """
    texts = _texts(config, tokenizer)
    if config.held_out is None:
        share = share_held_out(config.held_out_share, stage="sft", evaluating=True)
        train, held_out = split_rows(texts, lambda one: one.key, share, path=config.path, what="answers")
    else:
        train, held_out = texts, _texts(held_out_source(config, "pairs_heldout.jsonl"), tokenizer)
    return _bounded(train, config, tokenizer, max_length), _bounded(held_out, config, tokenizer, max_length)


def _texts(config: DataConfig, tokenizer: Any) -> list[_Text]:
    path = str(tiny_path("pairs.jsonl")) if config.path == "tiny" else config.path
    first = read_rows(path, form=config.format, split=config.split, limit=1)
    completed = config.completion_field in first.columns
    if first.pairs or (config.chosen_field in first.columns and not completed):
        pairs = load_pairs(config)
        prompts = pair_prompts(pairs, config, tokenizer)
        return [
            _Text(pair.place, ids, pair.chosen, pair.key)
            for pair, (ids, _) in zip(pairs, prompts, strict=True)
        ]
    source = read_rows(path, form=config.format, split=config.split, limit=config.limit)
    if source.form == "text":
        return _lines(source, config, tokenizer)
    if config.first_words is not None:
        raise UserError(
            f"data.first_words={config.first_words} cuts prompts, and answers follow whole ones: leave it out"
        )
    column = None if completed else _conversations(first, config)
    found: list[tuple[Row, Any, str, str]] = []  # row, prompt, answer, key
    bad: list[str] = []
    for row in source.rows:
        try:
            if column is None:
                prompt, answer = _completed(source, row, config)
                found.append((row, prompt, answer, prompt_key(prompt)))
            else:
                turns = _answered(row.values.get(column))
                found += [(row, prompt, answer, prompt_key(turns[0][0])) for prompt, answer in turns]
        except _NothingToLearn as error:
            bad.append(f"{row.place} {error}")
        except ValueError as error:
            raise UserError(f"data.path={source.path}: {row.place}: {error}") from error
    _leave_out(bad, source, config)
    rows = [Row(row.place, {config.prompt_field: prompt}) for row, prompt, _, _ in found]
    texts = render_rows(replace(source, rows=rows), config, tokenizer)
    encoded = zip(found, encode_prompts(texts, tokenizer), strict=True)
    return [_Text(row.place, ids, answer, key) for (row, _, answer, key), ids in encoded]


class _NothingToLearn(ValueError):
    """What a row lacks, in words that follow its place."""


def _leave_out(bad: list[str], source: Source, config: DataConfig) -> None:
    if not bad:
        return
    summary = f"data.path={source.path}: {len(bad)} of {len(source.rows)} rows teach nothing ({bad[0]})"
    if not config.drop_bad or len(bad) == len(source.rows):
        raise UserError(f"{summary}; data.drop_bad=true leaves such rows out")
    log.warning("%s; they are left out", summary)


def _completed(source: Source, row: Row, config: DataConfig) -> tuple[Any, str]:
    """Prompt, as the data has it, and completion."""
    name = config.completion_field
    if row.values.get(name) is None and name in source.columns:
        raise _NothingToLearn(f"has no value in column {name!r}")
    value = source.field(row, name, asked_by=f"data.completion_field={name}")
    if isinstance(value, list) and len(value) == 1 and _speaker(value[0]) == "assistant":
        value = value[0].get("content")
    if not isinstance(value, str):
        kind = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        raise ValueError(f"{name!r} must be text or a list of one assistant's message, not {kind}")
    if not value.strip():
        raise _NothingToLearn("has an empty answer")
    asked_by = f"data.prompt_field={config.prompt_field}"
    prompt = source.field(row, config.prompt_field, asked_by=asked_by)
    if not isinstance(prompt, str | list) or not all(_speaker(m) for m in prompt if not isinstance(m, str)):
        raise ValueError(f"{config.prompt_field!r} must be text or a list of messages with role and content")
    return prompt, value


def _speaker(message: Any) -> str | None:
    """Who says it; None for what is no message."""
    role = message.get("role") if isinstance(message, dict) and "content" in message else None
    return role if isinstance(role, str) else None


def _conversations(first: Source, config: DataConfig) -> str | None:
    """The column that holds whole conversations, answers included."""
    if MESSAGES in first.columns:
        return MESSAGES
    prompt = first.rows[0].values.get(config.prompt_field)
    ends = isinstance(prompt, list) and prompt and _speaker(prompt[-1]) == "assistant"
    return config.prompt_field if ends else None


def _answered(value: Any) -> list[tuple[list[Any], str]]:
    """Every answer of a conversation, and what was said before it."""
    if not isinstance(value, list) or not all(map(_speaker, value)):
        raise ValueError("a conversation is a list of messages, each with 'role' and 'content'")
    places = [number for number, message in enumerate(value) if _speaker(message) == "assistant"]
    if not places:
        raise _NothingToLearn("has no answer of an assistant")
    if places[0] == 0:
        raise ValueError("the conversation begins with the assistant's answer")
    said = [value[place]["content"] for place in places]
    if not all(isinstance(answer, str) for answer in said):
        raise ValueError("the content of a message must be text")
    if not all(answer.strip() for answer in said):
        raise _NothingToLearn("has an empty answer")
    return [(value[:place], answer) for place, answer in zip(places, said, strict=True)]


def _lines(source: Source, config: DataConfig, tokenizer: Any) -> list[_Text]:
    """Plain text: the first words are given where ``data.first_words`` is set, the rest is learned."""
    for name in ("system_prompt", "chat_template"):
        value = getattr(config, name)
        if value not in (None, "auto", "never"):
            raise UserError(
                f"data.{name}={value}: lines of plain text are no conversations to learn; leave it out, or "
                "give prompts and completions"
            )
    if config.first_words is None:
        prompts = [PromptText(row.place, "") for row in source.rows]
    else:
        prompts = render_rows(source, config.model_copy(update={"chat_template": "never"}), tokenizer)
    answers = [
        row.values[TEXT_COLUMN].removeprefix(p.text) for row, p in zip(source.rows, prompts, strict=True)
    ]
    bad = [
        f"{p.place} has no more than {config.first_words} words"
        for p, a in zip(prompts, answers, strict=True)
        if not a
    ]
    _leave_out(bad, source, config)
    encoded = zip(prompts, answers, encode_prompts(prompts, tokenizer), strict=True)
    return [_Text(p.place, ids, answer, p.text or answer) for p, answer, ids in encoded if answer]


def _bounded(
    texts: Sequence[_Text], config: DataConfig, tokenizer: Any, max_length: int
) -> list[Demonstration]:
    """Prompts within ``data.max_prompt_length``, as PPO has them; texts within ``max_length``."""
    bos, limit = tokenizer.bos_token_id, config.max_prompt_length
    made: list[Demonstration] = []
    prompts_cut = answers_cut = dropped = 0
    for one in texts:
        if len(one.prompt) > limit and config.overlong == "error":
            raise UserError(
                f"data.overlong=error: the prompt in {one.place} of data.path={config.path} has "
                f"{len(one.prompt)} tokens, more than data.max_prompt_length={limit}"
            )
        if len(one.prompt) > limit and config.overlong == "drop":
            dropped += 1
            continue
        answer = answer_ids(tokenizer, one.prompt, one.answer)
        room = min(limit, max(1, max_length - len(answer)))
        prompt = one.prompt if len(one.prompt) <= room else keep_end(one.prompt, room, bos)
        learned = answer[: max_length - len(prompt)]
        prompts_cut += len(prompt) < len(one.prompt)
        answers_cut += len(learned) < len(answer)
        made.append(Demonstration((*prompt, *learned), len(prompt)))
    if texts and not made:
        raise UserError(
            f"data.overlong=drop leaves none of the {len(texts)} answers of data.path={config.path}: all "
            f"prompts have more than data.max_prompt_length={limit} tokens"
        )
    for count, what in (
        (prompts_cut, "prompts lose their beginning"),
        (answers_cut, "answers lose their end, so that no end token is learned there"),
        (dropped, "prompts are left out as too long"),
    ):
        if count:
            log.warning("data.path=%s: %d of %d %s", config.path, count, len(texts), what)
    return made
