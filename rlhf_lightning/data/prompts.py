"""From rows to prompts: the token ids that the model sees, and the text that they spell."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.data.formats import read_rows
from rlhf_lightning.data.rendering import PromptText, render_rows
from rlhf_lightning.errors import UserError

if TYPE_CHECKING:
    from rlhf_lightning.config.schema import DataConfig


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a run. ``texts[i]`` is ``ids[i]`` decoded without special tokens, never the raw row."""

    ids: list[list[int]]
    texts: list[str]
    path: str
    read: int  # rows read
    truncated: int  # prompts of which only the end is left
    dropped: int  # prompts left out for their length
    templated: int  # prompts that went through the chat template
    already_templated: int  # prompts that came with the template's marks and were not wrapped again
    own_system: int  # conversations that kept their own system message instead of data.system_prompt

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def report(self) -> str:
        """One line for a person: how many, how long, and what was done to them."""
        lengths = [len(row) for row in self.ids]
        parts = [
            f"{len(self)} prompts from {self.path}",
            f"{min(lengths)} to {max(lengths)} tokens (median {median(lengths):g})",
        ]
        counts = {
            "through the chat template": self.templated,
            "already templated": self.already_templated,
            "with a system message of their own": self.own_system,
            "cut to their last tokens": self.truncated,
            "left out as too long": self.dropped,
        }
        return ", ".join(parts + [f"{count} {what}" for what, count in counts.items() if count])


def load_prompts(config: DataConfig, tokenizer: Any, *, room: int) -> PromptSet:
    """Read, template, encode and bound the prompts that the config names.

    A prompt longer than ``data.max_prompt_length`` keeps its end, where the cue for the answer stands, behind
    its beginning-of-sequence token where it has one. No prompt gets a second such token, nor a closing one.

    Args:
        config: where the prompts are and what to do with them; ``limit`` counts rows read.
        tokenizer: of the policy.
        room: tokens that a prompt may take: the model's context length minus ``generation.max_new_tokens``.

    Raises:
        UserError: naming the key or the row, if rows cannot be read, a prompt is empty or does not fit in the
            room, or none is left.
    """
    if room < 1:
        raise UserError(
            "generation.max_new_tokens is too large: the model's context length minus it "
            f"leaves room for {room} prompt tokens, and a prompt needs at least 1"
        )
    path = str(tiny_path("prompts.jsonl")) if config.path == "tiny" else config.path
    source = read_rows(path, form=config.format, split=config.split, limit=config.limit)
    texts = render_rows(source, config, tokenizer)
    encoded = encode_prompts(texts, tokenizer)
    bos = tokenizer.bos_token_id
    limit = config.max_prompt_length
    shortest = min(map(len, encoded))
    kept: list[list[int]] = []
    truncated = dropped = 0
    for item, row in zip(texts, encoded, strict=True):
        if all(token == bos for token in row):
            raise UserError(f"data.path={source.path}: {item.place}: no tokens in the prompt {item.text!r}")
        ids = row
        if len(row) > limit:
            if config.overlong == "drop":
                dropped += 1
                continue
            if config.overlong == "error":
                raise UserError(
                    f"data.overlong=error: the prompt in {item.place} of data.path={source.path} has "
                    f"{len(row)} tokens, more than data.max_prompt_length={limit}"
                )
            ids = _keep_end(row, limit, bos)
            truncated += 1
        if len(ids) > room:
            raise UserError(
                f"the prompt in {item.place} of data.path={source.path} has {len(ids)} tokens, and beside "
                f"generation.max_new_tokens the model's context has room for {room}; "
                f"set data.max_prompt_length={room} or less, or lower generation.max_new_tokens"
            )
        kept.append(ids)
    if not kept:
        raise UserError(
            f"0 of {len(texts)} prompts left: data.max_prompt_length={limit} is too small "
            f"(the shortest prompt of data.path={source.path} has {shortest} tokens)"
        )
    return PromptSet(
        ids=kept,
        texts=tokenizer.batch_decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        path=source.path,
        read=len(source.rows),
        truncated=truncated,
        dropped=dropped,
        templated=sum(item.templated for item in texts),
        already_templated=sum(item.already_templated for item in texts),
        own_system=sum(item.own_system for item in texts),
    )


def _keep_end(ids: list[int], limit: int, bos: int | None) -> list[int]:
    """The last tokens; the first place stays the BOS, without which many models lose their footing."""
    if limit > 1 and bos is not None and ids[0] == bos:
        return [bos, *ids[1 - limit :]]
    return ids[-limit:]


def encode_prompts(texts: list[PromptText], tokenizer: Any) -> list[list[int]]:
    """Token ids with at most one leading BOS: the template's where there is a template, or the tokenizer's.

    The tokenizer never adds specials itself: after a template it would add a second BOS, and it might close
    the prompt with an end token.
    """
    quiet = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("a", **quiet)["input_ids"][:1] == [bos]
    encoded = []
    batch = tokenizer([item.text for item in texts], add_special_tokens=False, **quiet)["input_ids"]
    for item, row in zip(texts, batch, strict=True):
        ids = list(row)
        while len(ids) > 1 and ids[0] == ids[1] == bos:
            ids.pop(0)
        wants_bos = adds_bos and not (item.templated or item.already_templated)
        encoded.append([bos, *ids] if wants_bos and ids[:1] != [bos] else ids)
    return encoded
