"""What a forward and a backward pass hold beside the weights: bytes, from the sizes of a layer.

The one place to change when the engine of the update or of the rollout changes.
"""

from __future__ import annotations

from rlhf_lightning.planning.shape import Shape

CHUNK = 256
"""Rows of logits alive at once (``chunked_token_logprobs``)."""
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


def saved_per_token(shape: Shape, dtype: str) -> dict[str, int]:
    """Bytes that one layer keeps of one token for the backward pass, by what they are."""
    s, item = shape.sizes, ITEM[dtype]
    return {
        "input of the layer": s.hidden * item,
        "input of the MLP": s.hidden * item,
        "queries, keys, values": (shape.queries + 2 * shape.keys) * item,
        "output of the attention": shape.queries * item,
        "inside the MLP": s.intermediate * (2 if shape.gated else 1) * item,
        "norms and softmax, a number a row": (2 + s.heads) * 4,
    }


def checkpoint_per_token(shape: Shape, dtype: str) -> int:
    """Bytes that one layer keeps of one token under gradient checkpointing: its input."""
    return shape.sizes.hidden * ITEM[dtype]


def working_per_token(shape: Shape, dtype: str) -> int:
    """Bytes alive of one token in the layer at work, beside what is kept: the widest moment of the MLP."""
    s = shape.sizes
    return (2 * s.hidden + (3 if shape.gated else 2) * s.intermediate) * ITEM[dtype]


def attention_matrix(shape: Shape, dtype: str, *, rows: int, length: int) -> int:
    """Bytes of one layer's attention weights where the kernel writes them out (``attention=eager``).

    The scores, their softmax in float32, and the softmax in the compute dtype.
    """
    return rows * shape.sizes.heads * length * length * (2 * ITEM[dtype] + 4)


def logits_chunk(shape: Shape, rows: int) -> int:
    """Bytes of the chunk of logits that the loss works on: three float32 copies of at most ``CHUNK`` rows."""
    return 3 * min(CHUNK, rows) * shape.sizes.vocab * 4


def sampling_step(shape: Shape, dtype: str, rows: int) -> int:
    """Bytes of one step's logits: as computed, scaled, weights, and their float64 running sum."""
    return rows * shape.sizes.vocab * (ITEM[dtype] + 4 + 4 + 8)


def cache_per_token(shape: Shape, dtype: str) -> int:
    """Bytes of one token in the key-value cache, all layers."""
    return shape.sizes.layers * 2 * shape.keys * ITEM[dtype]


def one_layer_dequantized(shape: Shape, dtype: str) -> int:
    """Bytes of the widest layer's weights as the multiplication reads them."""
    return max(linear.weights for linear in shape.linears()) * ITEM[dtype]
