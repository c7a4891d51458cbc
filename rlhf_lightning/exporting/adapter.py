"""The adapter as it is, in PEFT's format, with what is needed beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from rlhf_lightning.assets import tiny_path
from rlhf_lightning.config.subject import Subject
from rlhf_lightning.errors import UserError
from rlhf_lightning.exporting.card import card
from rlhf_lightning.models.adapters import SCORE_HEAD, find_adapter
from rlhf_lightning.models.identity import FILE

_CONFIG = "adapter_config.json"

_POLICY = """
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained({base!r}, dtype="bfloat16")
model = PeftModel.from_pretrained(model, FOLDER)
"""
_REWARD = """
# The score is h @ weight + bias in float32; h is the hidden state of the last token, the end token.
# rlhf_lightning takes the folder as it is: reward=learned reward.path=FOLDER
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({base!r}, dtype="bfloat16")
model = PeftModel.from_pretrained(model, FOLDER)
head = load_file(FOLDER + "/score_head.safetensors")
"""


def base_of(subject: Subject) -> str:
    """What Transformers is given to load the base model."""
    path = subject.model.path
    return str(tiny_path("model")) if path == "tiny" else str(Path(path).expanduser())


def write(subject: Subject, folder: Path) -> list[str]:
    """Copy adapter, score head and tokenizer into ``folder`` and add a card.

    Returns:
        Lines that tell what was done.

    Raises:
        UserError: the adapter or the base model's tokenizer cannot be had.
    """
    assert subject.adapter is not None
    source = find_adapter(subject.adapter, key="RUN", want="reward" if subject.judges else "policy")
    base = base_of(subject)
    for file in source.iterdir():
        if file.name in (SCORE_HEAD, FILE) or file.name.startswith("adapter_model."):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    load_tokenizer(subject).save_pretrained(folder)
    how = (_REWARD if subject.judges else _POLICY).format(base=base)
    notes = [trained_on(subject)]
    (folder / "README.md").write_text(card(subject, base=base, library="peft", how=how, notes=notes), "utf-8")
    return [f"adapter   of {base}, rank {config.get('r')}"]


def trained_on(subject: Subject) -> str:
    """How the base was stored in training: the adapter has learned to live with its rounding."""
    if subject.config is None:
        return ""
    model = subject.model
    storage = "nf4 weights" if model.quantization == "nf4" else "plain weights"
    return f"In training the base had {storage} and computed in {model.dtype}."


def load_tokenizer(subject: Subject):  # type: ignore[no-untyped-def]  # Transformers' own union of classes
    """The base model's tokenizer, chat template and all.

    Raises:
        UserError: it cannot be had.
    """
    model = subject.model
    try:
        return AutoTokenizer.from_pretrained(
            base_of(subject), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            f"--model {model.path}: its tokenizer cannot be loaded ({said}); "
            "say with --model where the base model lies"
        ) from error
