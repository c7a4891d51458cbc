"""Each phase's seconds against a setting, from real runs of a small model."""

from __future__ import annotations

import json

from benchmarks import scaling
from benchmarks.race.ours import composed


def test_a_point_is_a_run_of_its_sizes_on_files_of_its_own(tmp_path):
    point = scaling.BASE | {"answers": 8, "layers": 2, "vocabulary": 8192}
    config = composed(scaling.words(tmp_path, point))
    assert config.ppo.prompts_per_iteration == 8
    assert config.ppo.epochs == point["epochs"]
    assert config.generation.max_new_tokens == point["tokens an answer"]
    shape = json.loads((tmp_path / "model-2-8192" / "config.json").read_text())
    assert shape["num_hidden_layers"] == 2 and shape["vocab_size"] == 8192
    assert len((tmp_path / "8.jsonl").read_text().splitlines()) >= 8


def test_the_table_has_a_fitted_line_for_every_phase(tmp_path, monkeypatch, capsys):
    small = {"answers": 8, "tokens an answer": 4, "epochs": 1, "vocabulary": 1024, "layers": 1}
    monkeypatch.setattr(scaling, "BASE", small)
    monkeypatch.setattr(scaling, "POINTS", {"epochs": (1, 4)})
    out = tmp_path / "scaling.json"
    assert scaling.main(["--out", str(out)]) == 0
    found = json.loads(out.read_text())["epochs"]
    assert set(found) == {"1", "4"}
    assert all(seconds > 0 for phases in found.values() for seconds in phases.values())
    assert capsys.readouterr().out.count("epochs: 1, 4") == 3


def test_the_line_by_hand(monkeypatch, capsys):
    """The first iteration is left out, the others' median counts: 0.25 s and half a second an epoch."""

    def timed(command):
        (epochs,) = (int(word.removeprefix("ppo.epochs=")) for word in command if "ppo.epochs=" in word)
        update = 0.25 + 0.5 * epochs
        return {
            "phases": {"rollout": [9.0, 2.0, 2.0], "score": [9.0, 1.0, 1.0], "update": [9.0, update, update]}
        }

    monkeypatch.setattr(scaling, "run_json", timed)
    monkeypatch.setattr(scaling, "BASE", {**scaling.BASE, "vocabulary": 1024, "layers": 1})
    monkeypatch.setattr(scaling, "POINTS", {"epochs": (1, 2, 4)})
    assert scaling.main([]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1:4] for row in rows] == [
        ["rollout", "2.000 2.000 2.000", "2.000 + 0 ms x"],
        ["score", "1.000 1.000 1.000", "1.000 + 0 ms x"],
        ["update", "0.750 1.250 2.250", "0.250 + 500 ms x"],
    ]
