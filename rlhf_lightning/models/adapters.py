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
from rlhf_lightning.models.heads import ScalarHead
from rlhf_lightning.models.roles import Role

SCORE_HEAD = "score_head.safetensors"


def add_adapters(
    backbone: Backbone, config: ModelConfig, *, reward_path: str | None
) -> tuple[PeftModel, dict[Role, str | None]]:
    """Wrap the backbone with the adapters that the roles need.

    policy: fresh, or a trainable copy of ``model.adapter``. critic: fresh, or a trainable copy of the reward
    adapter, or the policy's own (``critic=shared``). reference: none, or a frozen copy of ``model.adapter``.
    reward: frozen.

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
    reward = str(tiny_path("reward")) if reward_path == "tiny" else reward_path
    try:
        start = fresh if config.adapter is None else _config_of(config.adapter, "model.adapter")
        model = PeftModel(backbone.model, start, adapter_name="policy")
        if config.critic == "adapter":
            model.add_adapter("critic", fresh if reward is None else _config_of(reward, "reward.path"))
    except ValueError as error:
        raise UserError(
            f"model.lora.target_modules={config.lora.target_modules!r} does not fit the model: {error}"
        ) from error
    adapters: dict[Role, str | None] = {"policy": "policy", "critic": "policy", "reference": None}
    if config.adapter is not None:
        _fill(model, "policy", config.adapter, key="model.adapter")
        _fill(model, "reference", config.adapter, key="model.adapter")
        adapters["reference"] = "reference"
    if config.critic == "adapter":
        adapters["critic"] = "critic"
        if reward is not None:
            _fill(model, "critic", reward, key="reward.path")
    if reward is not None:
        _fill(model, "reward", reward, key="reward.path")
        adapters["reward"] = "reward"
    _refuse_a_head_of_its_own(model, config)
    silence_dropout(model)  # a saved adapter keeps the dropout that it was trained with
    trained = {"policy", adapters["critic"]}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name and any(f".{adapter}." in name for adapter in trained))
    return model, adapters


def add_score_head(backbone: Backbone, reward_path: str | None) -> ScalarHead | None:
    """The frozen float32 head that reads the reward adapter's last hidden state."""
    if reward_path is None:
        return None
    folder = tiny_path("reward") if reward_path == "tiny" else Path(reward_path).expanduser()
    if not (folder / SCORE_HEAD).exists():
        raise UserError(
            f"reward.path={reward_path!r} holds an adapter but no {SCORE_HEAD}: it is not a reward model"
        )
    head = ScalarHead(backbone.hidden_size).to(backbone.model.device)
    head.load(folder / SCORE_HEAD)
    return head.requires_grad_(False)


def _config_of(path: str, key: str) -> PeftConfig:
    folder = Path(path).expanduser()
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
    """Copy a saved adapter's tensors into ``adapter``, made here where it is new; every one has to fit."""
    if adapter not in model.peft_config:
        model.add_adapter(adapter, _config_of(path, key))
    try:
        tensors = load_peft_weights(str(Path(path).expanduser()))
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
