"""What the checks share: real experience of the opened module, and its real optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.advantages.reinforce import RunningBaseline
from rlhf_lightning.config.algorithms import ReinforceConfig
from rlhf_lightning.data.datamodule import PromptDataModule
from rlhf_lightning.data.padding import left_pad
from rlhf_lightning.doctor.fingerprint import fingerprint
from rlhf_lightning.doctor.opened import Opened
from rlhf_lightning.functional.moments import RunningMoments
from rlhf_lightning.randomness import counted_seed
from rlhf_lightning.rollout.collect import collect
from rlhf_lightning.rollout.generate import generate, texts
from rlhf_lightning.stages.losses import UpdateStats
from rlhf_lightning.stages.ppo import PPO
from rlhf_lightning.types import Ended, Generation, Prompts, Rollout, Scores

ANSWERS = 16
NEW_TOKENS = 12
CUT: Ended = "length"


@dataclass(frozen=True)
class Update:
    """One optimizer step: gradients by name as they were when the optimizer took them, and its figures."""

    gradients: dict[str, Tensor]
    optimized: frozenset[str]
    stats: UpdateStats


class Exam(Opened):
    """A PPO module opened for examination, with experience to look at.

    A fresh LoRA has B = 0: policy, critic and reference are then one function, and A gets no gradient, so
    that most faults could not be seen. Inside, the B of every trainable adapter carries a little noise.

    Attributes:
        prompts: some of the first batch, shortest first.
        generation: answers of the disturbed policy, sampled by the real loop.
        loop_logprobs: log-probabilities of those tokens as the sampling loop itself computed them, (B, T).
        rollout: the experience made of them, under scores that stand in for the reward's.
        made_up: prompts with random tokens as answers, used before anything was sampled.
        first_gradients: gradients on ``made_up`` before the first rollout, taken twice.
        frozen: fingerprints of all tensors that may never change.
    """

    def __init__(self, module: PPO, data: PromptDataModule) -> None:
        super().__init__(module)
        self.prompts = _some_prompts(data)

    def __enter__(self) -> Exam:
        self.open()
        try:
            self._prepare()
        except BaseException:
            self.restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _prepare(self) -> None:
        self.frozen = fingerprint(self.unchanging())
        self.disturbed = self.disturb()
        self.made_up = self._made_up()
        self.model.eval()
        for layer in self.four_bit():  # one forward in eval mode is what packs such a layer
            layer.train()
        self.first_gradients = (self.gradients(self.made_up), self.gradients(self.made_up))
        self.model.eval()
        self.generation, self.loop_logprobs = self.sample()
        self.rollout = self.collect(self.generation)

    def sample(self, *, greedy: bool = False) -> tuple[Generation, Tensor]:
        """Answers to the prompts, and what the loop itself thought of each token it chose, (B, T)."""
        config = self.config.generation
        config = config.model_copy(update={"max_new_tokens": min(config.max_new_tokens, NEW_TOKENS)})
        heard: list[Tensor] = []

        def hear(logits: Tensor) -> Tensor:
            heard.append(logits.log_softmax(dim=1))
            return logits

        with self.listening(hear), self.model.rolling_out():
            generation = generate(
                self.model, self.prompts, config, seed=self.config.seed, iteration=0, greedy=greedy
            )
        logprobs = torch.zeros(generation.response_ids.shape)
        steps = iter(heard)
        for rows in torch.arange(len(generation)).split(config.batch_size):
            for t in range(int(generation.lengths[rows].max())):
                alive = rows[generation.lengths[rows] > t]
                drawn = generation.response_ids[alive, t : t + 1]
                logprobs[alive, t] = next(steps).cpu().gather(1, drawn).squeeze(1)
        return generation, logprobs

    @contextmanager
    def listening(self, hear: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Pass the sampling loop's logits through ``hear``."""
        own = self.model.__dict__.get("logits")
        original = self.model.logits
        self.model.__dict__["logits"] = lambda hidden: hear(original(hidden))
        try:
            yield
        finally:
            del self.model.__dict__["logits"]
            if own is not None:
                self.model.__dict__["logits"] = own

    def collect(self, generation: Generation) -> Rollout:
        """Experience under stand-in scores, -1 .. 1 in no order: the reward has checks of its own."""
        generator = torch.Generator().manual_seed(counted_seed(self.config.seed, "doctor", "scores"))
        # These answers are to different prompts: without a critic their mean is the baseline, not a group's.
        mean = ReinforceConfig(kind="reinforce", decay=0.0)
        scores = torch.linspace(-1, 1, len(generation))[torch.randperm(len(generation), generator=generator)]
        with self.model.rolling_out():
            return collect(
                self.model,
                generation,
                prompts=self.prompts.texts,
                responses=texts(generation, self.model.backbone.tokenizer),
                scored=Scores(scores, {}),
                config=self.config.ppo,
                advantage=self.config.advantage if self.config.has_critic else mean,
                beta=self.module.beta.beta,
                moments=RunningMoments(),
                baseline=RunningBaseline(),
            )

    def step(self, rollout: Rollout, *, lr: float, **ppo: Any) -> Update:
        """The module's own optimizer step over all rows, with its rate set to ``lr`` and ``ppo`` changed."""
        module = self.module
        optimizer = module.configure_optimizers()
        names = {id(p): name for name, p in module.named_parameters()}
        gradients: dict[str, Tensor] = {}

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            found = ((name, p.grad) for name, p in module.named_parameters())
            gradients.update({name: grad.detach().clone() for name, grad in found if grad is not None})
            for group in optimizer.param_groups:
                group["lr"] = lr

        optimizer.register_step_pre_hook(before)
        module._fabric_optimizers = [optimizer]  # type: ignore[list-item]
        changed = self.config.ppo.model_copy(update={"target_kl": None} | ppo)
        module.config = self.config.model_copy(update={"ppo": changed})
        stats = UpdateStats(steps=1, epochs=1)
        self.update_mode()
        try:
            rows = torch.arange(len(rollout))
            module._step(rollout, rows, self.config.ppo.critic_warmup, self.module.beta.beta, stats)
        finally:
            module.config = self.config
            self.model.eval()
        optimized = frozenset(names[id(p)] for group in optimizer.param_groups for p in group["params"])
        return Update(gradients, optimized, stats)

    def update_mode(self) -> None:
        """The mode that an update runs in."""
        if self.config.model.gradient_checkpointing:
            self.model.train()

    def gradients(self, batch: Generation) -> dict[str, Tensor]:
        """Gradients of the summed log-probabilities and values of ``batch``."""
        model = self.model
        mask = batch.response_mask.to(model.device)
        self.module.zero_grad(set_to_none=True)
        with model.roles.use("policy"):
            _backward(model.policy(batch)[0][mask].sum())
        if model.has_critic:
            with model.roles.use("critic"):
                _backward(model.values(batch)[:, :-1][mask].sum())
        found = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        self.module.zero_grad(set_to_none=True)
        return found

    def _made_up(self) -> Generation:
        rows = min(4, self.config.ppo.micro_batch_size, len(self.prompts.ids))
        chosen = [(i * (len(self.prompts.ids) - 1)) // max(rows - 1, 1) for i in range(rows)]
        ids, mask = left_pad([self.prompts.ids[i] for i in chosen], self.model.backbone.pad_id)
        generator = torch.Generator().manual_seed(counted_seed(self.config.seed, "doctor", "made up"))
        answers = torch.randint(len(self.model.backbone.tokenizer), (rows, 5), generator=generator)
        real = torch.ones_like(answers, dtype=torch.bool)
        return Generation(ids, mask, answers, real, torch.arange(rows), (CUT,) * rows)

    def alone(self, row: int, generation: Generation) -> tuple[Tensor, Tensor]:
        """Ids of one prompt (1, p) and of its answer (1, t) without any padding, on the model's device."""
        prompt = generation.prompt_ids[row, generation.prompt_mask[row]]
        answer = generation.response_ids[row, : generation.lengths[row]]
        return prompt[None].to(self.model.device), answer[None].to(self.model.device)


def rows_of(generation: Generation, rows: Tensor) -> Generation:
    """Some rows of a generation, or of a rollout what was sampled, at the full width."""
    return Generation(
        prompt_ids=generation.prompt_ids[rows],
        prompt_mask=generation.prompt_mask[rows],
        response_ids=generation.response_ids[rows],
        response_mask=generation.response_mask[rows],
        rows=generation.rows[rows],
        ended=tuple(generation.ended[i] for i in rows.tolist()),
    )


def unpadded(prompts: Tensor, answers: Tensor) -> Generation:
    """Prompts (B, P) and answers (B, T) of which every token is real."""
    ended = (CUT,) * len(prompts)
    real = (torch.ones_like(prompts).bool(), torch.ones_like(answers).bool())
    return Generation(prompts, real[0], answers, real[1], torch.arange(len(prompts)), ended)


def _backward(loss: Tensor) -> None:
    if loss.requires_grad:  # else nothing trains, which is a finding and not a crash
        loss.backward()


def _some_prompts(data: PromptDataModule) -> Prompts:
    """``ANSWERS`` prompts spread over the first batch, or over the first batches where one is small."""
    dataset = data.dataset()
    found: list[tuple[tuple[int, ...], str]] = []
    for iteration in range(ANSWERS):
        batch = dataset[iteration]
        found += zip(batch.ids, batch.texts, strict=True)
        if len(found) >= ANSWERS:
            break
    spread = [found[i * len(found) // ANSWERS] for i in range(ANSWERS)]
    spread.sort(key=lambda prompt: len(prompt[0]))
    ids, words = zip(*spread, strict=True)
    return Prompts(ids=tuple(ids), texts=tuple(words), rows=tuple(range(ANSWERS)))
