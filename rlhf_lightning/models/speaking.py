"""One token after another from rows of a batch: the state of sampling, whoever speaks.

A speaker is made for a batch of texts, gives the states that predict the first new token, and takes a token
for each row to give the next. Rows can be taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from rlhf_lightning.data.padding import left_pad
from rlhf_lightning.functional.logprobs import position_ids
from rlhf_lightning.kernels.blocks import AttentionHalf, MLPHalf
from rlhf_lightning.kernels.packing import pack
from rlhf_lightning.kernels.pointwise import gated, rms_norm, rotate
from rlhf_lightning.models.backbone import Backbone, cache_keyword
from rlhf_lightning.models.decoder import Decoder, Product


class Speaker(Protocol):
    """Call in this order: ``start`` once, then ``step`` again and again, ``keep`` in between."""

    def start(self) -> Tensor:
        """State after each row's last token, (B, H), behind the last norm."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """The same one token on: (B,) -> (B, H)."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, (n,) int64."""
        ...


class ModuleSpeaker:
    """Through the backbone's own modules and Transformers' cache; any architecture with attention alone."""

    def __init__(
        self,
        trunk: nn.Module,
        backbone: Backbone,
        texts: Sequence[Sequence[int]],
        speaking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            speaking: makes the context in which the right adapter is active, for each step anew: between
                two tokens anyone may speak.
        """
        self.trunk, self.speaking = trunk, speaking
        self.cache = DynamicCache(config=backbone.model.config)
        self._keyword = cache_keyword(trunk)
        device = backbone.model.device
        self.ids, self.mask = (t.to(device) for t in left_pad(texts, backbone.pad_id))
        self.positions = position_ids(self.mask)

    def start(self) -> Tensor:
        return self._forward()

    def step(self, tokens: Tensor) -> Tensor:
        self.ids = tokens.unsqueeze(1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.positions = self.positions[:, -1:] + 1
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def _forward(self) -> Tensor:
        keywords: dict[str, Any] = {self._keyword: self.cache, "use_cache": True}
        with self.speaking():
            output = self.trunk(
                input_ids=self.ids, attention_mask=self.mask.long(), position_ids=self.positions, **keywords
            )
        return output.last_hidden_state[:, -1]


class DecoderSpeaker:
    """Through our decoder: what the texts begin with is computed once, and the cache is written in place."""

    def __init__(
        self, decoder: Decoder, texts: Sequence[Sequence[int]], *, room: int, adapter: str | None
    ) -> None:
        """
        Args:
            room: new tokens at most.
        """
        self.decoder = decoder
        device = decoder.trunk.embed_tokens.weight.device
        self.packing = pack(texts).to(device)
        lengths = self.packing.lengths
        width = self.packing.index.shape[1]
        self.column = width  # where the next token's keys go, the same in every row
        self.positions = lengths.clone()
        steps = torch.arange(width + room, device=device)
        unseen = (steps >= lengths.unsqueeze(1)) & (steps < width)
        mask = torch.zeros(len(lengths), 1, 1, width + room, dtype=decoder.dtype, device=device)
        self.mask = mask.masked_fill_(unseen[:, None, None], float("-inf"))
        halves = zip(decoder.layers(adapter), decoder.products(adapter), strict=True)
        self.layers = [_Step(attention, mlp, products) for (attention, mlp), products in halves]

    def start(self) -> Tensor:
        tokens = self.decoder.tokens(self.packing)
        x = self.decoder.trunk.embed_tokens(self.packing.ids)
        for layer in self.layers:
            x, keys, values = layer.attention.keys_and_values(x, tokens)
            layer.remember(keys, values, room=self.mask.shape[-1])
            x = layer.mlp(x)
        last = (self.packing.lengths - 1).unsqueeze(1)
        return self.decoder.norm(x[self.packing.index.gather(1, last).squeeze(1)])

    def step(self, tokens: Tensor) -> Tensor:
        cos, sin = self.decoder.rotation(self.positions)
        x = self.decoder.trunk.embed_tokens(tokens)
        seen = self.mask[..., : self.column + 1]
        for layer in self.layers:
            x = layer.step(x, cos, sin, self.column, seen)
        self.column += 1
        self.positions += 1
        return self.decoder.norm(x)

    def keep(self, rows: Tensor) -> None:
        self.mask, self.positions = self.mask[rows], self.positions[rows]
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class _Step:
    """One layer while sampling: its cache, and its products, low-rank terms made ready once."""

    keys: Tensor  # (B, K, width + room, d)
    values: Tensor

    def __init__(self, attention: AttentionHalf, mlp: MLPHalf, products: Sequence[Product]) -> None:
        self.attention, self.mlp = attention, mlp
        self.qkv, self.out, self.gate_up, self.down = products

    def remember(self, keys: Tensor, values: Tensor, *, room: int) -> None:
        """Begin the cache with the prompts' keys and values, (B, K, width, d)."""
        shape = (*keys.shape[:2], room, keys.shape[3])
        self.keys, self.values = keys.new_zeros(shape), values.new_zeros(shape)
        self.keys[:, :, : keys.shape[2]] = keys
        self.values[:, :, : keys.shape[2]] = values

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, column: int, seen: Tensor) -> Tensor:
        half = self.attention
        y = self.qkv(rms_norm(x, half.norm, half.eps)).view(len(x), -1, half.head_size)
        turning = half.heads + half.key_heads
        turned = rotate(y[:, :turning], cos, sin)
        self.keys[:, :, column] = turned[:, half.heads :]
        self.values[:, :, column] = y[:, turning:]
        queries = turned[:, : half.heads].view(len(x), half.key_heads, -1, half.head_size)
        keys, values = self.keys[:, :, : column + 1], self.values[:, :, : column + 1]
        read = scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        x = self.out(read.flatten(1)).add_(x)
        both = self.gate_up(rms_norm(x, self.mlp.norm, self.mlp.eps))
        return self.down(gated(both)).add_(x)
