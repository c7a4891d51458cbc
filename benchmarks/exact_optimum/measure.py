"""One training run on the enumerable task, and what it reached, exactly."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.exact_optimum.exact import Figures, figures, mean_figures, response_logprobs
from benchmarks.exact_optimum.task import PROMPTS, all_responses, judge, make_config, text_of, write_task
from benchmarks.training import train
from rlhf_lightning.run import quiet


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    beta: float
    seed: int
    figures: Figures
    seconds: float
    cpu_seconds: float
    advantage: str = "gae"


def measure(
    beta: float,
    seed: int,
    *,
    advantage: str = "gae",
    overrides: Mapping[str, Any] | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Train from a fresh task and enumerate what came out.

    Args:
        beta: weight of the KL in the reward.
        seed: of the reference's weights, the adapters and the sampling.
        advantage: name of the estimator, for the table; ``overrides`` hold its settings.
        overrides: dotted config keys, see ``make_config``.
        tell: called with (iterations done, all) along the way.
    """
    started, cpu_started = time.perf_counter(), time.process_time()
    quiet()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, seed=seed)
        config = make_config(folder, beta=beta, seed=seed, overrides=overrides)
        stage = train(config, folder, lambda ppo: tell(ppo.counters["iteration"], config.ppo.iterations))
        stage.save_adapters(folder / "adapters")
        exact = examine(folder / "model", folder / "adapters" / "policy", beta=beta)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Result(beta, seed, exact, seconds, cpu_seconds, advantage)


@torch.no_grad()
def examine(model: Path, adapter: Path, *, beta: float) -> Figures:
    """Exact figures of a saved policy, averaged over the prompts.

    Nothing of the trainer takes part: Transformers and PEFT load both models from disk, in float64.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    policy = PeftModel.from_pretrained(base, str(adapter)).double().eval()
    responses = all_responses()
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids
        logprobs, ref_logprobs = (response_logprobs(m, ids, responses) for m in (policy, reference))
        for name, total in (("policy", logprobs.exp().sum()), ("reference", ref_logprobs.exp().sum())):
            if abs(float(total) - 1.0) > 1e-9:
                raise ArithmeticError(f"the {name}'s probabilities sum to {float(total)} over all responses")
        rewards = torch.tensor([judge(prompt, text_of(y)) for y in responses], dtype=torch.float64)
        found.append(figures(logprobs, ref_logprobs=ref_logprobs, rewards=rewards, beta=beta))
    return mean_figures(found)
