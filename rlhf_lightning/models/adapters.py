"""Puts the roles' LoRA adapters on the backbone, fresh or from folders, and decides once who trains."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig, PeftConfig, PeftModel

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models.backbone import Backbone
from rlhf_lightning.models.heads import ScalarHead
from rlhf_lightning.models.roles import Role

SCORE_HEAD = "score_head.safetensors"


def add_adapters(
    backbone: Backbone, config: ModelConfig, *, reward_path: str | None
) -> tuple[PeftModel, dict[Role, str | None]]:
    """Wrap the backbone with the adapters that the roles need.

    policy: fresh, or a trainable copy of ``model.adapter``. critic: fresh, or a trainable copy of the reward adapter, or
    the policy's own (``critic=shared``). reference: none, or a frozen copy of ``model.adapter``. reward: frozen.

    Returns:
        The wrapped model, and the adapter's name for each role.

    Raises:
        UserError: a folder holds no adapter, or one that does not fit this backbone.
    """
    fresh = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        model = PeftModel(backbone.model, _peft_config(config.adapter, "model.adapter") or fresh, adapter_name="policy")
        if config.critic == "adapter":
            model.add_adapter("critic", _peft_config(_reward_folder(reward_path), "reward.path") or fresh)
    except ValueError as error:
        raise UserError(f"model.lora.target_modules={config.lora.target_modules!r} does not fit the model: {error}") from error
    adapters: dict[Role, str | None] = {"policy": "policy", "critic": "policy", "reference": None}
    if config.adapter is not None:
        _load(model, config.adapter, "policy", key="model.adapter")
        model.load_adapter(_folder(config.adapter, "model.adapter"), adapter_name="reference")
        adapters["reference"] = "reference"
    if config.critic == "adapter":
        adapters["critic"] = "critic"
        if reward_path is not None:
            _load(model, _reward_folder(reward_path), "critic", key="reward.path")
    if reward_path is not None:
        model.load_adapter(_folder(_reward_folder(reward_path), "reward.path"), adapter_name="reward")
        adapters["reward"] = "reward"
    trained = {"policy", adapters["critic"]}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name and any(f".{adapter}." in name for adapter in trained))
    return model, adapters


def add_score_head(backbone: Backbone, reward_path: str | None) -> ScalarHead | None:
    """The frozen float32 head that reads the reward adapter's last hidden state."""
    if reward_path is None:
        return None
    head = ScalarHead(backbone.hidden_size).to(backbone.model.device)
    file = Path(_folder(_reward_folder(reward_path), "reward.path")) / SCORE_HEAD
    if not file.exists():
        raise UserError(f"reward.path={reward_path!r} holds an adapter but no {SCORE_HEAD}: it is not a reward model")
    head.load(file)
    return head.requires_grad_(False)


def _reward_folder(reward_path: str | None) -> str | None:
    return str(tiny_path("reward")) if reward_path == "tiny" else reward_path


def _folder(path: str | None, key: str) -> str:
    folder = Path(str(path)).expanduser()
    if not (folder / "adapter_config.json").exists():
        raise UserError(f"{key}={path!r} must be a folder with adapter_config.json (PEFT's format), and has none")
    return str(folder)


def _peft_config(path: str | None, key: str) -> PeftConfig | None:
    if path is None:
        return None
    config = PeftConfig.from_pretrained(_folder(path, key))
    config.inference_mode = False
    return config


def _load(model: PeftModel, path: str | None, adapter: str, *, key: str) -> None:
    """Copy a saved adapter's tensors into ``adapter``; every tensor has to find its place."""
    from peft import load_peft_weights, set_peft_model_state_dict

    result = set_peft_model_state_dict(model, load_peft_weights(_folder(path, key)), adapter_name=adapter)
    missing = [name for name in result.missing_keys if f".{adapter}." in name]
    if missing or result.unexpected_keys:
        raise UserError(
            f"{key}={path!r} does not fit this backbone: {len(missing)} tensors missing, "
            f"{len(result.unexpected_keys)} left over (first: {(missing + result.unexpected_keys)[0]})"
        )
