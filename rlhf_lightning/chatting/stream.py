"""One answer, token by token, as text that a terminal can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlhf_lightning.console import visible
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.roles import Role
from rlhf_lightning.rollout.sampling import draw, uniforms

CUT = "\ufffd"  # what a decoder writes for a character whose bytes are not all there yet


@torch.no_grad()
def sample(
    roles: ActorCritic, ids: Sequence[int], role: Role, *, limit: int, greedy: bool, seed: int, turn: int
) -> Iterator[int]:
    """Tokens of one answer as they come, the end token included; drawn as a rollout draws them.

    Args:
        ids: the conversation up to the answer.
        limit: tokens at most.
        greedy: the likeliest token instead of a draw.
        seed, turn: what the draws depend on.
    """
    speaker = roles.speaker([list(ids)], role, room=limit)
    u = uniforms([0], limit, seed=seed, iteration=turn)
    hidden = speaker.start()
    for t in range(limit):
        logits = roles.logits(hidden)
        token = logits.argmax(dim=1) if greedy else draw(logits, u[:, t].to(logits.device))
        yield int(token)
        if int(token) in roles.backbone.end_ids:
            return
        hidden = speaker.step(token)


def pieces(tokens: Iterator[int], tokenizer: Any, *, kept: list[int]) -> Iterator[str]:
    """The text that each token adds, whole characters only.

    The answer is decoded as a whole every time, since a token's text can depend on the one before it, and a
    character can be spread over several tokens.

    Args:
        kept: takes the tokens, so that what came before an interruption is known.
    """
    shown = ""
    for token in tokens:
        kept.append(token)
        text = spell(kept, tokenizer)
        whole = text.rstrip(CUT)
        if whole.startswith(shown) and len(whole) > len(shown):
            yield whole[len(shown) :]
            shown = whole
    text = spell(kept, tokenizer)
    if text.startswith(shown) and len(text) > len(shown):
        yield text[len(shown) :]  # bytes that never became a character


def spell(ids: Sequence[int], tokenizer: Any) -> str:
    """The text of an answer, without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def for_terminal(text: str) -> str:
    """Text of a model: control and direction characters spelt out, so that it cannot command the terminal;
    new lines and tabs stay."""
    return "".join(c if c in "\n\t" else visible(c) for c in text)
