"""A separate frozen sequence classifier with its own tokenizer, fed text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_lightning.config.rewards import ClassifierRewardConfig
from rlhf_lightning.data.encoding import single_bos
from rlhf_lightning.data.padding import right_pad
from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.base import checked
from rlhf_lightning.rewards.learned import UNLIMITED, by_length
from rlhf_lightning.types import Scores


class ClassifierReward:
    """Scores prompt + response as one text, or the response alone.

    Texts, never the policy's ids, are what travels: the classifier has its own vocabulary. It is no
    submodule of anything, so that no trainer wakes its dropout, moves it or saves it. On a CPU it runs in
    float32; on other devices in the checkpoint's own dtype, where a score may move in its last digits with
    the batch.

    Raises:
        UserError: weights or tokenizer cannot be had, the checkpoint has no classification head, or
            ``label`` is none of its logits.
    """

    def __init__(
        self, config: ClassifierRewardConfig, *, device: torch.device | str = "cpu", name: str = "reward"
    ) -> None:
        self.config = config
        self.name = name
        self.device = torch.device(device)
        self.tokenizer, self.model = _load(config.path, self.device, name)
        self.tokenizer.truncation_side = "left"  # the end of the answer is what is judged
        self.text_config = self.model.config.get_text_config()
        self.labels = int(self.model.config.num_labels)
        if not -self.labels <= config.label < self.labels:
            raise UserError(
                f"{name}.label must be in {-self.labels}..{self.labels - 1} for the {self.labels} logits of "
                f"{config.path}, got {config.label}"
            )
        limits = (config.max_length, self.tokenizer.model_max_length, _positions(self.text_config))
        self.max_length = min(limit for limit in limits if limit < UNLIMITED)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        alone = self.config.response_only
        rows = [
            self._encode(response if alone else prompt + response)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        scores = torch.zeros(len(rows))
        for batch in by_length(rows, self.config.batch_size):
            scores[batch] = self._score([rows[row] for row in batch]).cpu()
        return Scores(checked(scores, name=self.name, prompts=prompts, responses=responses), {})

    def _encode(self, text: str) -> list[int]:
        ids = single_bos(self.tokenizer, text, truncation=True, max_length=self.max_length)
        ends = (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, self.tokenizer.pad_token_id, 0)
        # An empty text still has to be read somewhere.
        return ids or [next(end for end in ends if end is not None)]

    @torch.no_grad()
    def _score(self, rows: list[list[int]]) -> Tensor:
        pad = self._pad_id(rows)
        ids, mask = (tensor.to(self.device) for tensor in right_pad(rows, pad))
        self.model.eval()
        # Decoders look for the last token that is not the pad id: for this batch, that is the last real one.
        self.text_config.pad_token_id = pad
        logits = self.model(input_ids=ids, attention_mask=mask.long()).logits.float()
        if not self.config.probability:
            return logits[:, self.config.label]
        several = getattr(self.model.config, "problem_type", None) == "multi_label_classification"
        share = logits.sigmoid() if self.labels == 1 or several else logits.softmax(dim=1)
        return share[:, self.config.label]

    def _pad_id(self, rows: list[list[int]]) -> int:
        """An id that no row ends with: the tokenizer's pad where that is so, else the smallest such.

        Where pad = eos, an answer's own end token would be taken for padding and the score read before it.
        """
        last = {row[-1] for row in rows}
        own = self.tokenizer.pad_token_id
        if own is not None and own not in last:
            return own
        return next(token for token in range(len(last) + 1) if token not in last)


def _load(path: str, device: torch.device, name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = str(Path(path).expanduser())
    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{name}.path={path}: no sequence classifier could be loaded ({said[0]}); point it at a folder "
            "that holds the weights and the tokenizer, or at a hub id that can be reached"
        ) from error
    missing = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if missing:
        # Transformers fills them with random numbers and only warns.
        raise UserError(
            f"{name}.path={path} is not a trained sequence classifier: it holds no {', '.join(missing[:3])}"
        )
    return tokenizer, model.to(device).eval().requires_grad_(False)


def _positions(config: Any) -> int:
    """Positions that the model has; RoBERTa and its kin count from pad_token_id + 1."""
    positions = getattr(config, "max_position_embeddings", None) or UNLIMITED
    offset = config.pad_token_id + 1 if config.model_type in {"roberta", "xlm-roberta", "camembert"} else 0
    return positions - offset
