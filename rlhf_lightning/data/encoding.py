"""From texts to token ids, the same way in training and in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_lightning.types import TokenPair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_judged(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> list[int]:
    """Ids of a finished answer as the reward model reads it, in training and in use.

    Prompt and answer are one string, tokenised together, at most one BOS in front, one end token behind.
    Tokenised apart, the seam would fall into other tokens than in running text. The end token is there also
    where the answer was cut: the model was trained to judge at it, and the answer itself, as sampled, is
    not touched.
    """
    ids = single_bos(tokenizer, prompt + response)
    end = tokenizer.eos_token_id
    if end is None:
        return ids or [0]  # something has to be read for an empty text
    return ids if ids[-1:] == [end] else [*ids, end]


def single_bos(tokenizer: PreTrainedTokenizerBase, text: str, **options: object) -> list[int]:
    """Ids of ``text`` with the tokenizer's own specials; no second BOS where a template already wrote one."""
    bos = tokenizer.bos_token
    if bos and text.startswith(bos):
        added = tokenizer("").input_ids
        if added[:1] == [tokenizer.bos_token_id]:
            text = text.removeprefix(bos)
    return list(tokenizer(text, **options).input_ids)


def judged_pair(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    chosen: str,
    rejected: str,
    *,
    max_length: int,
    margin: float,
) -> TokenPair:
    """A pair as the reward model reads it: two judged texts and their longest common beginning.

    Where the longer text has more than ``max_length`` tokens, the common beginning loses its first ones, so
    that both sides are judged on the same context; an answer longer than that by itself keeps its end.
    """
    sides = [encode_judged(tokenizer, prompt, answer) for answer in (chosen, rejected)]
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    cut = max(0, max(map(len, sides)) - max_length)
    tails = [tuple(side[shared:][-max_length:]) for side in sides]
    return TokenPair(tuple(sides[0][min(cut, shared) : shared]), tails[0], tails[1], margin)


def answer_ids(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: str) -> list[int]:
    """Ids of an answer as the model would write it behind a prompt, an end token behind.

    Prompt and answer are tokenised together where the seam falls between two tokens, as it does in running
    text; apart elsewhere, for the prompt's ids are given.

    Args:
        prompt: its ids as the model is fed them, specials included.
    """
    options = {"add_special_tokens": False, "verbose": False}
    before = str(tokenizer.decode(list(prompt), clean_up_tokenization_spaces=False)) if prompt else ""
    whole = list(tokenizer(before + answer, **options).input_ids)
    together = whole[: len(prompt)] == list(prompt)
    ids = whole[len(prompt) :] if together else list(tokenizer(answer, **options).input_ids)
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def answered_pair(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    chosen: str,
    rejected: str,
    *,
    max_length: int,
) -> TokenPair:
    """A pair as DPO reads it: the prompt's own ids, and two answers that end.

    Where prompt and longer answer have more than ``max_length`` tokens, the prompt loses its first ones down
    to one, then the answers their last ones.
    """
    answers = [answer_ids(tokenizer, prompt, answer) for answer in (chosen, rejected)]
    room = max(1, max_length - max(map(len, answers)))
    kept = tuple(prompt[-room:])
    tails = [tuple(answer[: max_length - len(kept)]) for answer in answers]
    return TokenPair(kept, tails[0], tails[1])
