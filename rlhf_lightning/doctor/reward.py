"""What the reward says is a property of the text, and of nothing around it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlhf_lightning.data.padding import left_pad, right_pad
from rlhf_lightning.doctor.exam import Exam
from rlhf_lightning.doctor.proof import Finding, Proof, distance
from rlhf_lightning.rewards.base import Reward
from rlhf_lightning.rewards.classifier import ClassifierReward
from rlhf_lightning.rewards.combine import CombinedReward
from rlhf_lightning.rewards.learned import LearnedReward
from rlhf_lightning.rollout.generate import texts

BY_HAND = 4  # answers whose score is computed a second way


def one_finite_score_each(exam: Exam) -> Finding:
    """One finite float32 number for each answer, an empty answer among them."""
    prompts, responses = _answers(exam)
    scores = exam.module.reward(prompts, responses).scores
    good = (
        scores.shape == (len(responses),) and scores.dtype == torch.float32 and bool(scores.isfinite().all())
    )
    spread = f", {float(scores.min()):.3g} .. {float(scores.max()):.3g}" if scores.numel() else ""
    return Finding(good, f"{scores.numel()} scores for {len(responses)} answers{spread}")


def order_does_not_matter(exam: Exam) -> Finding:
    """The same answers once more, and in reverse order."""
    prompts, responses = _answers(exam)
    reward = exam.module.reward
    first, again = reward(prompts, responses).scores, reward(prompts, responses).scores
    reverse = reward(prompts[::-1], responses[::-1]).scores.flip(0)
    limit = exam.tolerance.other if list(_models(reward)) else 0.0
    figures = distance(again, first), distance(reverse, first)
    return Finding(max(figures) <= limit, f"called again {figures[0]:.1e}, rows reversed {figures[1]:.1e}")


def right_token_is_read(exam: Exam) -> Finding:
    """Reward models: beside others against alone, and against the score of the last real token by hand."""
    prompts, responses = _answers(exam)
    models = list(_models(exam.module.reward))
    if not models:
        return Finding(True, "no reward model: a function reads the text itself")
    alone = by_hand = 0.0
    for model in models:
        batch = model(prompts, responses).scores
        rows = sorted(range(len(responses)), key=lambda row: len(responses[row]))[
            :: max(len(responses) // BY_HAND, 1)
        ]
        single = torch.cat([model(prompts[r : r + 1], responses[r : r + 1]).scores for r in rows])
        other = torch.stack([_by_hand(exam, model, prompts[r], responses[r]) for r in rows])
        alone = max(alone, distance(batch[rows], single))
        by_hand = max(by_hand, distance(batch[rows], other))
        if isinstance(model, LearnedReward):
            encoded = [model._encode(prompts[r], responses[r]) for r in rows]
            by_hand = max(
                by_hand, *(distance(_padded(exam, model, encoded, left), other) for left in (True, False))
            )
    return Finding(
        max(alone, by_hand) <= exam.tolerance.other,
        f"batch against alone {alone:.1e}, against by hand {by_hand:.1e}",
    )


def _padded(exam: Exam, reward: LearnedReward, rows: list[list[int]], left: bool) -> Tensor:
    """Scores of rows padded with a token that is no end: with pad = end a wrong place reads the same."""
    backbone = exam.model.backbone
    noise = next(
        v for v in range(len(backbone.tokenizer)) if v not in backbone.end_ids and v != backbone.pad_id
    )
    return reward.score(*(left_pad if left else right_pad)(rows, noise)).float().cpu()


@torch.no_grad()
def _by_hand(exam: Exam, reward: LearnedReward | ClassifierReward, prompt: str, response: str) -> Tensor:
    """The score of one text, unpadded, read at its last token."""
    if isinstance(reward, LearnedReward):
        ids = reward._encode(prompt, response)
        head = exam.model.score_head
        assert head is not None
        with exam.model.roles.use("reward"):
            model = exam.model.backbone.model
            states = model(
                torch.tensor([ids], device=exam.model.device), output_hidden_states=True
            ).hidden_states
        return (states[-1][0, -1].float() @ head.weight[0] + head.bias[0]).cpu()
    ids = reward._encode(response if reward.config.response_only else prompt + response)
    before = reward.text_config.pad_token_id
    try:
        reward.text_config.pad_token_id = None  # without a pad id Transformers reads the last position itself
        logits = reward.model(input_ids=torch.tensor([ids], device=reward.device)).logits[0].float()
    finally:
        reward.text_config.pad_token_id = before
    if reward.config.probability:
        several = getattr(reward.model.config, "problem_type", None) == "multi_label_classification"
        logits = logits.sigmoid() if reward.labels == 1 or several else logits.softmax(dim=0)
    return logits[reward.config.label].cpu()


def _models(reward: Reward) -> Iterator[LearnedReward | ClassifierReward]:
    if isinstance(reward, CombinedReward):
        for _, term in reward.terms.values():
            yield from _models(term)
    elif isinstance(reward, LearnedReward | ClassifierReward):
        yield reward


def _answers(exam: Exam) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Prompts and sampled answers; the first answer is emptied, since a model may end at once."""
    responses = texts(exam.generation, exam.model.backbone.tokenizer)
    return exam.prompts.texts, ("", *responses[1:])


PROOFS = (
    Proof(
        "the reward gives one finite number each",
        "The reward failed on answers of the kind that a run brings, or gave a number too many or too few. "
        "Usual cause: an empty answer that it did not expect.",
        one_finite_score_each,
    ),
    Proof(
        "the reward depends on the text alone",
        "The same answer scores differently when asked again or in another place. Usual causes: randomness, "
        "state kept between calls, a score relative to the batch, a model in train mode.",
        order_does_not_matter,
    ),
    Proof(
        "the reward model reads the right token",
        "The score is read at padding or too early, so it hangs on batch neighbours. Usual causes: looking "
        "for the first pad id where pad is the end token too, or position ids without the mask.",
        right_token_is_read,
    ),
)
