"""From rows to prompts: the token ids that the model sees, and the text that they spell."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.data.formats import Row, Source, read_rows
from rlhf_lightning.data.held_out import Part, held_out_source, is_held_out, prompt_key
from rlhf_lightning.data.rendering import PromptText, asked, render_rows
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
    left: int = 0  # prompts on the other side of the split into learning and measuring

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
            "on the other side of data.held_out_share": self.left,
        }
        return ", ".join(parts + [f"{count} {what}" for what, count in counts.items() if count])


def load_prompts(
    config: DataConfig, tokenizer: Any, *, room: int, part: Part = "all", share: float = 0.0
) -> PromptSet:
    """Read, template, encode and bound the prompts that the config names.

    A prompt longer than ``data.max_prompt_length`` keeps its end, where the cue for the answer stands, behind
    its beginning-of-sequence token where it has one. No prompt gets a second such token, nor a closing one.

    Args:
        config: where the prompts are and what to do with them; ``limit`` counts rows read.
        tokenizer: of the policy.
        room: tokens that a prompt may take: the model's context length minus ``generation.max_new_tokens``.
        part: those to learn from, those that are only measured on, or all of ``data.path``. The second are
            the rows of ``data.held_out`` where it is set, else a share of ``data.path``, and the first the
            others.
        share: of ``data.path`` that is held out where ``data.held_out`` is empty, see ``share_held_out``.

    Raises:
        UserError: naming the key or the row, if rows cannot be read, a prompt is empty or does not fit in the
            room, or none is left.
    """
    if room < 1:
        raise UserError(
            "generation.max_new_tokens is too large: the model's context length minus it "
            f"leaves room for {room} prompt tokens, and a prompt needs at least 1"
        )
    split = config.held_out is None and part != "all" and share > 0
    if config.held_out is not None and part == "held_out":
        config = held_out_source(config, "prompts_heldout.jsonl")
    path = str(tiny_path("prompts.jsonl")) if config.path == "tiny" else config.path
    source = read_rows(path, form=config.format, split=config.split, limit=config.limit)
    texts = render_rows(source, config, tokenizer)
    if split:
        pairs = zip(texts, source.rows, strict=True)
        texts = [
            item
            for item, row in pairs
            if is_held_out(_split_key(item, row, source, config), share) == (part == "held_out")
        ]
        if not texts:
            raise UserError(
                f"data.held_out_share={share:g} of the {len(source.rows)} prompts of data.path={source.path} "
                f"leaves none to {'measure on' if part == 'held_out' else 'learn from'}: change the share, "
                "or name other rows in data.held_out"
            )
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
            ids = keep_end(row, limit, bos)
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
        left=len(source.rows) - len(texts),
    )


def _split_key(item: PromptText, row: Row, source: Source, config: DataConfig) -> str:
    """What decides on which side a prompt falls; words that are cut off have no say."""
    return item.text if config.first_words is not None else prompt_key(asked(source, row, config))


def keep_end(ids: list[int], limit: int, bos: int | None) -> list[int]:
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
    encoded: list[list[int]] = []
    if not texts:
        return encoded
    batch = tokenizer([item.text for item in texts], add_special_tokens=False, **quiet)["input_ids"]
    for item, row in zip(texts, batch, strict=True):
        ids = list(row)
        while len(ids) > 1 and ids[0] == ids[1] == bos:
            ids.pop(0)
        wants_bos = adds_bos and not (item.templated or item.already_templated)
        encoded.append([bos, *ids] if wants_bos and ids[:1] != [bos] else ids)
    return encoded
