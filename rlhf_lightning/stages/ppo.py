"""PPO on one backbone: ``training_step`` is one iteration, a rollout and several epochs of clipped updates.

One epoch of Lightning's Trainer is one iteration, so ``trainer.current_epoch`` counts rollouts and
``trainer.global_step`` counts optimizer steps.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.advantages.reinforce import RunningBaseline
from rlhf_lightning.allocator import give_back_freed_memory
from rlhf_lightning.config.schema import Config
from rlhf_lightning.functional.kl import AdaptiveBeta
from rlhf_lightning.functional.moments import RunningMoments
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.rewards.base import Reward
from rlhf_lightning.rollout.collect import collect
from rlhf_lightning.rollout.generate import generate, texts
from rlhf_lightning.rollout.minibatches import micro_batches, minibatch_rows
from rlhf_lightning.stages.base import Stage
from rlhf_lightning.stages.losses import UpdateStats, policy_denominator, policy_terms, value_terms
from rlhf_lightning.stages.report import rollout_metrics
from rlhf_lightning.stages.unfinished import Unfinished
from rlhf_lightning.types import Prompts, Rollout


class PPO(Stage):
    """Proximal policy optimization of a language model (Schulman et al. 2017; Ziegler et al. 2019).

    The same loop runs the methods without a critic: what ``config.advantage`` names decides.

    After each iteration ``metrics`` holds the figures by name and ``rollout`` the experience behind them.

    Args:
        actor_critic: the roles on their backbone.
        reward: judges texts.
        config: the whole validated config.
    """

    def __init__(self, actor_critic: ActorCritic, reward: Reward, config: Config) -> None:
        super().__init__(actor_critic, config)
        self.reward = reward
        self.beta = AdaptiveBeta(config.ppo.beta, target=config.ppo.kl_target, horizon=config.ppo.kl_horizon)
        self.moments = RunningMoments()
        self.baseline = RunningBaseline()
        self.rollout: Rollout | None = None
        self._unfinished: Unfinished | None = None

    @property
    def total_iterations(self) -> int:
        return self.config.ppo.iterations

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One AdamW, a group for ``policy`` and one for ``critic``, each with its own learning rate.

        Without a critic ``policy`` is the only group.
        """
        policy = self.actor_critic.parameters_of("policy")
        taken = {id(p) for p in policy}
        critic = [p for p in self.actor_critic.parameters_of("critic") if id(p) not in taken]
        groups = [{"params": policy, "lr": self.config.ppo.lr, "name": "policy"}]
        if self.actor_critic.has_critic:
            groups.append({"params": critic, "lr": self.config.ppo.critic_lr, "name": "critic"})
        return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)

    # ---- one iteration ----------------------------------------------------------------------------

    def training_step(self, prompts: Prompts) -> None:
        iteration = self.counters["iteration"]
        beta = self.beta.beta
        self.actor_critic.eval()
        if self._unfinished is None:
            with self.actor_critic.rolling_out():
                rollout, clock = self._roll_out(prompts, iteration, beta)
            stats = UpdateStats(steps=self.config.ppo.steps_per_iteration, epochs=self.config.ppo.epochs)
            self._unfinished = Unfinished(rollout, clock, stats)
        rollout, clock, stats = self._unfinished
        updating = time.perf_counter()
        give_back_freed_memory()
        self._update(rollout, iteration, beta, stats)
        give_back_freed_memory()
        clock["time/update_s"] = time.perf_counter() - updating
        self._unfinished = None
        self.rollout = rollout
        self.metrics = rollout_metrics(rollout, beta=beta, critic=self.actor_critic.has_critic)
        self.metrics |= stats.metrics() | clock | {"ppo/beta": beta}
        keys = {"policy": "ppo/lr", "critic": "ppo/critic_lr"}
        self.metrics |= {keys[group["name"]]: group["lr"] for group in self.optimizer().param_groups}
        self.beta.update(self.metrics["objective/kl"], responses=len(rollout))
        self.counters["iteration"] += 1
        self.counters["responses"] += len(rollout)
        self.counters["tokens"] += int(rollout.response_mask.sum())

    def _roll_out(self, prompts: Prompts, iteration: int, beta: float) -> tuple[Rollout, dict[str, float]]:
        start = time.perf_counter()
        generation = generate(
            self.actor_critic,
            prompts,
            self.config.generation,
            seed=self.config.seed,
            iteration=iteration,
            progress=lambda done, total: self.progress("rollout", done, total),
            pause=lambda: self.pause("rollout"),
        )
        sampled = time.perf_counter()
        responses = texts(generation, self.actor_critic.backbone.tokenizer)
        rollout = collect(
            self.actor_critic,
            generation,
            prompts=prompts.texts,
            responses=responses,
            scored=self.reward(prompts.texts, responses),
            config=self.config.ppo,
            advantage=self.config.advantage,
            beta=beta,
            moments=self.moments,
            baseline=self.baseline,
            progress=self._scored,
        )
        return rollout, {"time/rollout_s": sampled - start, "time/score_s": time.perf_counter() - sampled}

    def _scored(self, done: int, total: int) -> None:
        self.pause("score")
        self.progress("score", done, total)

    # ---- the update -------------------------------------------------------------------------------

    def _update(self, rollout: Rollout, iteration: int, beta: float, stats: UpdateStats) -> None:
        """The optimizer steps that ``stats`` has not counted yet."""
        ppo, seed = self.config.ppo, self.config.seed
        if self.config.model.gradient_checkpointing:  # checkpointed layers recompute only in train mode
            self.actor_critic.train()
        epochs = (
            minibatch_rows(len(rollout), ppo.minibatch_size, seed=seed, iteration=iteration, epoch=epoch)
            for epoch in range(ppo.epochs)
        )
        for rows in itertools.islice(itertools.chain.from_iterable(epochs), stats.done, None):
            self.pause("update")
            if not self._step(rollout, rows, iteration, beta, stats):
                break
            self.progress("update", stats.done, stats.steps)
        self.actor_critic.eval()

    def _step(self, rollout: Rollout, rows: Tensor, iteration: int, beta: float, stats: UpdateStats) -> bool:
        """One optimizer step over ``rows``; False, and none taken, where approx_kl is past ``target_kl``."""
        ppo, model = self.config.ppo, self.actor_critic
        optimizer = self.optimizer()
        optimizer.zero_grad()
        critic_only = iteration < ppo.critic_warmup
        mask = rollout.response_mask[rows]
        limit = self.config.generation.max_new_tokens
        divisor = policy_denominator(mask, average=ppo.loss_average, max_new_tokens=limit)
        bonus = ppo.entropy_coef != 0
        common: dict[str, Any] = {"config": ppo, "stats": stats}
        of_policy = {"beta": beta, "denominator": divisor} | common
        of_critic = {"denominator": int(mask.sum())} | common
        for batch in micro_batches(rollout, rows, ppo.micro_batch_size):
            batch = batch.to(model.device)
            if model.shared_critic:
                with model.roles.use("policy"):
                    logprobs, entropy, values = model.policy_and_values(
                        batch, head_only=critic_only, entropy=bonus
                    )
                    loss = value_terms(values, batch, **of_critic)
                    if not critic_only:
                        loss = loss + policy_terms(logprobs, entropy, batch, **of_policy)
                    self.manual_backward(loss)
                del loss, logprobs, entropy, values  # the next forward would run beside this graph
                continue
            if not critic_only:
                with model.roles.use("policy"):
                    self.manual_backward(
                        policy_terms(*model.policy(batch, entropy=bonus), batch, **of_policy)
                    )
            if model.has_critic:
                with model.roles.use("critic"):
                    self.manual_backward(value_terms(model.values(batch), batch, **of_critic))
        moved = 0.0 if stats.step is None else float(stats.step.approx_kl)
        if ppo.target_kl is not None and moved > ppo.target_kl:
            optimizer.zero_grad()
            return False
        self.set_rates(
            {"policy": ppo.lr, "critic": ppo.critic_lr},
            step=iteration * stats.steps + stats.done,
            total=ppo.total_steps,
            warmup=ppo.warmup,
            schedule=ppo.lr_schedule,
        )
        keys = {"policy": "ppo.lr", "critic": "ppo.critic_lr"}
        stats.end_step(self.step(max_grad_norm=ppo.max_grad_norm, keys=keys))
        return True

    # ---- looking at it ----------------------------------------------------------------------------

    def answer(self, prompts: Prompts) -> list[tuple[str, float]]:
        """Answers to prompts and their scores, always with the same random numbers; trains nothing."""
        config = self.config
        with self.actor_critic.rolling_out():
            generation = generate(
                self.actor_critic, prompts, config.generation, seed=config.seed, iteration=-1
            )
        responses = texts(generation, self.actor_critic.backbone.tokenizer)
        return list(zip(responses, self.reward(prompts.texts, responses).scores.tolist(), strict=True))

    # ---- saving -----------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["ppo"] = {
            "beta": self.beta.state_dict(),
            "moments": self.moments.state_dict(),
            "baseline": self.baseline.state_dict(),
            "unfinished": self._unfinished.state_dict() if self._unfinished else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.beta.load_state_dict(checkpoint["ppo"]["beta"])
        self.moments.load_state_dict(checkpoint["ppo"]["moments"])
        if "baseline" in checkpoint["ppo"]:  # not in checkpoints from before there was one
            self.baseline.load_state_dict(checkpoint["ppo"]["baseline"])
        unfinished = checkpoint["ppo"].get("unfinished")
        self._unfinished = Unfinished.from_state(unfinished) if unfinished else None
