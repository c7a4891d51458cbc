"""The memory plan of one config: what is always there, what each phase adds, which phase is the peak."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.config.algorithms import TrainingConfig
from rlhf_lightning.config.schema import Config
from rlhf_lightning.planning import activations
from rlhf_lightning.planning.activations import ITEM
from rlhf_lightning.planning.roles import FLOAT, RolePlan, roles_of
from rlhf_lightning.planning.shape import Shape, shape_of

MIB = 2**20
CUDA_CONTEXT = 512 * MIB
"""What CUDA takes of a card before the first tensor, its libraries' kernels and workspaces included."""
PROCESS = 700 * MIB
"""Resident memory of the process itself on a CPU: Python, torch, Transformers, PEFT, bitsandbytes."""


@dataclass(frozen=True)
class Part:
    """One thing that takes memory."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Phase:
    """A moment of the run, with all that is in memory then."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """What a run will take. All sizes in bytes."""

    shape: Shape
    backbone: int
    roles: tuple[RolePlan, ...]
    phases: tuple[Phase, ...]
    cpu: bool
    tokens: str
    """The sizes that the phases were counted at, for a person."""

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def learning(self) -> int:
        """Parameters that train."""
        return sum(role.parameters for role in self.roles if role.trains)


def make_plan(config: Config) -> Plan:
    """Count the memory of a stage that trains, at the largest batch that its settings allow.

    Every row is taken to be as long as it may be; no prompt is taken to be shared between rows.

    Raises:
        UserError: the model's sizes are not known, or no layer takes an adapter.
    """
    shape = shape_of(config.model)
    roles = roles_of(config, shape)
    cpu = config.trainer.accelerator == "cpu"
    learning = sum(role.parameters for role in roles if role.trains) * FLOAT
    backbone = shape.stored(config.model.quantization, ITEM[config.model.dtype])
    always = (
        Part("libraries of the process" if cpu else "CUDA context", PROCESS if cpu else CUDA_CONTEXT),
        Part("backbone", backbone),
        Part("adapters and heads", sum(role.bytes for role in roles)),
        Part("AdamW, two moments", 2 * learning),
    )
    gradients = Part("gradients", learning)
    rows, length, sizes = _batch(config)
    sampling: tuple[Phase, ...] = ()
    if config.stage.name == "ppo":
        sampling = (
            Phase("rollout", (*always, *_rollout(config, shape))),
            Phase("scoring", (*always, _busiest(config, shape, rows, length))),
        )
    kept = _saved(config, shape, rows * length, first=min(role.first_layer for role in roles if role.trains))
    update = Phase("update", (*always, gradients, kept, _busiest(config, shape, rows, length)))
    step = Phase("optimizer step", (*always, gradients, Part("a float32 copy of what trains", learning)))
    return Plan(shape, backbone, roles, (*sampling, update, step), cpu, sizes)


def _batch(config: Config) -> tuple[int, int, str]:
    """Rows and longest row of a forward pass of the update, and both in words."""
    if config.stage.name == "ppo":
        prompt, answer = config.data.max_prompt_length, config.generation.max_new_tokens
        rows, side = config.ppo.micro_batch_size, config.generation.batch_size
        words = f"{rows} answers a pass, {side} side by side in the rollout, {prompt} + {answer} tokens each"
        return rows, prompt + answer, words
    section = section_of(config)
    rows, length = section.micro_batch_size, section.max_length
    if config.stage.name == "sft":
        return rows, length, f"{rows} demonstrations a pass, {length} tokens each"
    return rows, 2 * length, f"{rows} pairs a pass, two texts of {length} tokens each"


def section_of(config: Config) -> TrainingConfig:
    """The settings of a stage on fixed examples."""
    return {"sft": config.sft, "reward": config.reward_model, "dpo": config.dpo}[config.stage.name]


def _rollout(config: Config, shape: Shape) -> tuple[Part, ...]:
    dtype, rows = config.model.dtype, config.generation.batch_size
    prompt, answer = config.data.max_prompt_length, config.generation.max_new_tokens
    parts = [Part("key-value cache", rows * (prompt + answer) * activations.cache_per_token(shape, dtype))]
    if dequantizes_rollout(config):
        whole = sum(linear.weights for linear in shape.linears()) * ITEM[dtype]
        parts.append(Part("de-quantised weights of the rollout", whole))
    prefill = _forward(config, shape, rows, prompt)
    draw = activations.sampling_step(shape, dtype, rows)
    busiest = Part("prompts in one layer", prefill) if prefill > draw else Part("logits of one step", draw)
    parts.append(busiest)
    return tuple(parts)


def dequantizes_rollout(config: Config) -> bool:
    """Whether the rollout has a copy of the frozen weights that is not quantised."""
    chosen = getattr(config.model, "rollout_weights", "nf4")
    return config.model.quantization == "nf4" and chosen == "dequantized"


def _forward(config: Config, shape: Shape, rows: int, length: int) -> int:
    """One layer at work on ``rows`` rows of ``length`` tokens."""
    dtype = config.model.dtype
    work = rows * length * activations.working_per_token(shape, dtype)
    if config.model.attention == "eager":
        work = max(work, activations.attention_matrix(shape, dtype, rows=rows, length=length))
    weights = activations.one_layer_dequantized(shape, dtype) if config.model.quantization == "nf4" else 0
    return work + weights


def _busiest(config: Config, shape: Shape, rows: int, length: int) -> Part:
    """What comes and goes inside a pass: a layer at work, or the loss at the end, whichever is more."""
    layer = _forward(config, shape, rows, length)
    chunk = 0 if config.stage.name == "reward" else activations.logits_chunk(shape, rows * length)
    return Part("one layer at work", layer) if layer > chunk else Part("a chunk of logits", chunk)


def _saved(config: Config, shape: Shape, tokens: int, *, first: int) -> Part:
    """What is kept for the backward pass, from the lowest layer with an adapter that trains."""
    dtype, layers = config.model.dtype, shape.sizes.layers - first
    whole = tokens * sum(activations.saved_per_token(shape, dtype).values())
    if config.model.gradient_checkpointing:
        inputs = layers * tokens * activations.checkpoint_per_token(shape, dtype)
        return Part("inputs of the layers, and one layer's activations", inputs + whole)
    return Part("activations kept for the backward pass", layers * whole)
