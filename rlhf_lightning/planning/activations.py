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
"""Families whose layers ``models.decoder`` computes."""
CHUNK_BYTES = {"cpu": 32 << 20, "gpu": 256 << 20}
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
    packed: bool
    """Our own arithmetic (``models.decoder``), else the model's modules."""
    lean: bool
    """Keep the inputs alone and compute the rest again (``model.gradient_checkpointing``)."""
    cpu: bool

    @classmethod
    def of(cls, model: ModelConfig, shape: Shape, *, cpu: bool) -> Engine:
        quantised, lean = model.quantization == "nf4", model.gradient_checkpointing
        packed = shape.sizes.family in PACKED and model.attention == "sdpa" and not model.lora.dropout
        return cls(shape, model.dtype, quantised, model.attention == "eager", packed, lean, cpu)

    @property
    def item(self) -> int:
        return ITEM[self.dtype]

    # ---- kept for the backward --------------------------------------------------------------------

    def kept(self, length: int) -> dict[str, int]:
        """Bytes that one layer keeps of one token of a row of so many from the forward to the backward."""
        s, item = self.shape.sizes, self.item
        if self.lean:
            return {"inputs": (2 if self.packed else 1) * s.hidden * item}
        kept = self._computed() | {"input of each half": 2 * s.hidden * item}
        if self.packed and self.cpu and s.heads * length <= 2 * s.hidden:
            kept["probabilities of short rows"] = s.heads * length * item
        return kept

    def computed_again(self) -> int:
        """Bytes of one token that one layer computes again in the backward where only inputs are kept."""
        return sum(self._computed().values()) if self.lean else 0

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
        """Bytes of one layer at work without gradients beside its input, de-quantised weights included."""
        if not self.packed:
            return self._own_modules(rows, length)
        (h, i, q, kv), tokens, scores = self._widths(), rows * length * self.item, self._scores(rows, length)
        group = self._weights()
        moments = (
            (2 * q + 2 * kv) * tokens + 2 * scores,
            (4 * q + 4 * kv) * tokens,
            (h + q + 2 * kv) * tokens + 2 * group["qkv"],
            h * tokens + 2 * group["gate and up"],
            (h + 2 * i) * tokens + group["gate and up"],
            (h + 3 * i) * tokens + group["down"],
        )
        return 2 * h * tokens + max(moments)

    def backward(self, rows: int, length: int) -> int:
        """Bytes of one layer at work in the backward pass beside what is kept, its weights included."""
        if not self.packed:
            return self._own_modules(rows, length) + rows * length * self.computed_again()
        (h, i, q, kv), tokens, scores = self._widths(), rows * length * self.item, self._scores(rows, length)
        group = self._weights()
        of_attention, of_mlp = (2 * q + 2 * kv, 2 * i) if self.lean else (0, 0)
        attention = (
            (5 * q + 4 * kv) * tokens + 3 * scores,
            (7 * q + 6 * kv + 2 * h) * tokens + 2 * group["qkv"],
        )
        mlp = (
            (5 * i + h) * tokens,
            (2 * i + 3 * h) * tokens + 2 * group["gate and up"],
            (2 * i + 2 * h) * tokens + 3 * 4 * h * rows * length,  # the norm's derivative is taken in float32
        )
        return h * tokens + max(of_attention * tokens + max(attention), of_mlp * tokens + max(mlp))

    def _widths(self) -> tuple[int, int, int, int]:
        """Of the residual stream, the MLP, all queries, all keys."""
        s = self.shape.sizes
        return s.hidden, s.intermediate, self.shape.queries, self.shape.keys

    def _scores(self, rows: int, length: int) -> int:
        """Bytes of the attention scores that are alive at once; a GPU's kernel writes none."""
        if not self.cpu:
            return 0
        s = self.shape.sizes
        group = s.heads // s.kv_heads * length * length
        return min(rows * s.kv_heads, max(1, SCORES // group)) * group * self.item

    def _weights(self) -> dict[str, int]:
        """Bytes of the de-quantised weights that are multiplied at once."""
        h, i, q, kv = self._widths()
        sizes = {"qkv": h * (q + 2 * kv), "gate and up": 2 * h * i, "down": h * i}
        return {name: size * self.item if self.quantised else 0 for name, size in sizes.items()}

    def _own_modules(self, rows: int, length: int) -> int:
        """The same for a layer of Transformers: its MLP at its widest, and eager attention's matrix."""
        h, i, q, _ = self._widths()
        every = rows * self.shape.sizes.heads * length * length
        matrix = every * (2 * self.item + 4) if self.eager else 0
        weights = max(linear.weights for linear in self.shape.linears()) * self.item if self.quantised else 0
        return rows * length * (2 * h + 3 * max(i, q)) * self.item + matrix + weights

    def head(self, rows: int, *, entropy: bool, learning: bool) -> int:
        """Bytes where the log-probabilities of ``rows`` tokens are read.

        Hidden states, the last norm in float32, and a chunk of logits, which the entropy needs twice.
        """
        vocab, hidden = self.shape.sizes.vocab, self.shape.sizes.hidden
        chunk = max(FEWEST_ROWS, CHUNK_BYTES["cpu" if self.cpu else "gpu"] // (4 * vocab))
        narrow = 0 if self.item == 4 else self.item
        states = 2 + ((2 if entropy else 1) if learning else 0)
        logits = min(chunk, rows) * vocab * (narrow + (8 if entropy else 4))
        return logits + rows * hidden * (2 * 4 + states * self.item)

    def draw(self, rows: int) -> int:
        """Bytes of one step's logits: as the head gives them, and as weights."""
        return rows * self.shape.sizes.vocab * (4 + 4)

    def cached(self) -> int:
        """Bytes of one token in the key-value cache, all layers."""
        return self.shape.sizes.layers * 2 * self.shape.keys * self.item
