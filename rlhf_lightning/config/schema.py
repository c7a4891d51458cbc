"""Every setting of a run: its type, its range, its meaning. The one place that judges a composed config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf_lightning.config.algorithms import (
    AdvantageConfig,
    DPOConfig,
    EvaluateConfig,
    GAEConfig,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
)
from rlhf_lightning.config.guard import GuardConfig
from rlhf_lightning.config.rewards import CombinedRewardConfig, RewardConfig, SingleReward
from rlhf_lightning.config.section import Section

StageName = Literal["sft", "reward", "ppo", "dpo", "evaluate", "pipeline"]


class StageConfig(Section):
    """What to do with the model."""

    name: StageName = Field("ppo", description="the training stage")


class LoRAConfig(Section):
    """Shape of the adapters (Hu et al. 2021)."""

    r: int = Field(16, ge=1, description="rank")
    alpha: float = Field(32.0, gt=0, description="the update is scaled by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1, description="must be 0 for PPO: old and new ratios have to match")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="layers that get an adapter"
    )


class ShapeConfig(Section):
    """Sizes of the model, for ``plan=true`` where no folder with a config.json says them."""

    family: Literal[
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "smollm3", "granite", "gpt2", "gpt_neox"
    ] = Field("llama", description="model_type of its config.json")
    layers: int = Field(ge=1, description="decoder layers")
    hidden: int = Field(ge=1, description="width of the residual stream")
    heads: int = Field(ge=1, description="query heads")
    kv_heads: int = Field(ge=1, description="key and value heads")
    head_dim: int = Field(ge=1, description="width of a head")
    intermediate: int = Field(ge=1, description="width inside the MLP")
    vocab: int = Field(ge=1, description="rows of the embedding")
    tied: bool = Field(description="the head is the embedding")
    positions: int = Field(0, ge=0, description="rows of a learned position embedding")


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
    rollout_weights: Literal["nf4", "dequantized", "packed"] = Field(
        "nf4",
        description="while sampling and scoring, dequantized: hold 4-bit weights in dtype too; packed: hold "
        "any weights in the layout of a CPU's bfloat16 products too; both faster. nf4: as stored",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa",
        description="sdpa: our packed kernels for models of the Llama kind, torch's for the rest; the other "
        "two: the model's own modules",
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    lora: LoRAConfig = Field(LoRAConfig(), description="shape of the adapters")
    critic: Literal["adapter", "shared"] = Field(
        "adapter", description="the critic's own adapter, or the policy's; unused where advantage has none"
    )
    adapter: str | None = Field(None, description="run, or folder or hub id of an adapter, to start from")
    gradient_checkpointing: bool = Field(
        False, description="keep less for the backward pass and compute the rest again"
    )
    shape: ShapeConfig | None = Field(
        None, description="sizes of the model for plan=true; the config.json of a folder wins"
    )


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


class GenerationConfig(Section):
    """How answers are sampled; nothing else is read, a checkpoint's own generation config least of all."""

    max_new_tokens: int = Field(64, ge=1, description="tokens")
    temperature: float = Field(1.0, gt=0, description="logits are divided by it, in every pass that scores")
    top_k: int = Field(0, ge=0, description="0: all tokens")
    top_p: float = Field(1.0, gt=0, le=1, description="1: all tokens")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="texts that end an answer, beside the end tokens"
    )
    ignore_eos: bool = Field(
        False,
        description="end tokens are tokens like any other and end no answer (for equal work in benchmarks)",
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
    plan: bool = Field(False, description="show the memory that the run will take, load nothing")
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
    guard: GuardConfig = Field(GuardConfig(), description="figures of PPO that warn or stop the run")

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
