"""The sampling loop draws from the distribution that the update scores."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.doctor.exam import Exam, unpadded
from rlhf_lightning.doctor.proof import Finding, Proof, distance
from rlhf_lightning.rollout.generate import _Batch
from rlhf_lightning.rollout.sampling import uniforms
from rlhf_lightning.types import Generation

DRAWS = 2000
BINS = 24  # likeliest tokens that are counted one by one
LEAST_EXPECTED = 5.0  # draws; below it a bin's chi-square is not to be trusted
LEAST_P = 1e-5


def cached_forward_agrees(exam: Exam) -> Finding:
    """What the loop thought of each token, step by step over its cache, against one forward over all."""
    sampled, greedy = exam.rollout, exam.sample(greedy=True)
    figures = [
        distance(exam.loop_logprobs[sampled.response_mask], sampled.logprobs[sampled.response_mask]),
        distance(greedy[1][greedy[0].response_mask], _scored(exam, greedy[0])[greedy[0].response_mask]),
    ]
    return Finding(max(figures) <= exam.tolerance.other, f"sampled {figures[0]:.1e}, greedy {figures[1]:.1e}")


def frequencies_match(exam: Exam) -> Finding:
    """Chi-square of ``DRAWS`` first tokens to one prompt against their scored probabilities."""
    row = int(exam.rollout.entropy[:, 0].argmax())
    counts = _draw(exam, row)
    tokens, probabilities = _likeliest(exam, row)
    keep = probabilities * DRAWS >= LEAST_EXPECTED
    tokens, probabilities = tokens[keep], probabilities[keep]
    observed, expected = counts[tokens].double(), probabilities.double() * DRAWS
    rest = max(DRAWS - float(expected.sum()), 0.0)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    unlisted = DRAWS - float(observed.sum())
    bins = len(tokens)
    if rest >= LEAST_EXPECTED:
        statistic, bins = statistic + (unlisted - rest) ** 2 / rest, bins + 1
    degrees = max(bins - 1, 1)
    p = float(torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2)))
    text = f"chi-square {statistic:.1f} on {degrees} degrees, p {p:.2g}, {DRAWS} draws of one first token"
    return Finding(p >= LEAST_P, text)


def rollout_repeats(exam: Exam) -> Finding:
    """The same seed and iteration give the same answers, also after an update was made and taken back."""
    with exam.undone():
        exam.step(exam.rollout, lr=1e-3)
    again = exam.sample()[0]
    same = again.response_ids.shape == exam.generation.response_ids.shape
    equal = same and torch.equal(again.response_ids, exam.generation.response_ids)
    total = int(again.response_mask.sum())
    differs = "" if equal else ", and they differ"
    return Finding(equal, f"{len(again)} answers of {total} tokens sampled twice{differs}")


@torch.no_grad()
def _scored(exam: Exam, generation: Generation) -> Tensor:
    return exam.model.policy(generation)[0].cpu()


@torch.no_grad()
def _draw(exam: Exam, row: int) -> Tensor:
    """How often each token came first, (V,), drawn by the loop's own choice from its own logits."""
    heard: list[Tensor] = []
    u = uniforms(list(range(DRAWS)), 1, seed=exam.config.seed, iteration=0)
    prompt = [exam.prompts.ids[row]]
    batch = _Batch(exam.model, prompt, "policy", exam.config.generation, u)

    def hear(logits: Tensor) -> Tensor:
        heard.append(logits)
        return logits

    one = exam.config.generation.model_copy(update={"max_new_tokens": 1})
    with exam.listening(hear):
        list(_Batch(exam.model, prompt, "policy", one, u[:1]).run())
    logits = heard[0]
    counts = torch.zeros(logits.shape[1], dtype=torch.int64)
    for rows in torch.arange(DRAWS).split(100):
        drawn = batch._choose(logits.expand(len(rows), -1), rows, 0).cpu()
        counts += torch.bincount(drawn, minlength=len(counts))
    return counts


@torch.no_grad()
def _likeliest(exam: Exam, row: int) -> tuple[Tensor, Tensor]:
    """The likeliest first tokens by the model's logits, and their probabilities as the update scores them."""
    prompt = torch.tensor([exam.prompts.ids[row]], device=exam.model.device)
    with exam.model.roles.use("policy"):
        tokens = exam.model.backbone.model(prompt).logits[0, -1].float()
        tokens = tokens.topk(min(BINS, len(tokens))).indices.cpu()
    ids = prompt.cpu().expand(len(tokens), -1)
    answers = tokens.unsqueeze(1)
    found = []
    for part in torch.arange(len(tokens)).split(exam.config.ppo.micro_batch_size):
        batch = unpadded(ids[part], answers[part])
        found.append(exam.model.policy(batch)[0].cpu()[:, 0].exp())
    return tokens, torch.cat(found)


PROOFS = (
    Proof(
        "cached sampling agrees with scoring",
        "The loop that samples computes other probabilities than the pass that scores its tokens. Usual "
        "causes: positions or cache rows that go astray as answers end, or a different adapter.",
        cached_forward_agrees,
    ),
    Proof(
        "tokens come as often as scored",
        "Tokens are drawn from another distribution than the one that the update scores, which biases every "
        "gradient and can make the KL negative. Usual causes: top-k or top-p, a second temperature, "
        "settings taken from a checkpoint.",
        frequencies_match,
    ),
    Proof(
        "the same seed repeats a rollout",
        "Sampling depends on something besides seed and iteration, so no run can be repeated or resumed. "
        "Usual causes: a global random generator, or a mode that the update leaves behind.",
        rollout_repeats,
    ),
)
