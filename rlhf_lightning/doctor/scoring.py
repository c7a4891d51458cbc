"""A pass that scores reads the right numbers at the right places, whatever stands around a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.doctor.exam import Exam, rows_of, unpadded
from rlhf_lightning.doctor.proof import Finding, Proof, distance
from rlhf_lightning.types import Generation

ROWS = 4


def padding_changes_nothing(exam: Exam) -> Finding:
    """Each row alone against the whole batch, which is padded wider and whose padding holds other tokens."""
    batch, model = exam.generation, exam.model
    noise = int(exam.made_up.response_ids[0, 0])
    wide = replace(
        batch,
        prompt_ids=pad(batch.prompt_ids, (5, 0), value=noise),
        prompt_mask=pad(batch.prompt_mask, (5, 0)),
        response_ids=pad(batch.response_ids.masked_fill(~batch.response_mask, noise), (0, 3), value=noise),
        response_mask=pad(batch.response_mask, (0, 3)),
    )
    read: dict[str, Callable[[Generation], Tensor]] = {
        "policy": lambda g: model.policy(g)[0],
        "reference": model.reference,
    }
    if model.has_critic:
        read["values"] = lambda g: model.values(g)[:, :-1]
    figures = dict.fromkeys(read, 0.0)
    with torch.no_grad():
        for row in _spread(exam):
            prompt, answer = (t.cpu() for t in exam.alone(row, batch))
            single = unpadded(prompt, answer)
            neighbours = torch.tensor(sorted({row, 0, len(batch) - 1}))
            place = neighbours.tolist().index(row)
            for name, of in read.items():
                beside = of(rows_of(wide, neighbours))[place : place + 1, : answer.shape[1]]
                figures[name] = max(figures[name], distance(beside, of(single)))
    return Finding(
        max(figures.values()) <= exam.tolerance.other,
        ", ".join(f"{name} {x:.1e}" for name, x in figures.items()),
    )


def own_head_agrees(exam: Exam) -> Finding:
    """Our decoder, slices and chunked head against the model's own modules, row by row, without padding."""
    batch, model = exam.generation, exam.model
    figures = {"policy": 0.0, "reference": 0.0}
    with torch.no_grad():
        scored = {"policy": model.policy(batch)[0], "reference": model.reference(batch)}
        for role in ("policy", "reference"):
            for row in _spread(exam):
                plain = plain_logprobs(exam, row, role, temperature=exam.config.generation.temperature)
                figures[role] = max(figures[role], distance(scored[role][row, : len(plain)], plain))
    worst = max(figures.values())
    return Finding(worst <= exam.tolerance.other, ", ".join(f"{name} {x:.1e}" for name, x in figures.items()))


def temperature_reaches_scoring(exam: Exam) -> Finding:
    """At twice the temperature, sampling, policy and reference all have to follow softmax(z / 2 tau)."""
    model = exam.model
    doubled = 2 * exam.config.generation.temperature
    before = model.temperature
    figures = {"sampling": 0.0, "policy": 0.0, "reference": 0.0}
    try:
        model.temperature = doubled
        with torch.no_grad(), exam.undone():
            generation, loop = exam.sample()
            scored = {
                "sampling": loop,
                "policy": model.policy(generation)[0],
                "reference": model.reference(generation),
            }
            for row in _spread(exam):
                for name, logprobs in scored.items():
                    role = "reference" if name == "reference" else "policy"
                    plain = plain_logprobs(exam, row, role, temperature=doubled, generation=generation)
                    figures[name] = max(figures[name], distance(logprobs[row, : len(plain)], plain))
    finally:
        model.temperature = before
    agrees = before == exam.config.generation.temperature
    worst = max(figures.values())
    text = ", ".join(f"{name} {x:.1e}" for name, x in figures.items())
    return Finding(agrees and worst <= exam.tolerance.other, f"tau {before:g}, at twice that: {text}")


def time_axis(exam: Exam) -> Finding:
    """Another a_t moves log pi(a_t | s_t) and V(s_{t+1}), and neither V(s_t) nor anything before it.

    Without a critic there are log-probabilities alone.
    """
    batch, model, t = exam.made_up, exam.model, 2
    other = batch.response_ids.clone()
    other[:, t] = (other[:, t] + 1) % len(model.backbone.tokenizer)
    pair = (batch, replace(batch, response_ids=other))
    with torch.no_grad():
        logprobs = torch.stack([model.policy(b)[0] for b in pair]).diff(dim=0).abs()[0]
        early, late = float(logprobs[:, :t].max()), float(logprobs[:, t].min())
        if model.has_critic:
            values = torch.stack([model.values(b) for b in pair]).diff(dim=0).abs()[0]
            early = max(early, float(values[:, : t + 1].max()))
            late = min(late, float(values[:, t + 1].max()))
    return Finding(
        early <= exam.tolerance.same < late, f"before a_t: moved {early:.1e}; at and after: {late:.1e}"
    )


def plain_logprobs(
    exam: Exam, row: int, role: str, *, temperature: float, generation: Generation | None = None
) -> Tensor:
    """log pi(a_t | s_t) of one row from ``model(ids).logits`` alone, (T,)."""
    prompt, answer = exam.alone(row, generation or exam.generation)
    with exam.model.roles.use("policy" if role == "policy" else "reference"):
        logits = exam.model.backbone.model(torch.cat([prompt, answer], dim=1)).logits[
            0, prompt.shape[1] - 1 : -1
        ]
    return (logits.float() / temperature).log_softmax(dim=-1).gather(1, answer[0].unsqueeze(1)).squeeze(1)


def _spread(exam: Exam) -> list[int]:
    last = len(exam.generation) - 1
    return [i * last // (ROWS - 1) for i in range(ROWS)]


PROOFS = (
    Proof(
        "padding and neighbours change nothing",
        "A row is scored differently beside other rows, so ratios and rewards depend on who shares its "
        "batch. Usual causes: default position ids under left padding, or a mask that lets padding through.",
        padding_changes_nothing,
    ),
    Proof(
        "log-probabilities are the model's own",
        "What we compute differs from the model's logits, so the wrong tokens are credited. Usual causes: a "
        "slice shifted by one, wrong position ids, layers that are not what our decoder takes them for, a "
        "head with a scale or cap that we do not know.",
        own_head_agrees,
    ),
    Proof(
        "temperature divides every pass",
        "Sampling and scoring use different temperatures, so old, new and reference describe no common "
        "policy. Usual cause: a temperature given to the sampling alone.",
        temperature_reaches_scoring,
    ),
    Proof(
        "values are read before the token",
        "The critic sees the token that it should predict the value before, or reads one place too early. "
        "Usual cause: a hidden-state slice shifted by one.",
        time_axis,
    ),
)
