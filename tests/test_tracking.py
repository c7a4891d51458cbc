"""Real W&B runs, offline, read back from the file that `wandb sync` would send."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_lightning.config.schema import Config
from rlhf_lightning.errors import UserError
from rlhf_lightning.tracking import build_loggers, close_trackers
from rlhf_lightning.wandb_files import last_iteration


def make_config(**logger) -> Config:
    return Config.model_validate({"reward": {"kind": "length", "target": 3}, "logger": logger})


def records(path: Path) -> Iterator[object]:
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if place + 7 + length > len(data):
            return  # still being written
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(path: Path) -> list[dict[str, object]]:
    items = [record.history.item for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in point
            if item.value_json
        }
        for point in items
    ]


@pytest.fixture(autouse=True)
def _no_wandb_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    yield
    close_trackers(0)


def run_files(run_dir: Path) -> list[Path]:
    """The closed runs of a folder, oldest first.

    W&B's own process writes them, a moment after ``finish`` returns (at exit Python waits for it).
    """
    paths = list(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    deadline = time.monotonic() + 60
    for path in paths:
        while not any(record.WhichOneof("record_type") == "exit" for record in records(path)):
            assert time.monotonic() < deadline, f"{path} was never closed"
            time.sleep(0.05)
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def test_nothing_asked_for_is_nothing_built_and_nothing_written(tmp_path):
    assert build_loggers(make_config(), tmp_path) == []
    close_trackers(1)
    assert list(tmp_path.iterdir()) == []


def test_an_offline_run_and_its_resumption(tmp_path, monkeypatch):
    """Entries 70, 80, 81: the config at once, one rising axis with nothing dropped, one id, the right end."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    run_dir = tmp_path / "run=1, beta"  # sweeps make such names
    run_dir.mkdir()
    config = make_config(wandb={"mode": "offline", "project": "p", "name": "n", "tags": ["a"]})
    (logger,) = build_loggers(config, run_dir)
    assert json.loads(json.dumps(dict(logger.experiment.config))) == config.model_dump(mode="json")
    for k in range(3):
        rows = [{"prompt": f"p{k}", "score": float(k)}]
        logger.log_rows("samples", rows, iteration=k)
        logger.log_metrics(
            {"iteration": k, "optimizer_steps": 16 * (k + 1), "objective/score": k / 2}, step=16 * k
        )
    close_trackers(1)
    run_files(run_dir)  # waits, so that the second run's file is the newer one
    (logger,) = build_loggers(config, run_dir)
    for k in (3, 4):
        logger.log_metrics(
            {"iteration": k, "optimizer_steps": 16 * (k + 1), "objective/score": k / 2}, step=0
        )
    close_trackers(0)

    files = run_files(run_dir)
    run_id = (run_dir / "wandb_run_id.txt").read_text().strip()
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    points = history(files[0]) + history(files[1])
    assert [point["iteration"] for point in points] == [0, 1, 2, 3, 4]
    assert [point["objective/score"] for point in points] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert [point["optimizer_steps"] for point in points] == [16, 32, 48, 64, 80]
    assert [point["samples/nrows"] for point in points if "samples/nrows" in point] == [1, 1, 1]
    for path, code in zip(files, (1, 0), strict=True):
        assert [r.exit.exit_code for r in records(path) if r.WhichOneof("record_type") == "exit"] == [code]
        metrics = [r.metric for r in records(path) if r.WhichOneof("record_type") == "metric"]
        assert {(m.glob_name, m.step_metric) for m in metrics if m.glob_name} == {("*", "iteration")}
    tables = [json.loads(path.read_text())["data"] for path in run_dir.rglob("*.table.json")]
    assert sorted(tables) == [[["p0", 0.0]], [["p1", 1.0]], [["p2", 2.0]]]
    assert not [path for path in home.rglob("*") if path.is_file() and "staging" in path.parts]
    assert "WANDB_DATA_DIR" not in os.environ and "WANDB_MODE" not in os.environ


@pytest.mark.parametrize("saved", [1, 3, 5], ids=["behind W&B", "with it", "before it"])
def test_a_killed_run_has_each_point_once(tmp_path, saved):
    """W&B holds iterations 0 to 2; the checkpoint that the run goes on from holds ``saved`` iterations."""
    config = make_config(wandb={"mode": "offline"})
    rows = [{"iteration": k, "objective/score": k / 2} for k in range(6)]
    (logger,) = build_loggers(config, tmp_path)
    for row in rows[:3]:
        logger.log_metrics(row)
    close_trackers(1)
    run_files(tmp_path)
    (logger,) = build_loggers(config, tmp_path)
    logger.catch_up(rows[:saved])
    for row in rows[saved:]:
        logger.log_rows("samples", [{"k": row["iteration"]}], iteration=row["iteration"])
        logger.log_metrics(row)
    close_trackers(0)
    points = [point for path in run_files(tmp_path) for point in history(path)]
    assert [point["iteration"] for point in points] == [point["_step"] for point in points] == [*range(6)]
    assert [point["objective/score"] for point in points] == [k / 2 for k in range(6)]
    assert ["samples/nrows" in point for point in points] == [k >= max(3, saved) for k in range(6)]


def test_a_torn_file_is_read_to_its_last_whole_record(tmp_path):
    (logger,) = build_loggers(make_config(wandb={"mode": "offline"}), tmp_path)
    for k in range(3):
        logger.log_metrics({"iteration": k, "long": "x" * 40_000})  # longer than a block
    close_trackers(0)
    (path,) = run_files(tmp_path)
    content, run_id = path.read_bytes(), logger.experiment.id
    assert last_iteration(tmp_path, run_id) == 2 and last_iteration(tmp_path, "another") == -1
    found = []
    for size in (*range(0, len(content), 997), len(content)):
        path.write_bytes(content[:size])
        found.append(last_iteration(tmp_path, run_id))
    assert found == sorted(found) and set(found) == {-1, 0, 1, 2}


def test_a_picture_is_in_the_point_that_follows_it(tmp_path):
    from matplotlib.figure import Figure

    Figure(figsize=(1, 1)).savefig(tmp_path / "drawn.png")
    (logger,) = build_loggers(make_config(wandb={"mode": "offline"}), tmp_path)
    logger.log_metrics({"iteration": 0})
    logger.log_picture("held_out", tmp_path / "drawn.png", iteration=1)
    logger.log_metrics({"iteration": 1})
    close_trackers(0)
    (path,) = run_files(tmp_path)
    first, last = history(path)
    assert (first["iteration"], last["iteration"]) == (0, 1)
    assert not any(name.startswith("held_out") for name in first)
    assert last["held_out/_type"] == "image-file"
    (stored,) = path.parent.rglob("held_out_*.png")
    assert stored.read_bytes() == (tmp_path / "drawn.png").read_bytes()


def test_two_jobs_of_a_sweep_are_two_runs(tmp_path):
    ids = []
    for name in ("0", "1"):
        (logger,) = build_loggers(make_config(wandb={"mode": "offline"}), tmp_path / name)
        logger.log_metrics({"iteration": 0, "x": float(name)})
        ids.append(logger.experiment.id)
        close_trackers(0)
    assert ids[0] != ids[1]
    for name in ("0", "1"):
        (path,) = run_files(tmp_path / name)
        assert [point["x"] for point in history(path)] == [float(name)]


def test_online_without_an_account_is_a_sentence_and_no_question(tmp_path, monkeypatch):
    class Terminal:
        """A stdin that W&B would take for a person at a keyboard."""

        def isatty(self) -> bool:
            return True

        def readline(self, *_: object) -> str:
            raise AssertionError("W&B asked for input")

        read = fileno = readline

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stderr", _Loud(sys.stderr))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        UserError, match=r"wandb\.mode=online failed: .*WANDB_API_KEY .*mode=offline needs neither"
    ):
        build_loggers(make_config(wandb={"mode": "online"}), tmp_path)
    assert isinstance(sys.stdin, Terminal)


class _Loud:
    """stderr that claims to be a terminal."""

    def __init__(self, stream) -> None:
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return True


def test_the_environment_wins_and_disabled_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert build_loggers(make_config(wandb={"mode": "online"}), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_dryrun_is_wandb_s_old_word_for_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    (logger,) = build_loggers(make_config(wandb={"mode": "online"}), tmp_path)
    assert logger.experiment.settings.mode == "offline"


def test_an_unknown_mode_is_answered(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(UserError, match=r"WANDB_MODE must be one of offline, .*'ofline'"):
        build_loggers(make_config(wandb={}), tmp_path)


def test_tensorboard_writes_events_on_the_iteration_axis(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (logger,) = build_loggers(make_config(tensorboard=True), tmp_path)
    for k in range(3):
        logger.log_metrics({"iteration": k, "objective/score": k / 2}, step=k)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("objective/score")]
    assert points == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_tensorboard_shows_a_repeated_iteration_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, end in ((0, 4), (2, 6)):  # killed in iteration 4; the checkpoint held two
        (logger,) = build_loggers(make_config(tensorboard=True), tmp_path, resume_from=start)
        for k in range(start, end):
            logger.log_metrics({"iteration": k, "objective/score": k / 2}, step=k)
        logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("objective/score")] == [0, 1, 2, 3, 4, 5]


def test_tensorboard_that_is_not_installed_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert importlib.util.find_spec("tensorboard") is None
    with pytest.raises(
        UserError, match=r"logger\.tensorboard=true needs TensorBoard.*rlhf-lightning\[tensorboard\]"
    ):
        build_loggers(make_config(tensorboard=True), tmp_path)


def test_opening_a_tracker_leaves_the_launch_package_alone(tmp_path):
    # In a process of its own: whatever ran here before may have imported it.
    code = (
        "import pathlib, sys\n"
        "from rlhf_lightning.config.schema import Config\n"
        "from rlhf_lightning.tracking import build_loggers, close_trackers\n"
        "reward = {'kind': 'length', 'target': 3}\n"
        "config = Config.model_validate({'reward': reward, 'logger': {'wandb': {}}})\n"
        "assert build_loggers(config, pathlib.Path(sys.argv[1]))\n"
        "from wandb.sdk.wandb_run import Run\n"
        "print(Run._detect_and_apply_job_inputs.__name__, 'wandb.sdk.launch' in sys.modules)\n"
        "close_trackers(0)\n"
    )
    variables = os.environ | {"WANDB_MODE": "offline"}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=variables, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["_detect_and_apply_job_inputs", "False"]
