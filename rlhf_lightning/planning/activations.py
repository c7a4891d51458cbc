"""What a forward and a backward pass hold beside the weights: bytes, from the sizes of a layer.

The one place to change when the engine changes. Two ways through a layer are counted: our own arithmetic on
packed tokens (``kernels.blocks``), and the model's own modules with PEFT's adapters on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.planning.shape import Shape

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
PACKED = ("llama", "mistral", "qwen2")
"""Families that go through ``kernels.blocks``."""
CHUNK_BYTES = {"cpu": 48 << 20, "gpu": 256 << 20}
FEWEST_ROWS = 128
"""A chunk of float32 logits, and the rows that it has at least (``functional.chunked``)."""
SCORES = 1 << 22
"""Attention scores alive at once on a CPU (``kernels.attention``)."""


@dataclass(frozen=True)
class Engine:
    """The sizes that decide what a pass holds: the model's, its arithmetic's, and where it runs."""

    shape: Shape
    dtype: str
    quantised: bool
    eager: bool
    lean: bool
    """Keep the inputs alone and compute the rest again (``model.gradient_checkpointing``)."""
    cpu: bool

    @classmethod
    def of(cls, model: ModelConfig, shape: Shape, *, cpu: bool) -> Engine:
        eager, lean = model.attention == "eager", model.gradient_checkpointing
        return cls(shape, model.dtype, model.quantization == "nf4", eager, lean, cpu)

    @property
    def packed(self) -> bool:
        return self.shape.sizes.family in PACKED

    @property
    def item(self) -> int:
        return ITEM[self.dtype]

    # ---- kept for the backward --------------------------------------------------------------------

    def kept(self) -> dict[str, int]:
        """Bytes that one layer keeps of one token from the forward to the backward, by what they are."""
        s, item = self.shape.sizes, self.item
        if self.lean:
            return {"inputs": (2 if self.packed else 1) * s.hidden * item}
        return self._computed() | {"input of each half": 2 * s.hidden * item}

    def computed_again(self) -> int:
        """Bytes of one token that one layer computes again in the backward where only inputs are kept."""
        if not self.lean:
            return 0
        parts = self._computed().values()
        return max(parts) if self.packed else sum(parts)

    def _computed(self) -> dict[str, int]:
        s, q, kv, item = self.shape.sizes, self.shape.queries, self.shape.keys, self.item
        if self.packed:
            return {
                "queries, keys, values and what attention makes of them": (2 * q + 2 * kv) * item,
                "gate and up": 2 * s.intermediate * item,
            }
        narrow = 0 if self.dtype == "float32" else 1  # PEFT's adapters read a float32 copy of each input
        inside = (3 if self.shape.gated else 2) * s.intermediate * item
        return {
            "norms": 2 * 4 * s.hidden,
            "queries, keys, values and what attention makes of them": 4 * q * item,
            "inside the MLP": inside,
            "inputs of the adapters": narrow * 4 * (5 * s.hidden + q + s.intermediate),
        }

    # ---- comes and goes ---------------------------------------------------------------------------

    def forward(self, rows: int, length: int) -> int:
        """Bytes of one layer at work without gradients, its weights included."""
        s, q, kv = self.shape.sizes, self.shape.queries, self.shape.keys
        attention = 2 * s.hidden + 4 * q + 5 * kv
        mlp = 3 * s.hidden + 3 * s.intermediate
        tokens = rows * length * max(attention, mlp) * self.item
        return tokens + self._scores(rows, length, copies=2) + self.weights()

    def backward(self, rows: int, length: int) -> int:
        """Bytes of one layer at work in the backward pass beside what is kept, its weights included."""
        s, q, kv, item = self.shape.sizes, self.shape.queries, self.shape.keys, self.item
        attention = (7 * q + 6 * kv + 3 * s.hidden) * item
        mlp = (5 * s.intermediate + 2 * s.hidden) * item
        norm = (2 * s.intermediate + 2 * s.hidden) * item + 3 * 4 * s.hidden
        tokens = rows * length * (max(attention, mlp, norm) + self.computed_again())
        return tokens + self._scores(rows, length, copies=4) + self.weights()

    def _scores(self, rows: int, length: int, *, copies: int) -> int:
        """Bytes of attention scores: a slice of them on a CPU, all where they are written out, else none."""
        heads = self.shape.sizes.heads
        every = rows * heads * length * length
        if not self.packed:
            return every * (2 * self.item + 4) if self.eager else 0
        if not self.cpu:
            return 0
        group = heads // self.shape.sizes.kv_heads * length * length
        return (copies * min(every, max(SCORES, group)) + group) * self.item

    def weights(self) -> int:
        """Bytes of the widest de-quantised weights that are multiplied at once; 0 without quantisation.

        Gate and up are one product: both parts are there when they are put together.
        """
        if not self.quantised:
            return 0
        s = self.shape.sizes
        widest = max(linear.weights for linear in self.shape.linears())
        if self.packed:
            widest = 2 * max(
                2 * s.hidden * s.intermediate, s.hidden * (self.shape.queries + 2 * self.shape.keys)
            )
        return widest * self.item

    def logits(self, rows: int, *, learning: bool = False) -> int:
        """Bytes of the chunk of logits that the log-probabilities of ``rows`` tokens are read from."""
        vocab, hidden = self.shape.sizes.vocab, self.shape.sizes.hidden
        chunk = max(FEWEST_ROWS, CHUNK_BYTES["cpu" if self.cpu else "gpu"] // (4 * vocab))
        narrow = 0 if self.item == 4 else self.item
        gradients = 2 * rows * hidden * self.item if learning else 0
        return min(chunk, rows) * vocab * (narrow + 8) + gradients

    def draw(self, rows: int) -> int:
        """Bytes of one step's logits: as computed, in float32, as weights, and their float64 running sum."""
        return rows * self.shape.sizes.vocab * (self.item + 4 + 4 + 8)

    def cached(self) -> int:
        """Bytes of one token in the key-value cache, all layers."""
        return self.shape.sizes.layers * 2 * self.shape.keys * self.item
