"""What must hold between settings, each rule one small function; single ranges are the schema's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlhf_lightning.config.algorithms import TrainingConfig
from rlhf_lightning.config.describe import nearest, show
from rlhf_lightning.config.locate import locate, named_paths, refuse_another_shape
from rlhf_lightning.config.rewards import HTTPRewardConfig, LearnedRewardConfig
from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError

ROLLING = ("ppo", "pipeline")  # stages with a rollout
METRIC_FAMILIES = (
    "objective",
    "policy",
    "critic",
    "rollout",
    "ppo",
    "sft",
    "reward_model",
    "dpo",
    "eval",
    "reward",
    "time",
    "throughput",
    "memory",
)


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a config: the keys that it is about, and the sentence for the user."""

    keys: tuple[str, ...]
    text: str


def sizes_divide(c: Config) -> Iterator[Fault]:
    """No answer is dropped and no minibatch is short: sizes divide exactly."""
    p = c.ppo
    if c.stage.name not in ROLLING:
        return
    if p.responses % p.minibatch_size:
        made = f"ppo.prompts_per_iteration={p.prompts_per_iteration} times "
        made += f"ppo.samples_per_prompt={p.samples_per_prompt} gives {p.responses} answers"
        yield Fault(
            ("ppo.minibatch_size", "ppo.prompts_per_iteration", "ppo.samples_per_prompt"),
            f"ppo.minibatch_size={p.minibatch_size} must divide the answers of one iteration exactly: {made}",
        )
    if p.minibatch_size % p.micro_batch_size:
        yield Fault(
            ("ppo.micro_batch_size", "ppo.minibatch_size"),
            f"ppo.micro_batch_size={p.micro_batch_size} must divide "
            f"ppo.minibatch_size={p.minibatch_size} exactly",
        )


def a_copy_of_quantised_weights(c: Config) -> Iterator[Fault]:
    if c.model.rollout_weights == "dequantized" and c.model.quantization == "none":
        yield Fault(
            ("model.rollout_weights", "model.quantization"),
            "model.rollout_weights=dequantized copies 4-bit weights, and with model.quantization=none there "
            "are none: leave it at nf4, or take packed on a CPU",
        )


def packed_weights(c: Config) -> Iterator[Fault]:
    if c.model.rollout_weights == "packed" and c.model.dtype != "bfloat16":
        yield Fault(
            ("model.rollout_weights", "model.dtype"),
            f"model.rollout_weights=packed is for products in bfloat16, not model.dtype={c.model.dtype}",
        )
    if c.model.rollout_weights == "packed" and c.trainer.accelerator in ("gpu", "mps"):
        yield Fault(
            ("model.rollout_weights", "trainer.accelerator"),
            "model.rollout_weights=packed is a CPU's layout, and trainer.accelerator="
            f"{c.trainer.accelerator} is none: take dequantized",
        )


def doctor_needs_ppo(c: Config) -> Iterator[Fault]:
    if c.doctor and c.stage.name != "ppo":
        yield Fault(("doctor", "stage.name"), f"doctor=true examines stage=ppo, not stage={c.stage.name}")


def plan_of_one_stage(c: Config) -> Iterator[Fault]:
    if c.plan and c.stage.name in ("evaluate", "pipeline"):
        yield Fault(
            ("plan", "stage.name"),
            f"plan=true counts the memory of training, not of stage={c.stage.name}: "
            "take stage=ppo, sft, reward or dpo",
        )
    if c.plan and c.doctor:
        yield Fault(("plan", "doctor"), "plan=true loads nothing, doctor=true everything: take one of them")


def evaluation_has_a_run(c: Config) -> Iterator[Fault]:
    """What is compared goes with the stage that compares."""
    evaluates = c.stage.name == "evaluate"
    if evaluates and c.run is None:
        yield Fault(("run",), "stage=evaluate needs a run to look at: give run=FOLDER")
    if c.run is not None and not evaluates:
        yield Fault(
            ("run", "stage.name"), f"run={c.run} is for stage=evaluate: add it, or take resume= to go on"
        )
    if c.evaluate.against is not None and c.stage.name not in ("evaluate", "pipeline"):
        yield Fault(
            ("evaluate.against", "stage.name"),
            f"evaluate.against={c.evaluate.against} is for stage=evaluate: stage={c.stage.name} compares "
            "with the reference alone",
        )


def micro_batches(c: Config) -> Iterator[Fault]:
    stages: dict[str, TrainingConfig] = {"sft": c.sft, "reward": c.reward_model, "dpo": c.dpo}
    sections = {"sft": "sft", "reward": "reward_model", "dpo": "dpo"}
    for stage, options in stages.items():
        name = sections[stage]
        if c.stage.name in (stage, "pipeline") and options.batch_size % options.micro_batch_size:
            yield Fault(
                (f"{name}.micro_batch_size", f"{name}.batch_size"),
                f"{name}.micro_batch_size={options.micro_batch_size} must divide "
                f"{name}.batch_size={options.batch_size} exactly",
            )


def smoothing(c: Config) -> Iterator[Fault]:
    if c.dpo.loss == "ipo" and c.dpo.label_smoothing:
        yield Fault(
            ("dpo.label_smoothing", "dpo.loss"),
            f"dpo.label_smoothing={c.dpo.label_smoothing} has no meaning with dpo.loss=ipo: take 0",
        )


def no_dropout(c: Config) -> Iterator[Fault]:
    """Dropout in the update makes the ratio differ from 1 before the first step."""
    if c.stage.name in ROLLING and c.model.lora.dropout > 0:
        yield Fault(
            ("model.lora.dropout",),
            f"model.lora.dropout must be 0 for stage=ppo, not {c.model.lora.dropout}: "
            "rollout and update have to see the same policy",
        )


def whole_distribution(c: Config) -> Iterator[Fault]:
    """Tokens drawn from a cut distribution and scored by the full one give a wrong ratio and a false KL."""
    if c.stage.name not in ROLLING:
        return
    reason = "the update scores every token, so sampling may not leave any out"
    if c.generation.top_k != 0:
        yield Fault(("generation.top_k",), f"generation.top_k must be 0, not {c.generation.top_k}: {reason}")
    if c.generation.top_p != 1:
        yield Fault(("generation.top_p",), f"generation.top_p must be 1, not {c.generation.top_p}: {reason}")


def endings_count(c: Config) -> Iterator[Fault]:
    """What asks whether an answer ended by itself needs end tokens that end it."""
    if not c.generation.ignore_eos or c.stage.name not in ROLLING:
        return
    cut = "with generation.ignore_eos=true no answer ends by its end token"
    if (penalty := c.ppo.missing_eos_penalty) is not None and not c.generation.stop:
        yield Fault(
            ("ppo.missing_eos_penalty", "generation.ignore_eos"),
            f"ppo.missing_eos_penalty={penalty} would be taken off every score: {cut}",
        )
    if c.doctor:
        yield Fault(("doctor", "generation.ignore_eos"), f"doctor=true examines how answers end, but {cut}")


def one_device(c: Config) -> Iterator[Fault]:
    if c.trainer.devices != 1:
        yield Fault(
            ("trainer.devices",),
            f"trainer.devices must be 1, not {c.trainer.devices}: "
            "training on several devices is not supported yet",
        )


def clips(c: Config) -> Iterator[Fault]:
    p = c.ppo
    upper = p.clip if p.clip_high is None else p.clip_high
    if upper < p.clip:
        yield Fault(
            ("ppo.clip_high", "ppo.clip"),
            f"ppo.clip_high={p.clip_high} must be at least ppo.clip={p.clip}, "
            "or null for the same on both sides",
        )
    if p.dual_clip is not None and p.dual_clip <= 1 + upper:
        yield Fault(
            ("ppo.dual_clip", "ppo.clip", "ppo.clip_high"),
            f"ppo.dual_clip={p.dual_clip} must be above 1 + the upper clip = {1 + upper:g}: "
            "it bounds ratios that the clip lets through",
        )


def controller(c: Config) -> Iterator[Fault]:
    if c.ppo.kl_target is not None and c.ppo.beta == 0:
        yield Fault(
            ("ppo.kl_target", "ppo.beta"),
            f"ppo.kl_target={c.ppo.kl_target} needs ppo.beta above 0: "
            "the controller multiplies beta, and 0 stays 0",
        )


def leash(c: Config) -> Iterator[Fault]:
    """As a loss k1 pulls nowhere: its gradient is that of log pi, whose mean over pi's own samples is 0."""
    if c.ppo.kl_in == "loss" and c.ppo.kl_estimator == "k1":
        yield Fault(
            ("ppo.kl_in", "ppo.kl_estimator"),
            "ppo.kl_in=loss does not go with ppo.kl_estimator=k1: the gradient of k1 averages to 0 "
            "whatever the reference; take ppo.kl_estimator=k2 or k3",
        )


def schedule(c: Config) -> Iterator[Fault]:
    """Schedules are counted in optimizer steps, the critic's head start in iterations."""
    p = c.ppo
    if p.responses % p.minibatch_size == 0 and p.warmup > p.total_steps:
        yield Fault(
            ("ppo.warmup", "ppo.iterations", "ppo.epochs", "ppo.minibatch_size"),
            f"ppo.warmup={p.warmup} must be at most the {p.total_steps} optimizer steps of the run "
            f"({p.iterations} iterations of {p.steps_per_iteration})",
        )
    if p.critic_warmup >= p.iterations:
        yield Fault(
            ("ppo.critic_warmup", "ppo.iterations"),
            f"ppo.critic_warmup={p.critic_warmup} must be below ppo.iterations={p.iterations}: "
            "the policy would never learn",
        )


def groups_have_others(c: Config) -> Iterator[Fault]:
    """A prompt's other answers are the baseline: there have to be some."""
    kind, samples = c.advantage.kind, c.ppo.samples_per_prompt
    if c.stage.name in ROLLING and kind in ("rloo", "grpo") and samples < 2:
        yield Fault(
            ("advantage.kind", "ppo.samples_per_prompt"),
            f"advantage.kind={kind} needs ppo.samples_per_prompt of at least 2, not {samples}: "
            "it compares the answers to one prompt with each other",
        )


def critic_is_there(c: Config) -> Iterator[Fault]:
    """What asks a critic to act cannot do without one."""
    if c.stage.name not in ROLLING or c.has_critic:
        return
    for name in ("critic_warmup", "bootstrap_truncated"):
        if value := getattr(c.ppo, name):
            yield Fault(
                (f"ppo.{name}", "advantage.kind"),
                f"ppo.{name}={show(value)} needs a critic, and advantage.kind={c.advantage.kind} has none: "
                "take advantage=gae",
            )


def arithmetic(c: Config) -> Iterator[Fault]:
    m, device = c.model, c.trainer.accelerator
    if m.dtype == "float16" and device == "cpu":
        yield Fault(
            ("model.dtype", "trainer.accelerator"),
            "model.dtype=float16 does not go with trainer.accelerator=cpu: take float32 or bfloat16",
        )
    if m.attention == "flash_attention_2" and (device == "cpu" or m.dtype == "float32"):
        yield Fault(
            ("model.attention", "model.dtype", "trainer.accelerator"),
            "model.attention=flash_attention_2 needs a GPU and model.dtype=bfloat16 or float16, "
            f"not model.dtype={m.dtype} with trainer.accelerator={device}: take sdpa",
        )


def reward_fits_model(c: Config) -> Iterator[Fault]:
    """The embedded reward adapter was trained on the embedded backbone and fits no other."""
    for key, reward in c.single_rewards.items():
        if isinstance(reward, LearnedRewardConfig) and reward.path == "tiny" and c.model.path != "tiny":
            yield Fault(
                (f"{key}.path", "model.path"),
                f"{key}.path=tiny fits only model=tiny, not model.path={show(c.model.path)}; choose "
                "reward=function reward.function=package.module:name, reward=classifier reward.path=FOLDER, "
                f"reward=length, reward=regex, or {key}.path=FOLDER of an adapter trained on this model",
            )


def reward_address(c: Config) -> Iterator[Fault]:
    for key, reward in c.single_rewards.items():
        if isinstance(reward, HTTPRewardConfig) and reward.url_fault is not None:
            yield Fault((f"{key}.url",), f"{key}.url {reward.url_fault}")


def paths_hold_what_is_wanted(c: Config) -> Iterator[Fault]:
    """Runs, adapters and models are looked at before anything heavy is loaded."""
    for key, path, want in named_paths(c):
        try:
            found = locate(path, key=key, want=want)
            if want != "model":
                refuse_another_shape(found, c.model.path, at=f"{key}={path}")
        except UserError as error:
            yield Fault((key,), str(error))


def sweep_objective(c: Config) -> Iterator[Fault]:
    family, slash, name = c.target[0].partition("/")
    if family not in METRIC_FAMILIES or not slash or not name:
        close = nearest(family, METRIC_FAMILIES)
        hint = f"; did you mean {close}/{name or '...'}?" if close else f" ({', '.join(METRIC_FAMILIES)})"
        yield Fault(
            ("objective",), f"objective must name a metric as family/name, not {show(c.objective)}{hint}"
        )


RULES: tuple[Callable[[Config], Iterator[Fault]], ...] = (
    sizes_divide,
    a_copy_of_quantised_weights,
    packed_weights,
    doctor_needs_ppo,
    plan_of_one_stage,
    evaluation_has_a_run,
    micro_batches,
    smoothing,
    no_dropout,
    whole_distribution,
    endings_count,
    one_device,
    clips,
    controller,
    leash,
    schedule,
    groups_have_others,
    critic_is_there,
    arithmetic,
    reward_fits_model,
    reward_address,
    paths_hold_what_is_wanted,
    sweep_objective,
)
