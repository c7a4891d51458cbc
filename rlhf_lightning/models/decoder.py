"""The backbone's decoder on packed tokens: its weights, our arithmetic.

For the families whose layers are the ones of ``kernels.blocks``. Others go through their own modules, to the
same numbers (``ActorCritic``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import LlamaModel, MistralModel, Qwen2Model

from rlhf_lightning.kernels.blocks import AttentionHalf, MLPHalf, Tokens
from rlhf_lightning.kernels.linears import Linears, Term
from rlhf_lightning.kernels.packed import Packed
from rlhf_lightning.kernels.packing import Packing
from rlhf_lightning.models.frozen import Frozen, readable

# The classes themselves: one of the same name that comes with a model may compute something else.
Product = Callable[[Tensor], Tensor]
FAMILIES = (LlamaModel, MistralModel, Qwen2Model)


def supports(trunk: nn.Module) -> bool:
    """Whether the layers are norm, rotary attention, norm, gated SiLU, each with a residual, their weights of
    a kind that we read, and their adapters low-rank terms on linear maps: no dropout, no DoRA, no bias, no
    term on the embedding."""
    config: Any = getattr(trunk, "config", None)
    if type(trunk) not in FAMILIES or getattr(config, "hidden_act", None) != "silu":
        return False
    layers: Any = trunk.layers
    maps = [m for layer in layers for group in _groups(layer) for m in group]
    adapted = [module for module in trunk.modules() if isinstance(module, LoraLayer)]
    if {id(module) for module in adapted} - {id(m) for m in maps}:
        return False
    return all(readable(_base(m)) for m in maps) and all(map(_plain, adapted))


class Decoder:
    """A supported trunk, readable under any of the adapters on it.

    Args:
        trunk: as ``supports`` allows.
        lean: keep only each half-layer's input for the backward and compute the rest again.
    """

    def __init__(self, trunk: Any, *, lean: bool = False) -> None:
        self.trunk = trunk
        self.lean = lean
        self.config: Any = trunk.config
        self.dtype: torch.dtype = self.trunk.embed_tokens.weight.dtype
        self._address = self._where()
        self._weights = [_Layer(layer, self.dtype) for layer in self.trunk.layers]
        self._halves: dict[str | None, list[tuple[AttentionHalf, MLPHalf]]] = {}
        self.dequantised = False
        self._packed: dict[str | None, list[tuple[Packed, ...]]] = {}

    @property
    def limit(self) -> int | None:
        """Longest row that full attention reads as the model would; None: no limit."""
        window = getattr(self.config, "sliding_window", None)
        if isinstance(self.trunk, Qwen2Model) and "sliding_attention" not in self.config.layer_types:
            return None
        return window or None

    @property
    def stale(self) -> bool:
        """Whether the trunk was moved or cast since: what is held here of its weights was not."""
        return self._where() != self._address

    def _where(self) -> int:
        return self.trunk.embed_tokens.weight.data_ptr()

    def keep_dequantised(self, kept: bool) -> None:
        """Hold 4-bit weights also in the dtype of the arithmetic, or drop that copy: the same numbers."""
        self.dequantised = kept
        for layer in self._weights:
            for frozen in layer.frozen:
                frozen.keep(kept)

    def pack(self, adapter: str | None) -> None:
        """Hold the maps that ``products`` gives under one adapter in a CPU's layout, until ``unpack``."""
        self._packed[adapter] = [
            tuple(Packed(maps.weight(), maps.bias, maps.low(self.dtype)) for maps in linears)
            for linears in self._linears(adapter)
        ]

    def unpack(self) -> None:
        self._packed.clear()

    def products(self, adapter: str | None) -> Sequence[Sequence[Product]]:
        """The four products of each layer (``_groups``), without a gradient, adapters as they are now."""
        return self._packed.get(adapter) or [
            tuple(partial(maps.forward, low=maps.low(self.dtype)) for maps in linears)
            for linears in self._linears(adapter)
        ]

    def _linears(self, adapter: str | None) -> Iterator[tuple[Linears, ...]]:
        for attention, mlp in self.layers(adapter):
            yield attention.qkv, attention.out, mlp.gate_up, mlp.down

    def layers(self, adapter: str | None) -> list[tuple[AttentionHalf, MLPHalf]]:
        """Both halves of each layer under one adapter, or bare."""
        if adapter not in self._halves:
            self._halves[adapter] = [
                layer.halves(self.config, adapter, lean=self.lean) for layer in self._weights
            ]
        return self._halves[adapter]

    def tokens(self, packing: Packing) -> Tokens:
        cos, sin = self.rotation(packing.positions)
        return Tokens(packing, cos, sin)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at positions (N,), each (N, 1, d / 2)."""
        like = self.trunk.embed_tokens.weight
        cos, sin = self.trunk.rotary_emb(like, positions.unsqueeze(0))
        half = cos.shape[-1] // 2
        return cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous()

    def forward(self, packing: Packing, adapter: str | None) -> Tensor:
        """Hidden states before the last norm, (N, H); gradients go to the adapter's tensors."""
        tokens = self.tokens(packing)
        x = self.trunk.embed_tokens(packing.ids)
        for attention, mlp in self.layers(adapter):
            x = mlp(attention(x, tokens))
        return x

    def norm(self, x: Tensor) -> Tensor:
        """The norm after the last layer."""
        return self.trunk.norm(x)


class _Layer:
    """One layer's frozen weights and the modules that carry adapters."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.layer = layer
        self.groups = _groups(layer)
        self.frozen = [Frozen([_base(m) for m in group], dtype) for group in self.groups]
        self.biases = [frozen.biases() for frozen in self.frozen]

    def halves(self, config: Any, adapter: str | None, *, lean: bool) -> tuple[AttentionHalf, MLPHalf]:
        qkv, out, gate_up, down = (
            Linears(frozen, bias, frozen.sizes, tuple(_term(m, adapter) for m in group))
            for frozen, bias, group in zip(self.frozen, self.biases, self.groups, strict=True)
        )
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        first, second = self.layer.input_layernorm, self.layer.post_attention_layernorm
        attention = AttentionHalf(
            norm=first.weight,
            eps=first.variance_epsilon,
            qkv=qkv,
            out=out,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_size=size,
            lean=lean,
        )
        return attention, MLPHalf(second.weight, second.variance_epsilon, gate_up, down, lean=lean)


def _groups(layer: Any) -> list[list[nn.Module]]:
    """A layer's linear maps, those that read one input together."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def _base(module: nn.Module) -> nn.Module:
    return module.base_layer if isinstance(module, LoraLayer) else module


def _term(module: Any, adapter: str | None) -> Term | None:
    if adapter is None or not isinstance(module, LoraLayer) or adapter not in module.lora_A:
        return None
    a: Any = module.lora_A[adapter]
    b: Any = module.lora_B[adapter]
    return Term(a.weight, b.weight, module.scaling[adapter])


def _plain(module: Any) -> bool:
    """Whether every adapter here adds ``scale * B A x`` and nothing else, its dropouts silent."""
    dropped = any(getattr(dropout, "p", 0.0) for dropout in module.lora_dropout.values())
    return not (dropped or module.lora_variant or any(module.lora_bias.values()))
