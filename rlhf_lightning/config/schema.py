"""Every setting of a run: its type, its range, its meaning. The one place that judges a composed config.

Only pydantic is imported here, so that a wrong command is answered before torch is loaded.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A part of the config: unknown keys are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_silent_conversion(cls, values: Any) -> Any:
        """``true`` is no number, although Python counts it as 1; a bare integer will do for a text."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name, value in values.items():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            kinds = {annotation, *get_args(annotation)}
            if (isinstance(value, bool) and kinds & {int, float}) or (type(value) is int and str in kinds):
                values[name] = str(value)  # "True" is refused where a number is wanted
        return values


LossAverage = Literal["token", "response", "constant"]
StageName = Literal["sft", "reward", "ppo", "dpo", "evaluate", "pipeline"]


class StageConfig(Section):
    """What to do with the model."""

    name: StageName = Field("ppo", description="the training stage")


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


class LoRAConfig(Section):
    """Shape of the adapters (Hu et al. 2021)."""

    r: int = Field(16, ge=1, description="rank")
    alpha: float = Field(32.0, gt=0, description="the update is scaled by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1, description="must be 0 for PPO: old and new ratios have to match")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="layers that get an adapter"
    )


class ModelConfig(Section):
    """The backbone and what sits on it."""

    name: str = Field("tiny", description="a label for logs")
    path: str = Field(
        "tiny", description="folder or hub id of a causal language model; tiny: the embedded one"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    quantization: Literal["nf4", "none"] = Field("nf4", description="storage of the frozen weights")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="dtype of the arithmetic"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="attention kernel")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    lora: LoRAConfig = Field(LoRAConfig(), description="shape of the adapters")
    critic: Literal["adapter", "shared"] = Field(
        "adapter", description="the critic's own adapter, or the policy's; unused where advantage has none"
    )
    adapter: str | None = Field(None, description="run, or folder or hub id of an adapter, to start from")
    gradient_checkpointing: bool = Field(False, description="trade time for memory in the update")


class DataConfig(Section):
    """Where prompts come from."""

    path: str = Field("tiny", description="file, folder or hub id of prompts; tiny: the embedded ones")
    format: Literal["auto", "jsonl", "csv", "parquet", "text", "hf", "hh"] = Field(
        "auto", description="auto: by the file's ending"
    )
    split: str = Field("train", description="split of a Hugging Face dataset")
    prompt_field: str = Field("prompt", description="column that holds the prompt")
    completion_field: str = Field(
        "completion", description="column that holds the answer to learn (stage=sft)"
    )
    chosen_field: str = Field("chosen", description="column that holds the better answer of a pair")
    rejected_field: str = Field("rejected", description="column that holds the worse answer of a pair")
    margin_field: str | None = Field(
        None, description="column with how much better the chosen answer is (stage=reward)"
    )
    drop_bad: bool = Field(False, description="leave out rows that teach nothing instead of stopping")
    held_out: str | None = Field(None, description="file, folder or hub id of rows that are only measured on")
    held_out_share: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of the prompts kept for measuring where held_out is empty; "
        "empty: 0.1, and 0 for stage=ppo without evaluate.every",
    )
    chat_template: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: conversations take the template, plain strings do not"
    )
    system_prompt: str | None = Field(None, description="first message of each conversation")
    first_words: int | None = Field(
        None, ge=1, description="only the first words of each line are the prompt"
    )
    max_prompt_length: int = Field(512, ge=1, description="tokens")
    overlong: Literal["truncate", "drop", "error"] = Field(
        "truncate", description="a prompt that is too long: keep its end, leave it out, or stop"
    )
    limit: int | None = Field(None, ge=1, description="use the first so many prompts")
    shuffle: bool = Field(True, description="a new order each pass, drawn from the seed")


class LearnedRewardConfig(Section):
    """A reward adapter and score head on the policy's own backbone."""

    kind: Literal["learned"] = Field(description="a reward adapter on the policy's backbone")
    path: str = Field(
        "tiny", description="folder of a reward adapter with its score head; tiny: the embedded one"
    )
    batch_size: int = Field(32, ge=1, description="answers in one forward pass")


class ClassifierRewardConfig(Section):
    """A separate frozen sequence classifier with its own tokenizer, fed text."""

    kind: Literal["classifier"] = Field(description="a separate sequence classifier")
    path: str = Field(description="folder or hub id of a sequence classifier")
    label: int = Field(-1, description="which logit is the score; a single logit is taken as it is")
    probability: bool = Field(False, description="softmax or sigmoid of the logits instead of the logit")
    response_only: bool = Field(False, description="judge the answer alone, without its prompt")
    max_length: int = Field(512, ge=1, description="tokens; the end is kept")
    batch_size: int = Field(32, ge=1, description="answers in one forward pass")


class FunctionRewardConfig(Section):
    """A Python function: lists of prompts and responses in, one float for each out."""

    kind: Literal["function"] = Field(description="a Python function")
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$", description="package.module:name")
    timeout_s: float = Field(60.0, gt=0, description="seconds for one batch before the run stops")


class LengthRewardConfig(Section):
    """Minus the distance of the answer's length from a target, as a share of the target."""

    kind: Literal["length"] = Field(description="closeness to a number of words")
    target: int = Field(ge=1, description="words")


class HTTPRewardConfig(Section):
    """A server that scores: prompts and responses out as JSON, scores back; see docs/remote_rewards.md."""

    kind: Literal["http"] = Field(description="a server that scores")
    url: str = Field(pattern=r"^https?://\S+$", description="http://HOST:PORT/PATH, where batches are posted")
    batch_size: int = Field(64, ge=1, description="answers in one request")
    timeout_s: float = Field(60.0, gt=0, description="seconds for one request")
    retries: int = Field(4, ge=0, description="further tries after a failure that may pass")
    backoff_s: float = Field(
        1.0, ge=0, description="seconds before the first of them, doubled at each up to a minute"
    )

    @property
    def url_fault(self) -> str | None:
        """What is wrong with the address, in words that do not repeat it; None: nothing."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as e:
            return f"is no address ({e})"
        if "@" in parts.netloc:
            return (
                "must not hold user:password, since the run folder keeps every setting in plain text: "
                "leave the login out, and give a token in the environment, RLHF_REWARD_TOKEN"
            )
        return None if parts.hostname and port != 0 else "names no host"


class RegexRewardConfig(Section):
    """1 where the pattern is found in the answer, 0 elsewhere."""

    kind: Literal["regex"] = Field(description="whether a pattern is found")
    pattern: str = Field(min_length=1, description="Python regular expression")
    full: bool = Field(False, description="the whole answer must match")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as e:
            raise ValueError(f"a Python regular expression ({e})") from None
        return pattern


SingleReward = Annotated[
    LearnedRewardConfig
    | ClassifierRewardConfig
    | FunctionRewardConfig
    | LengthRewardConfig
    | RegexRewardConfig
    | HTTPRewardConfig,
    Field(discriminator="kind"),
]


class RewardPart(Section):
    """One term of a combined reward."""

    weight: float = Field(1.0, description="factor of this term")
    reward: SingleReward = Field(description="any reward but a combined one")


class CombinedRewardConfig(Section):
    """A weighted sum of rewards, each logged by its name."""

    kind: Literal["combined"] = Field(description="a weighted sum of rewards")
    parts: dict[str, RewardPart] = Field(min_length=1, description="name -> weight and reward")


RewardConfig = Annotated[
    LearnedRewardConfig
    | ClassifierRewardConfig
    | FunctionRewardConfig
    | LengthRewardConfig
    | RegexRewardConfig
    | HTTPRewardConfig
    | CombinedRewardConfig,
    Field(discriminator="kind"),
]


class GenerationConfig(Section):
    """How answers are sampled; nothing else is read, a checkpoint's own generation config least of all."""

    max_new_tokens: int = Field(64, ge=1, description="tokens")
    temperature: float = Field(1.0, gt=0, description="logits are divided by it, in every pass that scores")
    top_k: int = Field(0, ge=0, description="0: all tokens")
    top_p: float = Field(1.0, gt=0, le=1, description="1: all tokens")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="texts that end an answer, beside the end tokens"
    )
    batch_size: int = Field(64, ge=1, description="answers sampled side by side")


class TrainerConfig(Section):
    """Where it runs: handed to Lightning's Trainer."""

    accelerator: Literal["auto", "cpu", "gpu", "mps"] = Field("auto", description="kind of device")
    devices: int = Field(1, ge=1, description="processes on this machine")
    threads: int | None = Field(None, ge=1, description="CPU threads; empty: torch's own choice")


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["offline", "online", "disabled"] = Field(
        "offline", description="WANDB_MODE wins where it is set"
    )
    project: str = Field("rlhf_lightning", min_length=1, description="project")
    entity: str | None = Field(None, description="team or user")
    name: str | None = Field(None, description="name of the run")
    tags: list[str] = Field(default_factory=list, description="tags")


class LoggerConfig(Section):
    """Trackers; metrics.csv and samples.jsonl are always written."""

    wandb: WandbConfig | None = Field(None, description="empty: off")
    tensorboard: bool = Field(False, description="also write TensorBoard events")


class CallbacksConfig(Section):
    """What is kept and shown along the way."""

    samples: int = Field(8, ge=0, description="answers of each iteration kept in samples.jsonl; 0: all")
    sample_table_every: int = Field(10, ge=1, description="iterations between sample tables in the tracker")
    checkpoint_every: int = Field(
        10, ge=1, description="iterations between checkpoints; the last is always kept"
    )
    progress: bool = Field(True, description="live progress bar")
    show: int = Field(3, ge=0, description="prompts shown at the end with the answer before and after")


class Config(Section):
    """One run."""

    seed: int = Field(0, ge=0, lt=2**32, description="all randomness is counted from it")
    doctor: bool = Field(False, description="load everything, prove the set-up, train nothing")
    resume: str | None = Field(None, description="run folder to continue")
    run: str | None = Field(None, description="finished run to look at (stage=evaluate)")
    objective: str | None = Field(
        None, description="the metric that a sweep reads and best.ckpt is chosen by; -NAME: less is better"
    )
    stage: StageConfig = Field(StageConfig(), description="what to do with the model")
    ppo: PPOConfig = Field(PPOConfig(), description="the algorithm")
    advantage: AdvantageConfig = Field(
        GAEConfig(kind="gae"), description="from scores to advantages; all but gae do without a critic"
    )
    sft: SFTConfig = Field(SFTConfig(), description="supervised fine-tuning")
    reward_model: RewardModelConfig = Field(RewardModelConfig(), description="training of a reward model")
    dpo: DPOConfig = Field(DPOConfig(), description="direct preference optimisation")
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="answers to held-out prompts, compared")
    model: ModelConfig = Field(ModelConfig(), description="the backbone and its adapters")
    data: DataConfig = Field(DataConfig(), description="where prompts come from")
    reward: RewardConfig = Field(description="what makes an answer good")
    generation: GenerationConfig = Field(GenerationConfig(), description="how answers are sampled")
    trainer: TrainerConfig = Field(TrainerConfig(), description="where it runs")
    logger: LoggerConfig = Field(LoggerConfig(), description="trackers beside metrics.csv")
    callbacks: CallbacksConfig = Field(CallbacksConfig(), description="what is kept and shown along the way")

    @property
    def target(self) -> tuple[str, int]:
        """Name of the metric that tells a good model from a bad one, and 1 where more is better, else -1."""
        name = self.objective or self._default_objective
        return (name[1:], -1) if name.startswith("-") else (name, 1)

    @property
    def _default_objective(self) -> str:
        match self.stage.name:
            case "sft":
                return "-eval/perplexity"
            case "reward" | "dpo":
                return "eval/accuracy"
            case "evaluate" | "pipeline":
                return "eval/win_rate"
            case _:
                return "eval/score" if self.evaluate.every else "objective/score"

    @property
    def has_critic(self) -> bool:
        """Whether the advantages come from a critic's values."""
        return self.advantage.kind == "gae"

    @property
    def single_rewards(self) -> dict[str, SingleReward]:
        """Dotted key -> reward: the reward itself, or each part of a combined one."""
        if isinstance(self.reward, CombinedRewardConfig):
            return {f"reward.parts.{name}.reward": part.reward for name, part in self.reward.parts.items()}
        return {"reward": self.reward}
