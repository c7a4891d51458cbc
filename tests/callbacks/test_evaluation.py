"""Evaluation while PPO trains: what it adds, and that it changes nothing."""

import csv
import json

import pytest
import torch

from rlhf_lightning.build import build_parts
from rlhf_lightning.callbacks.evaluation import flat_rows
from rlhf_lightning.config.schema import Config
from rlhf_lightning.run import fit


@pytest.fixture
def trained(model_folders, tmp_path):
    """``trained(every) -> (run folder, rows of metrics.csv)``: three iterations of PPO on a small Llama."""

    def run(every: int):
        folder = tmp_path / f"every_{every}"
        folder.mkdir()
        for name, text in (
            ("learn", "the soup\na slow waiter\nwe\n"),
            ("measure", "the bread\nnothing on\n"),
        ):
            (tmp_path / f"{name}.txt").write_text(text)
        config = Config.model_validate(
            {
                "ppo": {"iterations": 3, "prompts_per_iteration": 4, "minibatch_size": 4, "epochs": 1,
                        "micro_batch_size": 4, "lr": 0.01},
                "model": {"path": str(model_folders["llama"]), "quantization": "none", "dtype": "float32"},
                "generation": {"max_new_tokens": 6},
                "data": {"path": str(tmp_path / "learn.txt"), "held_out": str(tmp_path / "measure.txt")},
                "reward": {"kind": "regex", "pattern": "e"},
                "evaluate": {"every": every, "bootstrap": 100},
                "trainer": {"accelerator": "cpu"},
                "callbacks": {"progress": False, "show": 0},
            }
        )  # fmt: skip
        fit(build_parts(config), config, folder)
        with (folder / "metrics.csv").open() as file:
            return folder, list(csv.DictReader(file))

    return run


def test_evaluating_changes_nothing_in_training(trained):
    quiet, watched = trained(0)[1], trained(2)[1]
    for before, after in zip(quiet, watched, strict=True):
        assert not any(name.startswith("eval/") for name in before)
        for name, value in before.items():
            assert after[name] == value, name


def test_it_looks_every_so_many_iterations_and_at_the_end(trained):
    folder, rows = trained(2)
    assert [row["eval/score"] != "" for row in rows] == [False, True, True]
    report = json.loads((folder / "evaluation.json").read_text())
    assert report["iteration"] == 2
    assert report["metrics"]["eval/score"] == float(rows[2]["eval/score"])
    answers = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in answers] == ["the bread", "nothing on"]
    assert set(answers[0]) == {"prompt", "sample", "kl", "policy", "reference"}
    # the best checkpoint follows the held-out score
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["stage"]["counters"][
        "iteration"
    ]
    scores = {int(row["iteration"]): float(row["eval/score"]) for row in rows[1:]}
    assert best == max(scores, key=lambda k: (scores[k], -k)) + 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["objective"] == "eval/score"
    assert summary["best"]["eval/score"] == max(scores.values())


def test_the_trackers_table_has_a_column_for_each_answer_and_score():
    answer = {"response": "warm", "score": 1.0, "parts": {}, "length": 2, "ended": "eos"}
    row = {"prompt": "soup", "sample": 0, "kl": 0.5, "policy": answer, "reference": answer | {"score": 0.0}}
    assert flat_rows([row]) == [
        {
            "prompt": "soup",
            "kl": 0.5,
            "policy": "warm",
            "reference": "warm",
            "policy_score": 1.0,
            "reference_score": 0.0,
        }
    ]
