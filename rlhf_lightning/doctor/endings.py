"""Answers end at their end token, and the end token is learned from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_lightning.doctor.exam import Exam, rows_of
from rlhf_lightning.doctor.proof import Finding, Proof
from rlhf_lightning.rollout.generate import generate
from rlhf_lightning.types import Generation, Prompts

AT = 2  # tokens before the end that is put in place


def end_token_is_learned(exam: Exam) -> Finding:
    """The loop is made to draw an end token: it has to stop there and count it, and a step that rewards it
    and nothing else has to make it likelier. So answers of the first batch need not end by themselves."""
    ends = sorted(exam.model.backbone.end_ids)
    wrong, place = [], min(AT, exam.config.generation.max_new_tokens - 1)
    for end in ends[:4]:
        generation = _ending(exam, end, place)
        counted = generation.lengths == place + 1
        width = generation.response_ids.shape[1]
        drawn = generation.response_ids[:, place] == end if width > place else torch.tensor(False)
        if set(generation.ended) != {"eos"} or not bool(counted.all()) or not bool(drawn.all()):
            wrong.append(end)
    if wrong:
        return Finding(False, f"end ids {wrong} are not stopped at or not covered by the mask")
    generation = _ending(exam, ends[0], place)
    rows = torch.arange(len(generation))
    whole = exam.prompts
    exam.prompts = _first(whole, len(generation))
    try:
        rollout = exam.collect(generation)
    finally:
        exam.prompts = whole
    advantages = torch.zeros_like(rollout.advantages)
    advantages[rows, place] = 1.0
    rollout = replace(rollout, advantages=advantages)
    with exam.undone():
        before = _end_logprobs(exam, rollout, place)
        exam.step(rollout, lr=1e-3, vf_coef=0.0, entropy_coef=0.0, kl_in="reward")
        after = _end_logprobs(exam, rollout, place)
    learned = float(after.mean() - before.mean())
    own = sum(reason == "eos" for reason in exam.generation.ended)
    text = f"log p(end) {float(before.mean()):.3f} -> {float(after.mean()):.3f} after one step on it alone"
    return Finding(
        learned > 0, f"{text}; ids {ends[:4]}, {own} of {len(exam.generation)} answers ended by themselves"
    )


def _ending(exam: Exam, end: int, place: int) -> Generation:
    """One batch of answers whose token ``place`` the loop can only draw as ``end``."""
    ends, calls = sorted(exam.model.backbone.end_ids), 0

    def force(logits: Tensor) -> Tensor:
        nonlocal calls
        logits = logits.clone()
        if calls == place:
            logits[:, torch.arange(logits.shape[1], device=logits.device) != end] = float("-inf")
        else:
            logits[:, ends] = float("-inf")
        calls += 1
        return logits

    config = exam.config.generation.model_copy(update={"max_new_tokens": place + 2, "stop": []})
    prompts = _first(exam.prompts, min(len(exam.prompts.ids), config.batch_size))
    with exam.listening(force):
        return generate(exam.model, prompts, config, seed=exam.config.seed, iteration=0)


def _first(prompts: Prompts, count: int) -> Prompts:
    return Prompts(prompts.ids[:count], prompts.texts[:count], prompts.rows[:count])


@torch.no_grad()
def _end_logprobs(exam: Exam, generation: Generation, place: int) -> Tensor:
    found = []
    for rows in torch.arange(len(generation)).split(exam.config.ppo.micro_batch_size):
        found.append(exam.model.policy(rows_of(generation, rows))[0][:, place].cpu())
    return torch.cat(found)


PROOFS = (
    Proof(
        "the end token is learned from",
        "Answers do not stop at an end token, or the token that ends them is masked out: the model then "
        "never learns to stop. Usual causes: a mask made by comparing with the pad id, or an end id missing "
        "from the set.",
        end_token_is_learned,
    ),
)
