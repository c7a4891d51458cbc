"""From rows to prompt texts: which column, which words, which template."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_lightning.data.dialogue import ChatTemplate, Message, check_messages, hh_messages, split_pair
from rlhf_lightning.data.formats import TEXT_COLUMN, Row, Source
from rlhf_lightning.errors import UserError

if TYPE_CHECKING:
    from rlhf_lightning.config.schema import DataConfig


@dataclass(frozen=True)
class PromptText:
    """A prompt before it becomes tokens."""

    place: str  # of its row, for messages
    text: str
    templated: bool = False  # the chat template was put around it here
    already_templated: bool = False  # it came with the template's marks
    own_system: bool = False  # it kept its own system message instead of data.system_prompt


def render_rows(source: Source, config: DataConfig, tokenizer: Any) -> list[PromptText]:
    """The text of every row's prompt.

    A conversation takes the tokenizer's chat template, unless ``data.chat_template=never`` and it is a single
    message; a plain string takes it only under ``always``, as one user message, and not if it shows the
    template's marks already. An HH pair is a plain string up to its last cue, and a conversation under
    ``always``.

    Raises:
        UserError: naming the key or the row, if a prompt is missing or empty, or a setting cannot be obeyed.
    """
    return _Renderer(source, config, tokenizer).all()


def asked(source: Source, row: Row, config: DataConfig) -> Any:
    """A row's prompt as the data has it, before any template: text, or a list of messages.

    Raises:
        ValueError: the row is a pair of which no prompt can be told.
        UserError: its column is missing.
    """
    if source.pairs:
        return _pair_prompt(source, row, config)
    if source.form == "text":
        return row.values[TEXT_COLUMN]
    name = config.prompt_field
    return source.field(row, name, asked_by=f"data.prompt_field={name}")


def _pair_prompt(source: Source, row: Row, config: DataConfig) -> str | list[Message]:
    names = ("chosen", "rejected")
    sides = [source.field(row, name, asked_by="data.format=hh") for name in names]
    if isinstance(sides[0], list):  # a conversation, the chosen answer its last message
        return sides[0][:-1]
    if not all(isinstance(side, str) for side in sides):
        raise ValueError("chosen and rejected must be text, or both lists of messages")
    prompt, _, _ = split_pair(*sides)
    return hh_messages(prompt) if config.chat_template == "always" else prompt


class _Renderer:
    def __init__(self, source: Source, config: DataConfig, tokenizer: Any) -> None:
        self.source = source
        self.config = config
        self.template = ChatTemplate.of(tokenizer) if config.chat_template != "never" else None
        if config.chat_template == "always" and self.template is None:
            raise UserError(
                "data.chat_template=always: the model's tokenizer has no chat template; "
                "set data.chat_template=never or choose a chat model"
            )

    def all(self) -> list[PromptText]:
        return [self._row(row) for row in self.source.rows]

    def _row(self, row: Row) -> PromptText:
        try:
            value = asked(self.source, row, self.config)
            if isinstance(value, str):
                return self._plain(row, value)
            if isinstance(value, list):
                return self._conversation(row, check_messages(value))
            raise ValueError(f"a prompt is text or a list of messages, not {type(value).__name__}")
        except ValueError as error:
            raise UserError(f"data.path={self.source.path}: {row.place}: {error}") from error

    def _plain(self, row: Row, text: str) -> PromptText:
        if not text.strip():
            raise ValueError("the prompt is empty")
        if self.template is not None and (done := self.template.recognise(text)) is not None:
            return PromptText(row.place, done, already_templated=True)
        if self.config.first_words is not None:
            if self.source.pairs:
                raise UserError(
                    f"data.first_words={self.config.first_words}: HH dialogues are not cut to words"
                )
            text = _first_words(text, self.config.first_words)
        if self.config.chat_template == "always":
            return self._conversation(row, [{"role": "user", "content": text}])
        if self.config.system_prompt is not None:
            raise UserError(
                f"data.system_prompt needs a chat template, and {row.place} of data.path={self.source.path} "
                "is a plain prompt; set data.chat_template=always"
            )
        return PromptText(row.place, text)

    def _conversation(self, row: Row, messages: list[Message]) -> PromptText:
        system = self.config.system_prompt
        own_system = system is not None and messages[0]["role"] == "system"
        if system is not None and not own_system:
            messages = [{"role": "system", "content": system}, *messages]
        if self.template is not None:
            text = self.template.render(messages)
            return PromptText(row.place, text, templated=True, own_system=own_system)
        if self.config.chat_template == "auto":
            raise UserError(
                f"data.chat_template=auto: {row.place} of data.path={self.source.path} is a conversation, "
                "and the model's tokenizer has no chat template; choose a chat model or give plain prompts"
            )
        if len(messages) > 1:
            raise UserError(
                f"data.chat_template=never: {row.place} of data.path={self.source.path} has {len(messages)} "
                "messages (data.system_prompt included), and only a template can join them; "
                "set data.chat_template=auto"
            )
        return PromptText(row.place, messages[0]["content"])


def _first_words(text: str, count: int) -> str:
    """The first words as they stand, the space between them untouched."""
    words = re.match(rf"\s*\S+(?:\s+\S+){{0,{count - 1}}}", text)
    return words.group().strip() if words else text
