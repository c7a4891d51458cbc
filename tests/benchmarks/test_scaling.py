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
    assert found["4"]["update"] > 2 * found["1"]["update"] > 0
    assert capsys.readouterr().out.count("epochs: 1, 4") == 3
