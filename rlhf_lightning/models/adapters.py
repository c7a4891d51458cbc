"""Puts the roles' LoRA adapters on the backbone, fresh or from folders, and decides once who trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.backbone import Backbone, silence_dropout
from rlhf_lightning.models.cast import Cast, Part
from rlhf_lightning.models.heads import ScalarHead
from rlhf_lightning.models.roles import Role

SCORE_HEAD = "score_head.safetensors"
HEAD_FILES: dict[Role, str] = {"critic": "value_head.safetensors", "reward": SCORE_HEAD}


def add_adapters(
    backbone: Backbone, config: ModelConfig, cast: Cast
) -> tuple[PeftModel, dict[Role, str | None]]:
    """Wrap the backbone with the adapters that the roles need.

    Two roles may name one adapter (a critic on the policy's trunk); the first decides what it starts from.

    Returns:
        The wrapped model, and the adapter's name for each role.

    Raises:
        UserError: a folder holds no adapter, or one that does not fit this backbone.
    """
    fresh = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # a factor; PEFT's annotation says int
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    model: PeftModel | None = None
    placed: set[str] = set()
    try:
        for part in cast.values():
            if part.adapter is None or part.adapter in placed:
                continue
            placed.add(part.adapter)
            own = fresh if part.start is None else _config_of(part.start, part.key)
            if model is None:
                model = PeftModel(backbone.model, own, adapter_name=part.adapter)
            else:
                model.add_adapter(part.adapter, own)
    except ValueError as error:
        raise UserError(
            f"model.lora.target_modules={config.lora.target_modules!r} does not fit the model: {error}"
        ) from error
    if model is None:
        raise ValueError("no role has an adapter")
    for part in {part.adapter: part for part in reversed(cast.values())}.values():
        if part.adapter is not None and part.start is not None:
            _fill(model, part.adapter, part.start, key=part.key)
    _refuse_a_head_of_its_own(model, config)
    learning = {part.adapter for part in cast.values() if part.trains}
    if config.lora.dropout == 0:
        silence_dropout(model)  # a saved adapter keeps the dropout that it was trained with
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name and any(f".{adapter}." in name for adapter in learning))
    return model, {role: part.adapter for role, part in cast.items()}


def add_score_head(backbone: Backbone, part: Part | None) -> ScalarHead | None:
    """The float32 head that reads the reward adapter's last hidden state: a new one where it is to learn."""
    if part is None:
        return None
    head = ScalarHead(backbone.hidden_size).to(backbone.model.device)
    if part.trains:
        return head
    assert part.start is not None
    folder = _folder(part.start)
    if not (folder / SCORE_HEAD).exists():
        raise UserError(
            f"{part.key}={part.start!r} holds an adapter but no {SCORE_HEAD}: it is not a reward model"
        )
    head.load(folder / SCORE_HEAD)
    return head.requires_grad_(False)


def _folder(path: str) -> Path:
    return tiny_path("reward") if path == "tiny" else Path(path).expanduser()


def _config_of(path: str, key: str) -> PeftConfig:
    folder = _folder(path)
    if not (folder / "adapter_config.json").exists():
        raise UserError(
            f"{key}={path!r} must be a folder with adapter_config.json (PEFT's format), and has none"
        )
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    if found := _more_than_low_rank(config):
        raise UserError(
            f"{key}={path!r} does more than add low-rank terms ({found}): it would change the backbone that "
            "all roles share; train a LoRA adapter without that"
        )
    return config


def _more_than_low_rank(config: PeftConfig) -> str | None:
    """What an adapter brings beside low-rank terms: it would stay in force under the other roles too."""
    if not isinstance(config, LoraConfig):
        return f"peft_type={getattr(config.peft_type, 'value', config.peft_type)}"
    if config.bias != "none":
        return f"bias={config.bias}"
    for name in ("modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters"):
        if value := getattr(config, name, None):
            return f"{name}={value}"
    start = str(config.init_lora_weights)
    return f"init_lora_weights={start}" if start.startswith(("pissa", "olora", "corda", "loftq")) else None


def _refuse_a_head_of_its_own(model: PeftModel, config: ModelConfig) -> None:
    """Logits are read from the head's own weight, so a term on it would be neither sampled nor scored."""
    base: Any = model.get_base_model()
    if isinstance(base.get_output_embeddings(), BaseTunerLayer):
        where = "model.lora.target_modules" if config.adapter is None else f"model.adapter={config.adapter!r}"
        raise UserError(f"{where} names the language-model head, which stays as it is: leave it out")


def _fill(model: PeftModel, adapter: str, path: str, *, key: str) -> None:
    """Copy a saved adapter's tensors into ``adapter``; every one has to fit."""
    try:
        tensors = load_peft_weights(str(_folder(path)))
        result: Any = set_peft_model_state_dict(model, tensors, adapter_name=adapter)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(f"{key}={path!r} does not fit this backbone: {first}") from error
    missing = [name for name in result.missing_keys if f".{adapter}." in name]
    if missing or result.unexpected_keys:
        raise UserError(
            f"{key}={path!r} does not fit this backbone: {len(missing)} tensors missing, "
            f"{len(result.unexpected_keys)} left over (first: {(missing + result.unexpected_keys)[0]})"
        )
