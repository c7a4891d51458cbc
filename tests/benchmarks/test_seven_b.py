"""A random Llama on disk, its one iteration on a CPU, and the GPU's benchmark with a toy shape."""

from __future__ import annotations

import json
from math import prod

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import gpu, seven_b
from benchmarks.rollout import Timed, race, table
from rlhf_lightning.errors import UserError
from rlhf_lightning.types import Prompts
from scripts.random_llama import llama_config, main, shards

SMALL = ["--layers", "2", "--hidden", "64", "--heads", "4", "--intermediate", "128", "--vocab", "1024"]


def test_the_default_is_llama_2_7b():
    sizes = [prod(shape) for file in shards(llama_config()) for shape in file.values()]
    assert sum(sizes) == 6_738_415_616


def test_what_is_written_loads_whole(toy_llama):
    model, info = AutoModelForCausalLM.from_pretrained(toy_llama, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16 and not model.config.tie_word_embeddings
    weight = model.model.layers[1].mlp.up_proj.weight.detach().float()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.05) and abs(weight.mean()) < 1e-3
    assert (model.model.norm.weight == 1).all()
    ids = AutoTokenizer.from_pretrained(toy_llama).get_vocab().values()
    assert max(ids) < model.config.vocab_size


def test_the_index_names_every_tensor_and_its_file(toy_llama):
    index = json.loads((toy_llama / "model.safetensors.index.json").read_text())
    found, size = {}, 0
    for path in toy_llama.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
            size += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert found == index["weight_map"] and size == index["metadata"]["total_size"]


def test_a_folder_in_use_or_a_shape_that_is_none_is_refused(toy_llama, tmp_path, capsys):
    for line, said in (
        ([str(toy_llama), *SMALL], "holds files"),
        ([str(tmp_path / "a"), *SMALL, "--heads", "5"], "--heads 5 must divide --hidden 64 exactly"),
        ([str(tmp_path / "a"), *SMALL, "--kv-heads", "3"], "--kv-heads 3 must divide --heads 4 exactly"),
        ([str(tmp_path / "a"), *SMALL, "--vocab", "9"], "--vocab 9 must be at least the tokenizer's 1024"),
    ):
        assert main(line) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_one_iteration_with_its_peaks(toy_llama, tmp_path, capsys):
    out = tmp_path / "figures.json"
    assert seven_b.main([str(toy_llama), "--out", str(out), "--limit", "100"]) == 0
    found = json.loads(out.read_text())
    assert found["prompt_tokens"] == [32, 32] and found["response_tokens"] == [8, 8]
    assert set(found["peaks_gb"]) == set(found["seconds"]) == {"load", "rollout", "score", "update"}
    assert found["peak_gb"] == max(found["peaks_gb"].values())
    assert found["roles"]["reward"] > 0 and found["roles"]["reference"] == 0
    assert "| update |" in capsys.readouterr().out


def test_too_much_memory_is_a_failure(toy_llama):
    assert seven_b.main([str(toy_llama), "--limit", "0.001"]) == 1


def test_a_folder_without_a_model_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"nothing holds no model: `python -m scripts.random_llama"):
        seven_b.main([str(tmp_path / "nothing")])


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "figures.json"
    sizes = [
        "--batch",
        "4",
        "--prompt",
        "12",
        "--new",
        "4",
        "--micro",
        "2",
        "--iterations",
        "2",
        "--repeats",
        "1",
    ]
    assert gpu.main([*SMALL, *sizes, "--set", "trainer=cpu", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["tokens_per_s"] == pytest.approx(4 * 4 / found["seconds_an_iteration"])
    assert [row["batch"] for row in found["rollout"]] == [4, 4]
    printed = capsys.readouterr().out
    assert printed.startswith("CPU ") and "bfloat16 without adapter" in printed


def test_the_wrong_shape_is_refused_before_anything_is_drawn():
    with pytest.raises(UserError, match="must divide --hidden"):
        gpu.main(["--heads", "5", "--hidden", "64"])


def test_both_sides_have_to_sample_the_same_number_of_tokens():
    prompts = Prompts(((1,), (2,)), ("a", "b"), (0, 1))
    names = ("theirs", "ours")
    timed = race(lambda p: 6, lambda p: 6, prompts, names=names, length=3, repeats=2)
    assert timed.batch == 2 and len(timed.ours_tokens_per_s) == len(timed.peer_tokens_per_s) == 2
    with pytest.raises(ValueError, match="ours sampled 5 tokens, not 2 x 3"):
        race(lambda p: 6, lambda p: 5, prompts, names=names, length=3, repeats=2)


def test_the_ratio_is_the_median_of_the_pairs():
    row = Timed("theirs", "ours", 16, [10.0, 20.0, 40.0], [20.0, 80.0, 40.0])  # 2, 4, 1
    assert row.ratio == 2.0
    assert table([row]).splitlines()[2] == "| theirs; ours ours | 16 | 20.0 | 40.0 | 2.00 |"
