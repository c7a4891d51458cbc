"""The conversation's commands and answers, line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rlhf_lightning.chatting.conversation import Conversation
from rlhf_lightning.chatting.stream import for_terminal, pieces, sample, spell
from rlhf_lightning.config.describe import nearest
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.roles import Role
from rlhf_lightning.rewards.base import Reward

HELP = """\
/reference  what the model before training would have answered
/score      the reward of the last answer
/reset      forget the conversation
/quit       leave (also Ctrl-D)
//...       a message that begins with /
Ctrl-C stops an answer"""


@dataclass(frozen=True)
class Answering:
    """How answers are made."""

    limit: int
    """Tokens at most."""
    greedy: bool
    seed: int


@dataclass
class Chat:
    """Reads messages, writes answers to ``out`` and everything else to ``aside``."""

    roles: ActorCritic
    conversation: Conversation
    answering: Answering
    reward: Reward | None
    no_reward: str
    """Why /score has nothing to say, where ``reward`` is None."""
    no_reference: str | None = None
    """Why /reference has nothing to say; None: it has."""
    out: TextIO = sys.stdout
    aside: TextIO = sys.stderr

    def __post_init__(self) -> None:
        self._asked: list[int] | None = None  # what the last answer was given to
        self._answer = ""
        self._turn = 0
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self.note(HELP),
            "/reset": self._reset,
            "/score": self._score,
            "/reference": self._reference,
        }

    def take(self, line: str) -> bool:
        """Deal with one line; False where it asks to leave."""
        text = line.strip()
        if not text:
            return True
        if text == "/quit":
            return False
        if text.startswith("/") and not text.startswith("//"):
            self._command(text)
        else:
            self._say(text.removeprefix("/") if text.startswith("//") else text)
        return True

    def note(self, text: str) -> None:
        print(text, file=self.aside, flush=True)

    def _command(self, text: str) -> None:
        if (command := self._commands.get(text)) is not None:
            command()
            return
        close = nearest(text, [*self._commands, "/quit"])
        hint = f"; did you mean {close}?" if close else ""
        self.note(f"{for_terminal(text)} is no command{hint} (/help shows all; // begins a message with /)")

    def _say(self, text: str) -> None:
        self.conversation.ask(text)
        try:
            ids, notes = self.conversation.prompt()
        except UserError as error:  # the template may refuse what was said
            del self.conversation.turns[-1:]
            self.note(str(error))
            return
        for note in notes:
            self.note(note)
        self._asked, self._turn = ids, self._turn + 1
        self._answer = self._speak(ids, "policy")
        self.conversation.answer(self._answer)

    def _speak(self, ids: list[int], role: Role) -> str:
        how, kept = self.answering, list[int]()
        tokens = sample(
            self.roles, ids, role, limit=how.limit, greedy=how.greedy, seed=how.seed, turn=self._turn
        )
        tokenizer = self.roles.backbone.tokenizer
        stopped = False
        try:
            for piece in pieces(tokens, tokenizer, kept=kept):
                self.out.write(for_terminal(piece))
                self.out.flush()
        except KeyboardInterrupt:
            stopped = True
        self.out.write("\n")
        self.out.flush()
        if stopped:
            self.note("(stopped)")
        elif len(kept) == how.limit and kept[-1] not in self.roles.backbone.end_ids:
            self.note(f"(cut after {how.limit} tokens)")
        return spell(kept, tokenizer)

    def _reset(self) -> None:
        self.conversation.reset()
        self._asked, self._answer = None, ""
        self.note("the conversation starts anew")

    def _reference(self) -> None:
        if self.no_reference is not None:
            self.note(self.no_reference)
        elif self._asked is None:
            self.note("there is no message yet that the untuned model could answer")
        else:
            self._speak(self._asked, "reference")

    def _score(self) -> None:
        if self.reward is None:
            self.note(self.no_reward)
        elif self._asked is None:
            self.note("there is no answer yet to score")
        else:
            prompt = spell(self._asked, self.roles.backbone.tokenizer)
            score = float(self.reward([prompt], [self._answer]).scores[0])
            print(f"score {score:+.3f}", file=self.out, flush=True)
