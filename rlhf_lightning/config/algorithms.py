"""Settings of the training algorithms: PPO and its estimators, training on fixed examples, evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf_lightning.config.section import Section

LossAverage = Literal["token", "response", "constant"]


class PPOConfig(Section):
    """One iteration of PPO: rollout, scoring, `epochs` passes of clipped updates."""

    iterations: int = Field(100, ge=1, description="rollouts in the whole run")
    prompts_per_iteration: int = Field(64, ge=1, description="prompts of one rollout, over all ranks")
    samples_per_prompt: int = Field(1, ge=1, description="answers sampled for each prompt")
    epochs: int = Field(4, ge=1, description="passes over each rollout")
    minibatch_size: int = Field(32, ge=1, description="answers in one optimizer step, over all ranks")
    micro_batch_size: int = Field(
        8, ge=1, description="answers in one forward pass, per rank; changes memory only"
    )
    clip: float = Field(0.2, gt=0, lt=1, description="epsilon: the ratio is clipped to 1 - clip .. 1 + clip")
    clip_high: float | None = Field(None, gt=0, description="upper epsilon where it differs from clip")
    dual_clip: float | None = Field(
        None, gt=1, description="bound of the ratio times a negative advantage, c > 1"
    )
    ratio: Literal["token", "sequence"] = Field(
        "token", description="each token's own ratio, or its response's geometric mean (GSPO; clip far lower)"
    )
    loss_average: LossAverage = Field(
        "token",
        description="the policy's loss: mean over tokens, over each response and then over responses (GRPO), "
        "or sum over responses times max_new_tokens (Dr. GRPO)",
    )
    beta: float = Field(0.05, ge=0, description="weight of the KL to the reference, per nat")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="estimator of the KL, per token")
    kl_in: Literal["reward", "loss"] = Field("reward", description="where the KL acts")
    kl_target: float | None = Field(
        None, gt=0, description="nats a response; set: beta follows an adaptive controller"
    )
    kl_horizon: int = Field(10_000, ge=1, description="responses over which the controller acts")
    target_kl: float | None = Field(
        None, gt=0, description="approx_kl, nats a token, that ends the epochs early"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount a token (gae and reinforce_plus_plus)")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of GAE")
    whiten_advantages: bool = Field(
        True,
        description="mean 0 and deviation 1 over the iteration's valid tokens; of gae alone, for the others "
        "bring their own scale",
    )
    vf_coef: float = Field(0.1, ge=0, description="weight of the value loss")
    clip_value: float | None = Field(0.2, gt=0, description="values move at most this far from the rollout's")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    lr: float = Field(1e-5, ge=0, description="peak learning rate of the policy")
    critic_lr: float = Field(1e-4, ge=0, description="peak learning rate of the critic")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")
    warmup: int = Field(
        0, ge=0, description="optimizer steps of linear warm-up; the critic's head start counts too"
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    critic_warmup: int = Field(0, ge=0, description="first iterations in which only the critic learns")
    missing_eos_penalty: float | None = Field(None, ge=0, description="taken off the score of a cut answer")
    normalize_scores: bool = Field(
        False, description="scores are centred and scaled by their running moments"
    )
    clip_scores: float | None = Field(
        None, gt=0, description="scores are cut to -c .. c, after normalisation"
    )
    bootstrap_truncated: bool = Field(False, description="a cut answer's last value is the critic's, not 0")

    @property
    def responses(self) -> int:
        """Answers in one iteration, over all ranks."""
        return self.prompts_per_iteration * self.samples_per_prompt

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps that one rollout feeds when no epoch is ended early."""
        return self.epochs * (self.responses // self.minibatch_size)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run: the horizon of every learning-rate schedule."""
        return self.iterations * self.steps_per_iteration


class TrainingConfig(Section):
    """Training on fixed examples: what stages without a rollout share."""

    epochs: int = Field(
        1, ge=1, description="passes over the examples; the last step is filled from a new pass"
    )
    max_steps: int | None = Field(None, ge=1, description="stop after so many optimizer steps")
    batch_size: int = Field(32, ge=1, description="examples in one optimizer step, over all ranks")
    micro_batch_size: int = Field(
        8, ge=1, description="examples in one forward pass, per rank; changes memory only"
    )
    lr: float = Field(1e-4, ge=0, description="peak learning rate")
    warmup: int = Field(10, ge=0, description="optimizer steps of linear warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="after the warm-up")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay (AdamW)")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")
    max_length: int = Field(
        512, ge=2, description="tokens of prompt and answer; the prompt loses its beginning"
    )
    log_every: int = Field(10, ge=1, description="optimizer steps of one iteration: one row of metrics.csv")
    eval_every: int = Field(
        1, ge=1, description="iterations between two looks at the held-out rows; the last is always taken"
    )


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning: the answer's tokens are learned, the prompt's are not."""

    packing: bool = Field(True, description="several examples in one row, none of which sees another")


class RewardModelConfig(TrainingConfig):
    """Training of a reward model on preference pairs (Bradley and Terry 1952)."""

    head_lr: float = Field(1e-3, ge=0, description="peak learning rate of the score head")


class DPOConfig(TrainingConfig):
    """Direct preference optimisation (Rafailov et al. 2023)."""

    beta: float = Field(0.1, gt=0, description="inverse temperature of the implicit reward")
    loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid", description="DPO's own loss, or IPO's on averages over tokens (Azar et al. 2023)"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of pairs that are taken to be labelled the wrong way round"
    )


class EvaluateConfig(Section):
    """Answers to held-out prompts, judged and compared with the reference's."""

    every: int = Field(
        0, ge=0, description="iterations of PPO between two evaluations; 0: none while it trains"
    )
    prompts: int = Field(64, ge=1, description="held-out prompts; all where there are fewer")
    samples: int = Field(1, ge=1, description="answers to each prompt")
    against: str | None = Field(None, description="another run to compare with, beside the reference")
    bootstrap: int = Field(2000, ge=100, description="resamples behind each confidence interval")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="level of the confidence intervals")
    show: int = Field(5, ge=0, description="prompts shown side by side in the terminal")


class GAEConfig(Section):
    """Generalised advantage estimation on a learned critic (Schulman et al. 2015); its numbers are ppo's."""

    kind: Literal["gae"] = Field(description="a critic, and GAE on its values")


class ReinforceConfig(Section):
    """REINFORCE with a running mean of earlier scores as its baseline (Williams 1992)."""

    kind: Literal["reinforce"] = Field(description="the score minus a running mean")
    decay: float = Field(0.9, ge=0, lt=1, description="share of the old baseline kept at each iteration")


class ReinforcePlusPlusConfig(Section):
    """REINFORCE++: per-token KL, returns to go, whitened over the whole batch (Hu 2025)."""

    kind: Literal["reinforce_plus_plus"] = Field(description="returns to go, whitened over the batch")


class RLOOConfig(Section):
    """REINFORCE with the other answers to the prompt as the baseline (Ahmadian et al. 2024)."""

    kind: Literal["rloo"] = Field(description="the score minus the mean of the prompt's other answers")


class GRPOConfig(Section):
    """Scores relative to the answers to the same prompt (Shao et al. 2024; unscaled: Liu et al. 2025)."""

    kind: Literal["grpo"] = Field(description="the score within its prompt's group")
    scale: bool = Field(True, description="divide by the group's deviation; false: Dr. GRPO")


AdvantageConfig = Annotated[
    GAEConfig | ReinforceConfig | ReinforcePlusPlusConfig | RLOOConfig | GRPOConfig,
    Field(discriminator="kind"),
]
