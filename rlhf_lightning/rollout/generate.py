"""Sampling answers: our own loop over the backbone's forward with a key-value cache.

Against ``generate()``: the settings are the ones given here and nothing else, the random numbers of a row do
not depend on its neighbours (its logits do, by the rounding of a product with more or fewer rows), finished
rows leave the batch, and no step's scores are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.config.schema import GenerationConfig
from rlhf_lightning.data.padding import left_pad, right_pad
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.roles import Role
from rlhf_lightning.rollout.sampling import draw, filter_logits, uniforms
from rlhf_lightning.types import Ended, Generation, Prompts


@torch.no_grad()
def generate(
    actor_critic: ActorCritic,
    prompts: Prompts,
    config: GenerationConfig,
    *,
    seed: int,
    iteration: int,
    greedy: bool = False,
    role: Role = "policy",
    progress: Callable[[int, int], None] | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Generation:
    """Sample an answer to each prompt, the policy's unless another role is to speak.

    Args:
        prompts: B prompts; ``prompts.rows`` number them in the global batch and fix their random numbers.
        config: length limit, filters, stop texts, rows side by side; the temperature is ``actor_critic``'s.
        greedy: the likeliest token instead of a draw.
        role: who answers; two roles that are asked alike draw with the same random numbers.
        progress: called with (answers finished, B).
        pause: called before each token of a batch; what it raises ends the sampling.

    Returns:
        The answers on the CPU, as wide as the longest of them.
    """
    order = sorted(range(len(prompts.ids)), key=lambda i: len(prompts.ids[i]))
    tokens: list[list[int]] = [[] for _ in order]
    ended: list[Ended] = ["length" for _ in order]
    done = 0
    with actor_critic.sampling(role):
        for start in range(0, len(order), config.batch_size):
            chosen = order[start : start + config.batch_size]
            rows = [prompts.rows[i] for i in chosen]
            u = uniforms(rows, config.max_new_tokens, seed=seed, iteration=iteration)
            ids = [prompts.ids[i] for i in chosen]
            batch = _Batch(actor_critic, ids, role, config, None if greedy else u)
            for row, answer, reason in batch.run(pause):
                tokens[chosen[row]], ended[chosen[row]] = answer, reason
                done += 1
                if progress is not None:
                    progress(done, len(order))
            del batch  # it holds the cache, and the weights as they were packed
    pad = actor_critic.backbone.pad_id
    prompt_ids, prompt_mask = left_pad(prompts.ids, pad)
    response_ids, response_mask = right_pad(tokens, pad)
    numbers = torch.tensor(prompts.rows)
    return Generation(prompt_ids, prompt_mask, response_ids, response_mask, numbers, tuple(ended))


class _Batch:
    """Rows that are sampled side by side; rows that ended leave, several at a time."""

    def __init__(
        self,
        actor_critic: ActorCritic,
        ids: Sequence[Sequence[int]],
        role: Role,
        config: GenerationConfig,
        u: Tensor | None,
    ) -> None:
        self.model, self.config, self.u = actor_critic, config, u
        backbone = actor_critic.backbone
        self.end_ids = frozenset() if config.ignore_eos else backbone.end_ids
        self.tokenizer = backbone.tokenizer
        self.speaker = actor_critic.speaker(ids, role, room=config.max_new_tokens)
        self.window = stop_window(config.stop)
        self.rows = torch.arange(len(ids))  # those that are still computed

    def run(self, pause: Callable[[], None] = lambda: None) -> Iterator[tuple[int, list[int], Ended]]:
        """Yields (row, tokens, reason) as rows end."""
        answers: list[list[int]] = [[] for _ in self.rows]
        alive = set(self.rows.tolist())
        hidden = self.speaker.start()
        for t in range(self.config.max_new_tokens):
            pause()
            chosen = self._choose(self.model.logits(hidden), self.rows, t)
            for row, token in zip(self.rows.tolist(), chosen.tolist(), strict=True):
                if row not in alive:
                    continue
                answers[row].append(token)
                reason = self._reason(answers[row], last=t + 1 == self.config.max_new_tokens)
                if reason is not None:
                    alive.remove(row)
                    yield row, answers[row], reason
            if not alive:
                return
            # Taking rows out copies the whole cache, so it waits until it saves an eighth of the work.
            if len(alive) <= len(self.rows) * 7 // 8:
                kept = torch.tensor([place for place, row in enumerate(self.rows.tolist()) if row in alive])
                self.rows, chosen = self.rows[kept], chosen[kept.to(chosen.device)]
                self.speaker.keep(kept.to(chosen.device))
            hidden = self.speaker.step(chosen)

    def _choose(self, logits: Tensor, alive: Tensor, t: int) -> Tensor:
        if self.u is None:
            return logits.argmax(dim=1)
        logits = filter_logits(logits, top_k=self.config.top_k, top_p=self.config.top_p)
        return draw(logits, self.u[alive, t].to(logits.device))

    def _reason(self, answer: list[int], *, last: bool) -> Ended | None:
        if answer[-1] in self.end_ids:
            return "eos"
        if self.config.stop:
            tail = self.tokenizer.decode(
                answer[-self.window :], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if any(text in tail for text in self.config.stop):
                return "stop"
        return "length" if last else None


def stop_window(stop: Sequence[str]) -> int:
    """Last tokens of an answer that can hold a stop text which was not there one token before.

    A token carries at least one byte of the text, and a few more tokens let a cut character decode whole.
    """
    return max((len(text.encode()) for text in stop), default=0) + 4


def texts(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Answers as the reward reads them: whole responses decoded at once, without specials and end token."""
    padded, lengths = generation.response_ids.tolist(), generation.lengths.tolist()
    rows = [
        ids[: length - (ended == "eos")]
        for ids, length, ended in zip(padded, lengths, generation.ended, strict=True)
    ]
    return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))
