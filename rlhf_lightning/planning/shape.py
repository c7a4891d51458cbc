"""The sizes of a model's layers: from the ``config.json`` of its folder, else from ``model.shape``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.schema import ModelConfig, ShapeConfig
from rlhf_lightning.errors import UserError

FAMILIES: tuple[str, ...] = get_args(ShapeConfig.model_fields["family"].annotation)
_TIED = ("gpt2", "gemma", "gemma2")  # tied unless their config says otherwise
_NAMES = {  # our name -> the names that config.json may give it
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
BLOCK, GROUP = 64, 256
"""Weights to a scale of nf4, and scales to a second scale of the double quantisation (bitsandbytes)."""
CODES = 4 * (16 + 256)
"""Bytes of the two code books that every 4-bit layer keeps: 16 and 256 float32."""


@dataclass(frozen=True)
class Linear:
    """One frozen linear layer; ``name`` is its dotted path inside the trunk."""

    name: str
    inputs: int
    outputs: int
    layer: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    def stored(self, quantization: str, item: int) -> int:
        """Bytes of the weight as stored; ``item`` is the size of an unquantised number."""
        if quantization == "none":
            return self.weights * item
        blocks = -(-self.weights // BLOCK)
        return -(-self.weights // 2) + blocks + 4 * -(-blocks // GROUP) + CODES


@dataclass(frozen=True)
class Shape:
    """A model's sizes and where they are from."""

    sizes: ShapeConfig
    source: str

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.sizes.heads * self.sizes.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads together, which is that of the values."""
        return self.sizes.kv_heads * self.sizes.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections."""
        return self.sizes.family not in ("gpt2", "gpt_neox")

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of the trunk, layer by layer."""
        s, q, kv = self.sizes, self.queries, self.keys
        inside = {
            "gated": (
                ("layers.{}.self_attn.q_proj", s.hidden, q),
                ("layers.{}.self_attn.k_proj", s.hidden, kv),
                ("layers.{}.self_attn.v_proj", s.hidden, kv),
                ("layers.{}.self_attn.o_proj", q, s.hidden),
                ("layers.{}.mlp.gate_proj", s.hidden, s.intermediate),
                ("layers.{}.mlp.up_proj", s.hidden, s.intermediate),
                ("layers.{}.mlp.down_proj", s.intermediate, s.hidden),
            ),
            "gpt2": (
                ("h.{}.attn.c_attn", s.hidden, q + 2 * kv),
                ("h.{}.attn.c_proj", q, s.hidden),
                ("h.{}.mlp.c_fc", s.hidden, s.intermediate),
                ("h.{}.mlp.c_proj", s.intermediate, s.hidden),
            ),
            "gpt_neox": (
                ("layers.{}.attention.query_key_value", s.hidden, q + 2 * kv),
                ("layers.{}.attention.dense", q, s.hidden),
                ("layers.{}.mlp.dense_h_to_4h", s.hidden, s.intermediate),
                ("layers.{}.mlp.dense_4h_to_h", s.intermediate, s.hidden),
            ),
        }["gated" if self.gated else s.family]
        for layer in range(s.layers):
            for name, inputs, outputs in inside:
                yield Linear(name.format(layer), inputs, outputs, layer)

    def beside(self, linear: Linear) -> int:
        """Outputs of all layers that read this one's input: queries, keys and values, or gate and up."""
        name = linear.name.rpartition(".")[2]
        if self.gated and name in ("q_proj", "k_proj", "v_proj"):
            return self.queries + 2 * self.keys
        if self.gated and name in ("gate_proj", "up_proj"):
            return 2 * self.sizes.intermediate
        return linear.outputs

    @property
    def embeddings(self) -> int:
        """Numbers of the embeddings and of a head of its own."""
        s = self.sizes
        return (s.vocab * (1 if s.tied else 2) + s.positions) * s.hidden

    @property
    def small(self) -> int:
        """Numbers of the norms, and of the biases where every layer has them."""
        s = self.sizes
        norms = (2 * s.layers + 1) * s.hidden
        if self.gated:
            return norms
        return 2 * norms + sum(linear.outputs for linear in self.linears())

    @property
    def parameters(self) -> int:
        """Numbers of the whole model, without the norms of heads and lone biases that some families have."""
        return sum(linear.weights for linear in self.linears()) + self.embeddings + self.small

    def stored_linears(self, quantization: str, item: int) -> int:
        """Bytes of the linear layers of the trunk."""
        return sum(linear.stored(quantization, item) for linear in self.linears())

    def stored(self, quantization: str, item: int) -> int:
        """Bytes of the frozen model: the linear layers as quantised, the rest ``item`` bytes a number."""
        return self.stored_linears(quantization, item) + (self.embeddings + self.small) * item


def shape_of(model: ModelConfig) -> Shape:
    """The sizes of the model that a config names.

    Raises:
        UserError: there is no folder with a ``config.json`` that can be read, and no ``model.shape``.
    """
    folder = tiny_path("model") if model.path == "tiny" else Path(model.path).expanduser()
    file = Path(str(folder)) / "config.json"
    if file.is_file():
        values = json.loads(file.read_text(encoding="utf-8"))
        sizes = _read(values.get("text_config", values))
        if sizes is not None:
            return Shape(sizes, "the embedded model" if model.path == "tiny" else str(file))
    if model.shape is not None:
        return Shape(model.shape, f"model.shape (of {model.name})")
    why = f"{file} describes a model of another kind" if file.is_file() else f"{model.path} is no folder here"
    raise UserError(
        f"plan=true needs the sizes of the model: {why}, so give model.shape, as in "
        "model.shape='{layers: 32, hidden: 4096, heads: 32, kv_heads: 32, head_dim: 128, "
        "intermediate: 11008, vocab: 32000, tied: false}'"
    )


def _read(values: dict[str, Any]) -> ShapeConfig | None:
    """The sizes in a ``config.json``; None where the layers are of a kind that is not known here."""
    kind = values.get("model_type")
    if kind not in FAMILIES:
        return None
    found: dict[str, Any] = {}
    for name, keys in _NAMES.items():
        found[name] = next((values[key] for key in keys if key in values), None)
    if None in found.values():
        return None
    hidden, heads = found["hidden"], found["heads"]
    return ShapeConfig(
        **found,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        intermediate=values.get("intermediate_size") or values.get("n_inner") or 4 * hidden,
        tied=values.get("tie_word_embeddings", kind in _TIED),
        family=kind,
        positions=values.get("n_positions", 0) if kind == "gpt2" else 0,
    )
