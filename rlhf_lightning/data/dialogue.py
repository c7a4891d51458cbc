"""Dialogues: lists of messages, the raw Anthropic HH form, and a tokenizer's chat template around them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlhf_lightning.errors import UserError

Message = dict[str, Any]
HH_CUE = "\n\nAssistant:"
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_PROBE = "PROBE"


def split_pair(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The prompt and both answers of an HH pair.

    The prompt runs up to and including the last ``\\n\\nAssistant:`` of what the two dialogues share, so that
    a pair that parts ways several turns before its end is cut where it parts.

    Returns:
        prompt, chosen answer, rejected answer; joined again they give the two inputs.

    Raises:
        ValueError: if the two share no such mark.
    """
    sides = enumerate(zip(chosen, rejected, strict=False))
    shared = next((i for i, (a, b) in sides if a != b), min(len(chosen), len(rejected)))
    start = chosen.rfind(HH_CUE, 0, shared)
    if start < 0:
        raise ValueError("chosen and rejected share no '\\n\\nAssistant:'")
    end = start + len(HH_CUE)
    return chosen[:end], chosen[end:], rejected[end:]


def hh_messages(prompt: str) -> list[Message]:
    """The turns of an HH prompt as messages, its final, empty ``Assistant:`` left out.

    Raises:
        ValueError: if text stands before the first turn.
    """
    before, *parts = _HH_TURN.split(prompt)
    if before.strip() or not parts:
        raise ValueError("the dialogue does not begin with '\\n\\nHuman:'")
    roles = {"Human": "user", "Assistant": "assistant"}
    said = zip(parts[::2], parts[1::2], strict=True)
    turns = [{"role": roles[who], "content": words.strip()} for who, words in said]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def check_messages(value: Any) -> list[Message]:
    """A conversation that a model is to answer, as a list of messages without empty fields.

    Raises:
        ValueError: saying which rule it breaks.
    """
    if not value:
        raise ValueError("the conversation is empty")
    messages = []
    for item in value:
        if not isinstance(item, dict) or not isinstance(item.get("role"), str) or "content" not in item:
            shape = "keys " + ", ".join(map(str, item)) if isinstance(item, dict) else type(item).__name__
            raise ValueError(f"each message needs 'role' and 'content'; one has {shape}")
        if not isinstance(item["content"], str):
            raise ValueError(f"the content of a message must be text, not {type(item['content']).__name__}")
        # Tables give every message the union of all keys, with None where a message had none.
        messages.append({key: entry for key, entry in item.items() if entry is not None})
    last = messages[-1]
    if last["role"] == "assistant":
        raise ValueError("the conversation ends with the assistant's answer; a prompt ends before it")
    if not last["content"].strip():
        raise ValueError("the last message is empty")
    return messages


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, and the marks by which its output is known again."""

    tokenizer: Any
    bos: str  # the beginning-of-sequence text that the template writes first, or nothing
    head: str  # what opens a user turn
    tail: str  # what follows the user's text, cue for the answer included
    tail_without_cue: str

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate | None:
        """The template of a tokenizer, or None where it has none.

        Raises:
            UserError: if the template fails on a single user message.
        """
        if not getattr(tokenizer, "chat_template", None):
            return None
        probe = [{"role": "user", "content": _PROBE}]
        with_cue, without = _render(tokenizer, probe, cue=True), _render(tokenizer, probe, cue=False)
        bos = tokenizer.bos_token or ""
        before, _, tail = with_cue.partition(_PROBE)
        writes_bos = bool(bos) and before.startswith(bos)
        before = before.removeprefix(bos) if writes_bos else before
        head = before.rstrip().rpartition("\n")[2].strip()
        return cls(tokenizer, bos if writes_bos else "", head, tail, without.partition(_PROBE)[2])

    def render(self, messages: list[Message]) -> str:
        """The conversation as one text that ends with the cue for the answer.

        Raises:
            UserError: if the template refuses the conversation.
        """
        return _render(self.tokenizer, messages, cue=True)

    def recognise(self, text: str) -> str | None:
        """A text that the template has made before, completed to what ``render`` gives; None for any other.

        Where the template writes a beginning-of-sequence mark or a cue that the text lacks, it is added once.
        """
        bare = text.removeprefix(self.bos)
        end, cue_end = bare.rstrip(), self.tail.rstrip()
        if cue_end and end.endswith(cue_end):
            done = end.removesuffix(cue_end) + self.tail
        elif not self.head or not cue_end:
            return None
        else:
            closed = self.tail_without_cue.rstrip()
            opened = self.head in bare if closed else bare.lstrip().startswith(self.head)
            if not (opened and end.endswith(closed)):
                return None
            done = end.removesuffix(closed) + self.tail
        return self.bos + done


def _render(tokenizer: Any, messages: list[Message], *, cue: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=cue)
    except Exception as error:  # a template is code of its own: it may raise anything
        raise UserError(f"the tokenizer's chat template refuses the conversation ({error})") from error
