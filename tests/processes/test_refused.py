"""What cannot be continued is refused whole; a full disk costs no run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from rlhf_lightning.callbacks.saved import Saved, last_checkpoint
from rlhf_lightning.errors import UserError
from tests.processes.words import PPO


@pytest.fixture
def run(runs, tmp_path):
    """A copy of a finished run's folder."""
    return shutil.copytree(runs.unbroken(PPO), tmp_path / "run")


def read(run, stage="ppo"):
    return last_checkpoint(run, stage=stage, every=2)


def test_a_whole_one_is_taken(run):
    assert read(run) == Saved(run / "checkpoints" / "last.ckpt", 4)


@pytest.mark.parametrize("size", [0, 1, 1000, -1, -5000])
def test_a_torn_one(run, size):
    path = run / "checkpoints" / "last.ckpt"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"last\.ckpt is damaged and nothing of it was used"):
        read(run)


def test_one_changed_byte(run):
    """In the middle of a tensor: the archive's own checksum tells."""
    path = run / "checkpoints" / "last.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        read(run)


def test_anothers(run):
    for content in ([1, 2], {"state_dict": {}}, {"stage": 3}):
        torch.save(content, run / "checkpoints" / "last.ckpt")
        with pytest.raises(UserError, match="not written by rlhf_lightning"):
            read(run)


def test_another_stages(run):
    with pytest.raises(UserError, match="written by stage=ppo, not stage=dpo"):
        read(run, "dpo")


def test_one_that_vanished(run):
    (run / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(UserError, match=r"though metrics\.csv has 4 iterations"):
        read(run)


def test_a_run_that_ended_is_resumed_to_its_end(runs, run, same):
    """And says so: nothing is left to train."""
    (run / "summary.json").unlink()
    assert runs(f"resume={run}") == 0, runs.log()
    same(runs.unbroken(PPO), run)


def test_on_the_command_line(runs, run):
    (run / "checkpoints" / "last.ckpt").write_bytes(b"PK")
    assert runs(f"resume={run}") == 1
    said = runs.log().splitlines()[-1]
    assert said.startswith(f"resume={run}: checkpoints/last.ckpt is damaged")
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"


def test_a_full_disk_at_the_end_is_a_sentence_and_costs_nothing_else(runs, same, tmp_path):
    """No file may grow beyond 64 KiB: rows and samples fit, no checkpoint does."""
    folder = tmp_path / "run"
    log = tmp_path / "log.txt"
    assert runs(*PPO, f"hydra.run.dir={folder}", log=log, file_size=1 << 16) == 1
    said = log.read_text()
    assert "iteration 1 is not saved: the disk is full" in said and "Traceback" not in said
    assert f"make room, then continue with resume={folder}" in said
    assert len((folder / "metrics.csv").read_text().splitlines()) == 5
    assert not list((folder / "checkpoints").iterdir())
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
