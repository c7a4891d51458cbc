"""Answers to held-out prompts, by the policy, its reference and a rival, judged alike and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.config.schema import Config
from rlhf_lightning.data.held_out import share_held_out
from rlhf_lightning.data.prompts import PromptSet, load_prompts
from rlhf_lightning.functional.comparison import bootstrap_interval, win_rate, wins
from rlhf_lightning.functional.kl import kl_estimate
from rlhf_lightning.functional.text_metrics import distinct_n, repetition
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.roles import Role
from rlhf_lightning.randomness import counted_seed
from rlhf_lightning.rewards.base import Reward
from rlhf_lightning.rollout.generate import generate, texts
from rlhf_lightning.rollout.minibatches import slices
from rlhf_lightning.types import Generation, Prompts, Scores

ANSWERERS: tuple[Role, ...] = ("policy", "reference", "rival")
REPEATED = 4  # words of an n-gram whose repetition counts


@dataclass(frozen=True)
class Answers:
    """What one role answered, ``samples`` answers to each prompt side by side, and what they are worth."""

    generation: Generation
    responses: tuple[str, ...]
    scored: Scores

    @property
    def measures(self) -> dict[str, Tensor]:
        """``score`` and each of its parts by name, (B,) each."""
        return {"score": self.scored.scores} | self.scored.parts

    @property
    def ended(self) -> Tensor:
        """1 where the answer came to an end of its own, (B,)."""
        return torch.tensor([float(reason != "length") for reason in self.generation.ended])


@dataclass(frozen=True)
class Evaluation:
    """The outcome: figures for people and for trackers, and every answer."""

    report: dict[str, Any]
    """Everything with its confidence intervals, as evaluation.json has it."""
    metrics: dict[str, float]
    """The same in flat names, eval/..."""
    rows: list[dict[str, Any]]
    """A record for each answer, as evaluation.jsonl has it."""


class Evaluator:
    """Asks the roles of one ActorCritic the same prompts, with the same random numbers each time.

    The draws have a purpose of their own, so that evaluating while PPO trains changes nothing in it. What
    does not change is asked once: the answers of reference and rival are kept.

    Args:
        actor_critic: with a policy and a reference, and where it is to be compared a rival.
        reward: judges texts.
        prompts: held out; of more than ``evaluate.prompts`` the same ones are taken by every run.
        config: the whole validated config.
    """

    def __init__(self, actor_critic: ActorCritic, reward: Reward, prompts: PromptSet, config: Config) -> None:
        self.actor_critic, self.reward, self.config = actor_critic, reward, config
        self.prompts = _ask(prompts, config.evaluate.prompts, samples=config.evaluate.samples)
        self._kept: dict[Role, Answers] = {}

    @torch.no_grad()
    def __call__(self, progress: Callable[[str, int, int], None] | None = None) -> Evaluation:
        """Ask and compare.

        Args:
            progress: called with (role, answers finished, answers).
        """
        was_training = self.actor_critic.training
        self.actor_critic.eval()
        answers: dict[Role, Answers] = {}
        for role in (role for role in ANSWERERS if role in self.actor_critic.roles):
            if role == "policy":
                answers[role] = self._answer(role, progress)
                continue
            if role not in self._kept:
                self._kept[role] = self._answer(role, progress)
            answers[role] = self._kept[role]
        kl = self._kl(answers["policy"].generation)
        self.actor_critic.train(was_training)
        report = self._report(answers, kl)
        return Evaluation(report, _flat(report), self._rows(answers, kl))

    def _answer(self, role: Role, progress: Callable[[str, int, int], None] | None) -> Answers:
        generation = generate(
            self.actor_critic,
            self.prompts,
            self.config.generation,
            seed=counted_seed(self.config.seed, "evaluate"),
            iteration=0,
            role=role,
            progress=None if progress is None else lambda done, total: progress(role, done, total),
        )
        responses = texts(generation, self.actor_critic.backbone.tokenizer)
        return Answers(generation, responses, self.reward(self.prompts.texts, responses))

    def _kl(self, generation: Generation) -> Tensor:
        """Sum over a response's tokens of log pi - log ref (k1), nats, (B,)."""
        kl = torch.zeros(len(generation))
        for rows, piece in slices(generation, self.config.ppo.micro_batch_size):
            logprobs, _ = self.actor_critic.policy(piece)
            each = kl_estimate(logprobs, self.actor_critic.reference(piece), kind="k1").cpu()
            kl[rows] = each.masked_fill(~piece.response_mask.cpu(), 0.0).sum(dim=1)
        return kl

    # ---- figures ----------------------------------------------------------------------------------

    def _report(self, answers: dict[Role, Answers], kl: Tensor) -> dict[str, Any]:
        samples, policy = self.config.evaluate.samples, answers["policy"]
        return {
            "prompts": len(self.prompts.ids) // samples,
            "samples": samples,
            "confidence": self.config.evaluate.confidence,
            "kl": self._mean(kl),
            "answers": {role: self._describe(own) for role, own in answers.items()},
            "win_rates": {
                f"policy over {role}": {
                    name: self._win_rate(ours, other.measures[name]) for name, ours in policy.measures.items()
                }
                for role, other in answers.items()
                if role != "policy"
            },
        }

    def _describe(self, answers: Answers) -> dict[str, Any]:
        words = [response.split() for response in answers.responses]
        lengths = answers.generation.lengths.float()
        return {
            **{name: self._mean(values) for name, values in answers.measures.items()},
            "length": self._mean(lengths),
            "eos_rate": self._mean(answers.ended),
            "distinct_1": distinct_n(words, 1),
            "distinct_2": distinct_n(words, 2),
            "repetition": repetition(words, REPEATED),
        }

    def _mean(self, values: Tensor) -> dict[str, float]:
        low, high = self._interval(values)
        return {"mean": float(values.double().mean()), "low": low, "high": high}

    def _win_rate(self, ours: Tensor, theirs: Tensor) -> dict[str, float]:
        low, high = self._interval(wins(ours, theirs))
        ties = float((ours == theirs).double().mean())
        return {"win_rate": win_rate(ours, theirs), "low": low, "high": high, "ties": ties}

    def _interval(self, values: Tensor) -> tuple[float, float]:
        options = self.config.evaluate
        return bootstrap_interval(
            values.reshape(-1, options.samples),
            seed=counted_seed(self.config.seed, "bootstrap"),
            resamples=options.bootstrap,
            confidence=options.confidence,
        )

    def _rows(self, answers: dict[Role, Answers], kl: Tensor) -> list[dict[str, Any]]:
        samples, rows = self.config.evaluate.samples, []
        for i, prompt in enumerate(self.prompts.texts):
            row: dict[str, Any] = {"prompt": prompt, "sample": i % samples, "kl": float(kl[i])}
            for role, own in answers.items():
                row[role] = {
                    "response": own.responses[i],
                    "score": float(own.scored.scores[i]),
                    "parts": {name: float(values[i]) for name, values in own.scored.parts.items()},
                    "length": int(own.generation.lengths[i]),
                    "ended": own.generation.ended[i],
                }
            rows.append(row)
        return rows


def _ask(prompts: PromptSet, count: int, *, samples: int) -> Prompts:
    """Each prompt once however often it is there; of more than ``count``, a choice by their texts alone."""
    unique = dict(zip(map(tuple, prompts.ids), prompts.texts, strict=True))
    if len(unique) > count:
        chosen = sorted(unique, key=lambda ids: counted_seed(0, "evaluate", unique[ids]))[:count]
        unique = {ids: text for ids, text in unique.items() if ids in set(chosen)}
    asked = [(ids, text) for ids, text in unique.items() for _ in range(samples)]
    return Prompts(
        ids=tuple(ids for ids, _ in asked),
        texts=tuple(text for _, text in asked),
        rows=tuple(range(len(asked))),
    )


def _flat(report: dict[str, Any]) -> dict[str, float]:
    """Names for trackers: the policy's own figures, and what it is compared with under the other's name."""
    policy = report["answers"]["policy"]
    parts = [name for name in report["win_rates"]["policy over reference"] if name != "score"]
    flat = {
        "eval/score_low": policy["score"]["low"],
        "eval/score_high": policy["score"]["high"],
        "eval/kl": report["kl"]["mean"],
        "eval/length_mean": policy["length"]["mean"],
        "eval/eos_rate": policy["eos_rate"]["mean"],
        **{f"eval/{name}": policy[name] for name in ("distinct_1", "distinct_2", "repetition")},
    }
    for role, own in report["answers"].items():
        tail = "" if role == "policy" else f"_{role}"
        flat[f"eval/score{tail}"] = own["score"]["mean"]
        flat |= {f"eval/{part}_score{tail}": own[part]["mean"] for part in parts}
    for against, rates in report["win_rates"].items():
        tail = "" if against == "policy over reference" else "_rival"
        for name, rate in rates.items():
            key = "eval/win_rate" if name == "score" else f"eval/{name}_win_rate"
            flat |= {f"{key}{tail}": rate["win_rate"]}
            flat |= {f"{key}{tail}_{end}": rate[end] for end in ("low", "high")}
    return flat


def held_out_prompts(
    config: Config, tokenizer: Any, *, context: int, trained: Config | None = None
) -> tuple[PromptSet, str | None]:
    """The prompts to measure on.

    Those of ``data.held_out``; else, where the run learned from another file, all of ``data.path``; else the
    share of it that the run kept apart; and where it kept none, those that it learned from.

    Args:
        config: of this run.
        tokenizer: of the policy.
        context: positions of the model.
        trained: settings of the run that is looked at; None: this run trains.

    Returns:
        The prompts, and a warning where they are no held-out ones.

    Raises:
        UserError: see ``load_prompts``.
    """
    data, learned = config.data, trained or config
    load = partial(load_prompts, data, tokenizer, room=context - config.generation.max_new_tokens)
    if data.held_out is not None:
        return load(part="held_out"), None
    if data.path != learned.data.path:
        return load(part="all"), None
    kept = 0.0
    if learned.data.held_out is None:
        kept = share_held_out(
            learned.data.held_out_share,
            stage=learned.stage.name,
            evaluating=learned.evaluate.every > 0,
        )
    share = kept if data.held_out_share is None else data.held_out_share
    prompts = load(part="held_out", share=share) if share else load(part="all")
    if kept and share <= kept:
        return prompts, None
    which = "some of these prompts" if kept else "these prompts"
    return prompts, f"warning: the model learned from {which}: name others in data.held_out"
