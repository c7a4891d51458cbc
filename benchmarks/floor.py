"""The arithmetic of one PPO iteration, counted: what no implementation on this machine can beat.

Notation: B answers, P prompt and T response tokens, L = P + T; W weights of the backbone's matrices without
embedding and head, w of one adapter, V vocabulary, H width, K width of keys and values, N layers. A product
of a token with a matrix of n weights is 2n operations; the causal half of the attention costs
A(L) = 2 N H L (L + 1) for a row of L tokens (scores and weighted sum, each 2 H a pair).

    rollout    B [2 (W + w)(P + T - 1) + A(P + T - 1) + 2 V H T]
    one pass   B [2 (W + w) L + A(L)],  and 2 V H T B more for the language-model head
    update     epochs times, for a role with its own pass: twice a pass backward (no gradient of frozen
               weights), 2 w L B more for the adapter's own gradient, and the head twice more

Scoring is a pass of the policy, of the reference, of the reward adapter, and of a critic with an adapter of
its own. Decoding reads all weights at each step, so its floor is the larger of operations and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Shape:
    """What of a decoder costs operations."""

    matrices: int
    """W: weights of all layers' matrices."""
    adapter: int
    """w: weights of one LoRA adapter on all of them."""
    layers: int
    hidden: int
    vocab: int
    kv: int
    """K: width of keys, and of values, in one layer."""

    @classmethod
    def of(cls, config: PreTrainedConfig, *, rank: int) -> Shape:
        """The shape of a Llama-like config with LoRA of this rank on its seven matrices a layer."""
        width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        size = getattr(config, "head_dim", None) or width // heads
        kv, attention = config.num_key_value_heads * size, heads * size
        sides = [
            (width, attention), (width, kv), (width, kv), (attention, width),
            (width, inner), (width, inner), (inner, width),
        ]  # fmt: skip
        layers = config.num_hidden_layers
        return cls(
            matrices=layers * sum(a * b for a, b in sides),
            adapter=layers * rank * sum(a + b for a, b in sides),
            layers=layers,
            hidden=width,
            vocab=config.vocab_size,
            kv=kv,
        )


@dataclass(frozen=True)
class Work:
    """One iteration."""

    answers: int
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of an answer."""
    epochs: int
    critic: bool
    """Whether the critic has an adapter, and so passes, of its own."""
    learned_reward: bool = True


@dataclass(frozen=True)
class Floor:
    """Operations by phase, FLOP, and bytes that the rollout reads."""

    rollout: float
    score: float
    update: float
    rollout_bytes: float

    def seconds(self, *, flops: float, bandwidth: float) -> dict[str, float]:
        """Least seconds by phase on a machine of so many FLOP/s and bytes/s."""
        return {
            "rollout": max(self.rollout / flops, self.rollout_bytes / bandwidth),
            "score": self.score / flops,
            "update": self.update / flops,
        }


def attention(shape: Shape, tokens: int) -> float:
    """A(L): operations of one row's causal attention over all layers."""
    return 2.0 * shape.layers * shape.hidden * tokens * (tokens + 1)


def floor(shape: Shape, work: Work, *, weight_bytes: float) -> Floor:
    """Operations and bytes of one iteration by the formulas above.

    Args:
        weight_bytes: of all matrices that a decoding step reads, head and one adapter included.
    """
    whole = work.prompt + work.response
    mapped = 2.0 * (shape.matrices + shape.adapter)
    head = 2.0 * shape.vocab * shape.hidden * work.response
    trunk = mapped * whole + attention(shape, whole)
    rollout = mapped * (whole - 1) + attention(shape, whole - 1) + head
    passes = 2 + work.critic + work.learned_reward
    own = 2.0 * shape.adapter * whole
    policy, critic = 3 * (trunk + head) + own, (3 * trunk + own) if work.critic else 0.0
    cached = 4.0 * shape.layers * shape.kv * sum(range(work.prompt, whole))  # keys and values, 2 bytes each
    return Floor(
        rollout=work.answers * rollout,
        score=work.answers * (passes * trunk + 2 * head),
        update=work.answers * work.epochs * (policy + critic),
        rollout_bytes=weight_bytes * work.response + work.answers * cached,
    )
