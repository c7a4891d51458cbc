"""Policy, critic, reference and reward: four readings of one backbone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import linear

from rlhf_lightning.allocator import give_back_freed_memory
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.functional.logprobs import chunked_token_logprobs, position_ids
from rlhf_lightning.kernels.packed import Packed, packs
from rlhf_lightning.kernels.packing import pack
from rlhf_lightning.models.adapters import HEAD_FILES, add_adapters, add_score_head, name_base
from rlhf_lightning.models.backbone import Backbone
from rlhf_lightning.models.cast import Cast
from rlhf_lightning.models.decoder import Decoder, supports
from rlhf_lightning.models.forest import Forest, Place, Segment, plant, predictors
from rlhf_lightning.models.heads import ScalarHead
from rlhf_lightning.models.identity import Identity, identify
from rlhf_lightning.models.output import capped, logit_scale, soft_cap
from rlhf_lightning.models.roles import Role, Roles
from rlhf_lightning.models.speaking import DecoderSpeaker, ModuleSpeaker, Speaker
from rlhf_lightning.models.weights import RoleWeight, weigh
from rlhf_lightning.types import Generation, Minibatch


class ActorCritic(nn.Module):
    """The roles on one backbone, each a forward pass under its own adapter and head.

    Time axis: for a response at positions ``P .. P+T-1`` the log-probability of ``a_t`` and ``V(s_t)`` are
    both read at position ``P + t - 1``. All outputs are float32.

    Args:
        backbone: the frozen model.
        config: ``model`` section of the config.
        cast: who plays which role; a role that is not in it cannot be asked. Critic and reward have heads.
        temperature: logits are divided by it in every pass.
    """

    def __init__(self, backbone: Backbone, config: ModelConfig, *, cast: Cast, temperature: float) -> None:
        super().__init__()
        self.backbone = backbone
        self._path = config.path
        self.temperature = temperature
        critic, reward = cast.get("critic"), cast.get("reward")
        self.shared_critic = critic is not None and critic.adapter == cast["policy"].adapter
        self._softcap, self._scale = soft_cap(backbone), logit_scale(backbone)
        self.model: PeftModel
        self.model, adapters = add_adapters(backbone, config, cast)
        self.value_head = None
        if critic is not None:
            self.value_head = ScalarHead(backbone.hidden_size).to(backbone.model.device)
        self.score_head = add_score_head(backbone, reward)
        if self.value_head is not None and self.score_head is not None and not self.shared_critic:
            self.value_head.load_state_dict(self.score_head.state_dict())
        self.roles = Roles(self.model, adapters)
        self._trunk = [backbone.model.base_model]  # in a list, so that nn.Module does not register it twice
        self.decoder: Decoder | None = None  # without one, through the backbone's own modules
        if config.attention == "sdpa" and supports(self.trunk):
            self.decoder = Decoder(self.trunk, lean=config.gradient_checkpointing)
        self._rollout_weights = config.rollout_weights
        self._packed_head: Packed | None = None
        self._check_rollout_weights(config)
        if config.gradient_checkpointing:
            backbone.model.gradient_checkpointing_enable({"use_reentrant": False})

    def _check_rollout_weights(self, config: ModelConfig) -> None:
        """Raise UserError where ``model.rollout_weights`` asks for what this model or machine has not."""
        if config.rollout_weights != "nf4" and self.decoder is None:
            raise UserError(
                f"model.rollout_weights={config.rollout_weights} needs a decoder of the Llama family with "
                f"attention=sdpa; this is {type(self.trunk).__name__} with "
                f"model.attention={config.attention}: take nf4"
            )
        if config.rollout_weights == "packed" and not packs(self.device, self.backbone.model.dtype):
            raise UserError(
                "model.rollout_weights=packed needs model.dtype=bfloat16 and a CPU that multiplies it; this "
                f"is {self.device.type} with {config.dtype}: take nf4 or dequantized"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves and casts; what the decoder holds of the weights moves with them."""
        super()._apply(fn, recurse)
        if self.decoder is not None and self.decoder.stale:
            self.decoder = Decoder(self.trunk, lean=self.decoder.lean)
        return self

    @cached_property
    def _identity(self) -> Identity:
        return identify(self.backbone, self._path)

    @property
    def trunk(self) -> nn.Module:
        """The decoder without its head; its output is the hidden state after the final norm."""
        return self._trunk[0]

    @property
    def device(self) -> torch.device:
        return self.backbone.model.device

    @property
    def has_critic(self) -> bool:
        """Whether there are values to ask for."""
        return self.value_head is not None

    def parameters_of(self, role: Role) -> list[nn.Parameter]:
        """The role's trainable tensors: its adapter's, then its head's; none where it is not in the cast."""
        name = self.roles.adapter(role) if role in self.roles else None
        own = [p for key, p in self.model.named_parameters() if name and f".{name}." in key]
        head = self.heads.get(role)
        return [p for p in own + (list(head.parameters()) if head else []) if p.requires_grad]

    @property
    def heads(self) -> dict[Role, ScalarHead]:
        """The scalar heads by role."""
        heads: dict[Role, ScalarHead | None] = {"critic": self.value_head, "reward": self.score_head}
        return {role: head for role, head in heads.items() if head is not None}

    # ---- passes that score ------------------------------------------------------------------------

    def policy(self, batch: Generation | Minibatch, *, entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        """log pi(a_t | s_t) and the entropy of pi(. | s_t), each (B, T), under the policy adapter.

        Args:
            entropy: False leaves the entropy out, None, and saves its time and memory.
        """
        return self._logprobs(self._hidden(batch, "policy")[:, :-1], batch, entropy=entropy)

    def reference(self, batch: Generation | Minibatch) -> Tensor:
        """log pi_ref(a_t | s_t), (B, T)."""
        return self._logprobs(self._hidden(batch, "reference")[:, :-1], batch, entropy=False)[0]

    def values(self, batch: Generation | Minibatch) -> Tensor:
        """V(s_0) .. V(s_T), (B, T + 1): the last column is the state after the response's last column."""
        return self._value(self._hidden(batch, "policy" if self.shared_critic else "critic"))

    def policy_and_values(
        self, batch: Generation | Minibatch, *, head_only: bool = False, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probabilities, entropies and values from one forward of the policy's trunk (``critic=shared``).

        ``head_only`` keeps the value loss out of the shared trunk: it then trains the head alone.
        """
        hidden = self._hidden(batch, "policy")
        logprobs, entropies = self._logprobs(hidden[:, :-1], batch, entropy=entropy)
        return logprobs, entropies, self._value(hidden.detach() if head_only else hidden)

    def score(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Reward of whole texts, (B,), read at the last real token by the mask, padded on either side."""
        assert self.score_head is not None
        mask = attention_mask.to(self.device).bool()
        positions = torch.arange(input_ids.shape[1], device=self.device)
        last = (mask.long() * positions).argmax(dim=1)
        with torch.no_grad():
            hidden = self._cells(input_ids.to(self.device), mask, "reward", columns=last.unsqueeze(1))
            return self.score_head(hidden).squeeze(1)

    def _value(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None
        return self.value_head(hidden)

    def _hidden(self, batch: Generation | Minibatch, role: Role) -> Tensor:
        """Hidden states at positions P-1 .. P+T-1, (B, T + 1, H)."""
        ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
        mask = torch.cat([batch.prompt_mask, batch.response_mask], dim=1)
        columns = torch.arange(batch.prompt_ids.shape[1] - 1, ids.shape[1])
        return self._cells(ids, mask, role, columns=columns.expand(len(ids), -1))

    def _cells(self, ids: Tensor, mask: Tensor, role: Role, *, columns: Tensor) -> Tensor:
        """Hidden states under a role of some columns of padded rows, (B, n) -> (B, n, H)."""
        ids, mask = ids.to(self.device), mask.to(self.device)
        columns = columns.to(self.device)
        decoder = self._decoder_for(mask)
        if decoder is None:
            with self.roles.use(role):
                hidden = self._forward(ids, mask)
            return hidden.gather(1, columns.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        real = [row[kept].tolist() for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]
        packing = pack(real).to(self.device)
        x = decoder.forward(packing, self.roles.adapter(role))
        places = (mask.long().cumsum(dim=1) - 1).clamp_min(0).gather(1, columns)
        tokens = packing.index.gather(1, places)
        return decoder.norm(x.index_select(0, tokens.flatten())).view(*tokens.shape, -1)

    def _decoder_for(self, mask: Tensor) -> Decoder | None:
        """The packed decoder, where it reads rows of this length as the modules would."""
        if self.decoder is None or self.decoder.limit is None:
            return self.decoder
        return self.decoder if int(mask.sum(dim=1).max()) <= self.decoder.limit else None

    def _forward(self, ids: Tensor, mask: Tensor, places: Tensor | None = None) -> Tensor:
        """``mask`` is (B, L), or (B, 1, L, L) as the attention takes it, with ``places`` (B, L) beside it."""
        ids, mask = ids.to(self.device), mask.to(self.device)
        output = self.trunk(
            input_ids=ids,
            attention_mask=mask.long() if mask.ndim == 2 else mask,
            position_ids=position_ids(mask) if places is None else places.to(self.device),
            use_cache=False,
        )
        return output.last_hidden_state

    def _logprobs(
        self, hidden: Tensor, batch: Generation | Minibatch, *, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Only tokens that count go through the head; 0 elsewhere."""
        weight, bias, softcap = self.head()
        mask = batch.response_mask.to(self.device)
        real = mask.flatten().nonzero().squeeze(1)
        logprobs, entropies = chunked_token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]).index_select(0, real),
            weight,
            batch.response_ids.to(self.device).flatten()[real],
            temperature=self.temperature / self._scale,
            bias=bias,
            softcap=softcap,
            entropy=entropy,
        )
        return _spread(logprobs, mask), None if entropies is None else _spread(entropies, mask)

    # ---- whole texts: pairs and demonstrations ----------------------------------------------------

    def plant(self, rows: Sequence[Sequence[Segment]]) -> Forest:
        """Texts as one batch in the form that this backbone's attention takes."""
        if self.decoder is not None:  # it finds by itself what texts share
            return plant(rows, pad_id=self.backbone.pad_id, together=False)
        config = self.backbone.model.config.get_text_config()
        width = max(sum(len(segment.ids) for segment in row) for row in rows)
        window = getattr(config, "sliding_window", None) or width  # a mask of our own would lift it
        together = config._attn_implementation in ("sdpa", "eager") and width <= window
        return plant(rows, pad_id=self.backbone.pad_id, together=together)

    def read(self, forest: Forest, role: Role) -> Tensor:
        """Hidden states of a forest under a role, (B, L, H); gradients pass."""
        mask = forest.mask
        if mask.ndim == 2:
            columns = torch.arange(mask.shape[1]).expand(len(mask), -1)
            return self._cells(forest.ids, mask, role, columns=columns)
        if self.backbone.model.config.get_text_config()._attn_implementation == "eager":
            dtype = self.backbone.model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        with self.roles.use(role):
            return self._forward(forest.ids, mask, forest.positions)

    def end_scores(self, forest: Forest, places: Sequence[Place]) -> Tensor:
        """Reward of the texts that end with these segments, (N,) float32; gradients pass."""
        assert self.score_head is not None
        hidden = self.read(forest, "reward")
        rows, ends = torch.tensor([(p.row, p.end - 1) for p in places], device=self.device).unbind(1)
        return self.score_head(hidden[rows, ends])

    def segment_logprobs(self, forest: Forest, places: Sequence[Place], role: Role) -> tuple[Tensor, Tensor]:
        """log pi of every token of these segments under a role, (N, T) float32, and the mask of real ones.

        At temperature 1: a demonstration was not sampled. Gradients pass.
        """
        rows, sources, targets, mask = (x.to(self.device) for x in predictors(places))
        hidden = self.read(forest, role)[rows, sources]
        weight, bias, softcap = self.head()
        tokens = forest.ids.to(self.device)[rows, targets]
        logprobs, _ = chunked_token_logprobs(
            hidden, weight, tokens, temperature=1.0 / self._scale, bias=bias, softcap=softcap, entropy=False
        )
        return logprobs, mask

    # ---- sampling ---------------------------------------------------------------------------------

    def head(self) -> tuple[Tensor, Tensor | None, float | None]:
        """Weight (V, H), bias (V,) and soft cap of the language-model head."""
        module = self.backbone.model.get_output_embeddings()
        return module.weight, getattr(module, "bias", None), self._softcap

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits divided by the temperature, float32, (N, H) -> (N, V)."""
        weight, bias, softcap = self.head()
        hidden = hidden.to(weight.dtype)
        logits = linear(hidden, weight, bias) if self._packed_head is None else self._packed_head(hidden)
        return capped(logits, softcap).div_(self.temperature / self._scale)

    @contextmanager
    def rolling_out(self) -> Iterator[None]:
        """Inside, unless ``model.rollout_weights`` is nf4, 4-bit weights are held in the dtype of the
        arithmetic too: the same numbers without unpacking them for every pass."""
        if self.decoder is None or self._rollout_weights == "nf4":
            yield
            return
        try:
            self.decoder.keep_dequantised(True)
            yield
        finally:
            self.decoder.keep_dequantised(False)

    @contextmanager
    def sampling(self, role: Role) -> Iterator[None]:
        """Inside, with ``model.rollout_weights=packed``, head and layers under the role's adapter are held in
        the layout of a CPU's products too: the same numbers but for rounding. The adapter must not change."""
        if self.decoder is None or self._rollout_weights != "packed":
            yield
            return
        weight, bias, _ = self.head()
        held = self.decoder.dequantised
        try:
            self.decoder.keep_dequantised(False)  # one copy at a time
            self.decoder.pack(self.roles.adapter(role))
            self._packed_head = Packed(weight, bias)
            yield
        finally:
            self.decoder.unpack()
            self._packed_head = None
            give_back_freed_memory()  # else what comes next lies beside the copy's empty room
            self.decoder.keep_dequantised(held)

    def speaker(self, texts: Sequence[Sequence[int]], role: Role, *, room: int) -> Speaker:
        """A role that goes on from these texts.

        Args:
            texts: token ids, none empty.
            room: new tokens at most.
        """
        longest = max(map(len, texts)) + room
        if self.decoder is not None and (self.decoder.limit is None or longest <= self.decoder.limit):
            return DecoderSpeaker(self.decoder, texts, room=room, adapter=self.roles.adapter(role))
        return ModuleSpeaker(self.trunk, self.backbone, texts, lambda: self.roles.use(role))

    # ---- saving -----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """The adapters that train, one folder a role in PEFT's format, with its scalar head and the
        backbone's identity beside it."""
        learning = [role for role in self.roles if self.parameters_of(role)]
        own = {role: name for role in learning if (name := self.roles.adapter(role)) == role}
        name_base(self.model, self._path)
        self.model.save_pretrained(str(folder), selected_adapters=list(own.values()))
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card: a form with nothing filled in
        for role in own:
            self._identity.save(folder / role)
        for role, head in self.heads.items():
            if role in learning:
                (folder / role).mkdir(exist_ok=True)
                head.save(folder / role / HEAD_FILES[role])

    def weights(self) -> list[RoleWeight]:
        """Tensors and bytes of the backbone and of what each role adds to it."""
        return weigh(self)


def _spread(figures: Tensor, mask: Tensor) -> Tensor:
    """One figure for each True of the mask, in its place; 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=figures.dtype, device=mask.device).masked_scatter(mask, figures)
