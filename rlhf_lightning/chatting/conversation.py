"""What has been said, as the tokens that the model is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhf_lightning.data.dialogue import ChatTemplate, Message
from rlhf_lightning.data.encoding import single_bos


@dataclass
class Conversation:
    """Turns of a user and a model; the chat template puts them in form, or they are one running text.

    Args:
        room: tokens that it may take.
        template: None: each message continues the text before it.
    """

    tokenizer: Any
    room: int
    template: ChatTemplate | None
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def reset(self) -> None:
        self.turns.clear()

    def prompt(self) -> tuple[list[int], list[str]]:
        """Ids of everything up to the next answer, in the room; and notes on what had to go.

        The oldest question goes first, with its answer, for good; of a last message that is too long by
        itself the end is kept.
        """
        notes, dropped = [], 0
        ids = self._encode()
        while len(ids) > self.room and len(self.turns) > 2:
            del self.turns[:2]
            dropped += 1
            ids = self._encode()
        if dropped:
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            notes.append(f"the oldest {turns} left the conversation: the model's context is full")
        if len(ids) > self.room:
            notes.append(f"the message has {len(ids)} tokens: only its last {self.room} were read")
            ids = ids[-self.room :]
        return ids, notes

    def text(self) -> str:
        """The conversation up to the next answer as the model's tokenizer takes it."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        if self.template is not None:
            return self.template.render([*system, *self.turns])
        written = ""
        for message in [*system, *self.turns]:  # an answer goes on where its question ends
            gap = "\n" if written and message["role"] != "assistant" else ""
            written += gap + message["content"]
        return written

    def _encode(self) -> list[int]:
        text = self.text()
        if self.template is None:
            return single_bos(self.tokenizer, text)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
