"""Puts the roles' LoRA adapters on the backbone, fresh or from folders, and decides once who trains."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.locate import SCORE_HEAD, VALUE_HEAD, Want, locate, refuse_another_shape
from rlhf_lightning.config.schema import ModelConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.models import identity
from rlhf_lightning.models.backbone import Backbone, silence_dropout
from rlhf_lightning.models.cast import Cast, Part
from rlhf_lightning.models.heads import ScalarHead
from rlhf_lightning.models.roles import Role

HEAD_FILES: dict[Role, str] = {"critic": VALUE_HEAD, "reward": SCORE_HEAD}
_ON_THE_HUB = ("adapter_config.json", "adapter_model.*", SCORE_HEAD, identity.FILE)


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
    folders = _folders(backbone, config, cast)
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
        for role, part in cast.items():
            if part.adapter is None or part.adapter in placed:
                continue
            placed.add(part.adapter)
            own = fresh if role not in folders else _config_of(folders[role], part)
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
    for role in {part.adapter: role for role, part in reversed(cast.items())}.values():
        if role in folders:
            _fill(model, cast[role], folders[role])
    _refuse_a_head_of_its_own(model, config)
    _refuse_a_new_term_on_the_embedding(model, {cast[role].adapter for role in folders})
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
    head.load(find_adapter(part.start, key=part.key, want="reward") / SCORE_HEAD)
    return head.requires_grad_(False)


def find_adapter(path: str, *, key: str, want: Want) -> Path:
    """The folder of the adapter that ``path`` leads to; what lies on the hub is fetched first.

    Args:
        path, key, want: as ``locate`` takes them.

    Raises:
        UserError: there is no such adapter.
    """
    found = locate(path, key=key, want=want)
    if found.kind != "hub":
        return Path(found.folder)
    try:
        folder = snapshot_download(path, allow_patterns=list(_ON_THE_HUB))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}={path}: there is no such folder, and the hub cannot be reached or does not hand it out"
        ) from error
    if not (Path(folder) / "adapter_config.json").is_file():
        raise UserError(f"{key}={path} on the hub holds no adapter: there is no adapter_config.json in it")
    return Path(locate(folder, key=key, want=want).folder)


def _folders(backbone: Backbone, config: ModelConfig, cast: Cast) -> dict[Role, Path]:
    """Folder of the adapter that each role starts from, where it is not fresh; all fit the backbone."""
    folders: dict[Role, Path] = {}
    own: identity.Identity | None = None
    for role, part in cast.items():
        if part.adapter is None or part.start is None:
            continue
        # A frozen reward and the critic that starts from it need the head; one that trains brings its own.
        judges = (role == "critic" and part.adapter == role) or (role == "reward" and not part.trains)
        want: Want = "reward" if judges else "policy"
        at = f"{part.key}={part.start}"
        folders[role] = folder = find_adapter(part.start, key=part.key, want=want)
        refuse_another_shape(locate(str(folder), key=part.key, want=want), config.path, at=at)
        if (folder / identity.FILE).is_file():
            own = own or identity.identify(backbone, config.path)
            identity.compare(folder, own, at=at)
    return folders


def _config_of(folder: Path, part: Part) -> PeftConfig:
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    if found := _more_than_low_rank(config):
        raise UserError(
            f"{part.key}={part.start!r} does more than add low-rank terms ({found}): it would change the "
            "backbone that all roles share; train a LoRA adapter without that"
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


def _refuse_a_new_term_on_the_embedding(model: PeftModel, loaded: set[str | None]) -> None:
    """Only terms on linear maps train; one that an adapter brings along is read as it is."""
    base: Any = model.get_base_model()
    if set(getattr(base.get_input_embeddings(), "lora_embedding_A", ())) - loaded:
        raise UserError(
            "model.lora.target_modules names the token embedding, where no term would learn: leave it out"
        )


def _fill(model: PeftModel, part: Part, folder: Path) -> None:
    """Copy a saved adapter's tensors into the part's; every one has to fit."""
    adapter, key, path = part.adapter, part.key, part.start
    assert adapter is not None
    try:
        tensors = load_peft_weights(str(folder))
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


def name_base(model: PeftModel, path: str) -> None:
    """Write into every adapter's config which model it sits on: a copy of another would name that one's.

    The names of its modules, a set in memory, get an order, so that two files of one run are equal.
    """
    base = str(tiny_path("model")) if path == "tiny" else path
    configs: Iterable[Any] = model.peft_config.values()
    for config in configs:
        config.base_model_name_or_path = base
        if isinstance(config.target_modules, set):
            config.target_modules = sorted(config.target_modules)
