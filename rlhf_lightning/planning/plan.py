"""The memory plan of one config: what is always there, what each phase adds, which phase is the peak."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf_lightning.config.schema import Config
from rlhf_lightning.planning.activations import Engine
from rlhf_lightning.planning.roles import FLOAT, RolePlan, roles_of
from rlhf_lightning.planning.shape import Shape, shape_of

MIB = 2**20
CUDA_CONTEXT = 512 * MIB
"""What CUDA takes of a card before the first tensor, its libraries' kernels and workspaces included."""
PROCESS = 465 * MIB
"""Resident memory of the process itself on a CPU: Python, torch, Transformers, PEFT, bitsandbytes."""
PRODUCTS = 80 * MIB
"""oneDNN's code for the shapes of bfloat16 products, and its threads' buffers: what `plan_check` found."""


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
    engine = Engine.of(config.model, shape, cpu=cpu)
    learning = sum(role.parameters for role in roles if role.trains) * FLOAT
    backbone = shape.stored(config.model.quantization, engine.item)
    fixed = PROCESS + PRODUCTS * (config.model.dtype == "bfloat16") if cpu else CUDA_CONTEXT
    always = (
        Part("libraries of the process" if cpu else "CUDA context", fixed),
        Part("backbone", backbone),
        Part("adapters and heads", sum(role.bytes for role in roles)),
        Part("AdamW, two moments", 2 * learning),
    )
    gradients = Part("gradients", learning)
    batch = _batch(config)
    phases = []
    if config.stage.name == "ppo":
        rolling, copy = _weights_of_rollout(config, engine)
        phases.append(
            Phase("rollout", (*always, *copy, *_packed(config, engine), *_rollout(config, rolling)))
        )
        phases.append(Phase("scoring", (*always, *copy, *_scoring(rolling, batch))))
    layers = shape.sizes.layers - min(role.first_layer for role in roles if role.trains)
    bonus = config.stage.name == "ppo" and config.ppo.entropy_coef != 0
    passes = _update(engine, batch, layers=layers, entropy=bonus)
    stacked = max(role.stacked for role in roles if role.trains) * engine.item if engine.packed else 0
    terms = Part("low-rank terms as they are multiplied", stacked)
    phases.append(Phase("update", (*always, gradients, terms, *passes)))
    return Plan(shape, backbone, roles, tuple(phases), cpu, batch.words)


@dataclass(frozen=True)
class _Batch:
    """The largest forward pass of the update."""

    rows: int
    length: int
    predicted: int
    """Tokens whose log-probability is read; 0 where only scores are."""
    words: str


def _batch(config: Config) -> _Batch:
    if config.stage.name == "ppo":
        prompt, answer = config.data.max_prompt_length, config.generation.max_new_tokens
        rows, side = config.ppo.micro_batch_size, config.generation.batch_size
        words = f"{rows} answers a pass, {side} side by side in the rollout, {prompt} + {answer} tokens each"
        return _Batch(rows, prompt + answer, rows * answer, words)
    section = {"sft": config.sft, "reward": config.reward_model, "dpo": config.dpo}[config.stage.name]
    rows, length = section.micro_batch_size, section.max_length
    if config.stage.name == "sft":
        return _Batch(rows, length, rows * length, f"{rows} demonstrations a pass, {length} tokens each")
    predicted = 2 * rows * length if config.stage.name == "dpo" else 0
    return _Batch(2 * rows, length, predicted, f"{rows} pairs a pass, two texts of {length} tokens each")


def _weights_of_rollout(config: Config, engine: Engine) -> tuple[Engine, tuple[Part, ...]]:
    """The engine of rollout and scoring, and the copy of the 4-bit weights that it may hold."""
    if config.model.rollout_weights == "nf4" or not engine.quantised:
        return engine, ()
    copy = Part("de-quantised weights of the rollout", engine.shape.stored_linears("none", engine.item))
    return replace(engine, quantised=False), (copy,)


def _packed(config: Config, engine: Engine) -> tuple[Part, ...]:
    """The copy of layers and head in a CPU's layout that sampling may hold."""
    if config.model.rollout_weights != "packed":
        return ()
    sizes, linears = engine.shape.sizes, engine.shape.stored_linears("none", engine.item)
    return (Part("packed weights while sampling", linears + sizes.vocab * sizes.hidden * engine.item),)


def _rollout(config: Config, engine: Engine) -> tuple[Part, ...]:
    rows, prompt = config.generation.batch_size, config.data.max_prompt_length
    tokens = rows * (prompt + config.generation.max_new_tokens)
    cache = Part("key-value cache", tokens * engine.cached())
    prompts = Part("prompts in one layer", engine.forward(rows, prompt))
    return cache, _larger(prompts, Part("logits of one step", engine.draw(rows)))


def _scoring(engine: Engine, batch: _Batch) -> tuple[Part, ...]:
    layer = Part("one layer at work", engine.forward(batch.rows, batch.length))
    return (_larger(layer, Part("logits", engine.head(batch.predicted, entropy=True, learning=False))),)


def _update(engine: Engine, batch: _Batch, *, layers: int, entropy: bool) -> tuple[Part, ...]:
    """What is kept, from the lowest layer with an adapter that trains, and the most that comes and goes."""
    kept = layers * batch.rows * batch.length * sum(engine.kept(batch.length).values())
    name = "inputs of the layers" if engine.lean else "activations kept for the backward pass"
    layer = Part("one layer at work", engine.backward(batch.rows, batch.length))
    head = Part("logits", engine.head(batch.predicted, entropy=entropy, learning=True))
    return Part(name, kept), _larger(layer, head)


def _larger(one: Part, other: Part) -> Part:
    """Of two things that are never there at once, the one that decides the peak."""
    return max(one, other, key=lambda part: part.bytes)
