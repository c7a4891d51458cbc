"""The race: our side on the embedded model, the line-up, and tables of hand-made runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.machine import Clock, Failed, markdown, run_json
from benchmarks.race.__main__ import PEER, line_up, ours_words, parse
from benchmarks.race.ours import composed, measure
from benchmarks.race.peak import peak_rss_gb
from benchmarks.race.stamps import Stamps
from benchmarks.race.subjects import questions
from benchmarks.race.table import Run, floor_table, race_table

TINY = ["data.chat_template=auto", "model.name=tiny"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    options = argparse.Namespace(iterations=2, set=[*TINY, "generation.max_new_tokens=6"], model="tiny")
    return ours_words(options, tmp_path_factory.mktemp("race"))


def test_our_side_does_the_work_that_was_agreed():
    config = composed(["data.path=file", "model.path=tiny", "reward.path=tiny"])
    ppo = config.ppo
    assert (ppo.responses, ppo.epochs, ppo.minibatch_size, ppo.lr) == (16, 4, 8, 1e-5)
    assert (config.generation.max_new_tokens, config.generation.temperature) == (48, 0.7)
    assert config.generation.ignore_eos and config.data.chat_template == "always"
    assert (config.model.quantization, config.model.dtype) == ("nf4", "bfloat16")
    lora = config.model.lora
    assert (lora.r, lora.alpha, len(lora.target_modules)) == (16, 32.0, 7)


def test_our_side_reports_each_iteration_with_four_roles(words: list[str]):
    config = composed([*words, "ppo.epochs=1"])
    assert config.reward.kind == "learned" and Path(config.reward.path).is_dir()
    found = json.loads(json.dumps(measure(config)))
    assert len(found["seconds"]) == len(found["cpu_seconds"]) == 2
    assert {len(times) for times in found["phases"].values()} == {2}
    for turn, whole in enumerate(found["seconds"]):
        assert 0 < sum(times[turn] for times in found["phases"].values()) <= whole
    assert found["prompt_tokens"] > 1 and found["peak_gb"] > 0.1


def test_the_line_up_gives_both_sides_the_same_sizes(words: list[str]):
    options = parse(["--peer-python", "peer", "--iterations", "2"])
    sides = line_up(options, words)
    assert [(s.dtype, s.system) for s in sides] == [
        (dtype, system)
        for dtype in ("bf16", "4bit")
        for system in (PEER, "ours, critic=adapter", "ours, critic=shared")
    ]
    for side in sides:
        line = " ".join(side.command)
        if side.system == PEER:
            assert line.startswith("peer -m benchmarks.race.peer_trl")
            assert "--batch 16 --length 6 --iterations 2" in line and f"--dtype {side.dtype}" in line
        else:
            config = composed(side.command[3:])
            assert config.model.quantization == {"bf16": "none", "4bit": "nf4"}[side.dtype]
            assert side.system.endswith(config.model.critic) and config.ppo.iterations == 2


def test_a_race_needs_the_peer_and_an_iteration_that_counts(monkeypatch, capsys):
    monkeypatch.delenv("PEER_PYTHON", raising=False)
    for line in ([], ["--peer-python", "x", "--iterations", "1"]):
        with pytest.raises(SystemExit):
            parse(line)
    said = capsys.readouterr().err
    assert "--peer-python, or PEER_PYTHON" in said and "--iterations must be above 1" in said


def run(system: str, turn: int, seconds: float, peak: float, phases: dict[str, float] | None = None) -> Run:
    return Run(system, "bf16", turn, seconds, 2 * seconds, peak, phases or {}, 30, [seconds])


def test_the_warm_up_does_not_count():
    found = {
        "seconds": [100.0, 2.0, 4.0],
        "cpu_seconds": [99.0, 3.0, 5.0],
        "peak_gb": 1.5,
        "phases": {"rollout": [90.0, 1.0, 2.0]},
    }
    made = Run.of("ours", "bf16", 0, found, skip=1)
    assert (
        (made.seconds, made.cpu_seconds) == (3.0, 4.0)
        and made.phases == {"rollout": 1.5}
        and made.iterations == [100.0, 2.0, 4.0]
    )


def test_ratios_are_taken_within_a_round():
    # rounds: 40/10 = 4, 90/15 = 6, 20/10 = 2: their median is 4, though the medians' ratio is 40/10
    runs = [run(PEER, 0, 40, 4), run("ours", 0, 10, 1), run("ours", 1, 15, 2), run(PEER, 1, 90, 4)]
    lines = race_table([*runs, run(PEER, 2, 20, 4), run("ours", 2, 10, 1)], peer=PEER).splitlines()
    assert lines[2] == f"| bf16, {PEER} | 40.0 | 20.0 to 90.0 |  | 80.0 |  | 4.00 |  |"
    assert lines[3] == "| bf16, ours | 10.0 | 10.0 to 15.0 | 4.00 | 20.0 | 4.00 | 1.00 | 0.25 |"


def test_phases_stand_beside_their_floor():
    own = [run("ours", turn, 9, 1, {"rollout": seconds}) for turn, seconds in enumerate((2.0, 3.0, 10.0))]
    text = floor_table(own, {("ours", "bf16"): {"rollout": 1.5}}, ["rollout"])
    assert text.splitlines()[2] == "| bf16, ours | 3.0 / 1.5 = 2.0 |"


def test_subjects_go_round():
    asked = questions(10)
    assert len(set(asked)) == 8 and asked[:2] == asked[8:]


def test_waiting_takes_no_processor_time():
    stamps = Stamps()
    stamps.mark()
    time.sleep(0.2)
    stamps.mark()
    assert len(stamps.seconds) == 1 and stamps.seconds[0] >= 0.2
    assert stamps.cpu_seconds[0] < 0.1


def test_the_peak_is_read_from_the_kernel():
    before = peak_rss_gb()
    held = bytearray(200_000_000)
    for place in range(0, len(held), 4096):
        held[place] = 1
    assert peak_rss_gb() >= before and peak_rss_gb() > 0.2


def test_a_process_answers_on_its_last_line_or_fails():
    python = [sys.executable, "-c"]
    assert run_json([*python, "print('noise'); print('{\"a\": 1}')"]) == {"a": 1}
    with pytest.raises(Failed, match=r"(?s)exit code 3:\nreason"):
        run_json([*python, "import sys; print('{}'); sys.stderr.write('reason'); sys.exit(3)"])
    with pytest.raises(Failed, match="exit code 0"):
        run_json([*python, "print('no json')"])


def test_the_time_left_goes_by_what_steps_cost(capsys, monkeypatch):
    now = iter([0.0, 30.0, 40.0])
    monkeypatch.setattr("benchmarks.machine.time.monotonic", lambda: next(now))
    clock = Clock([3.0, 1.0])
    clock.tick("first")
    clock.tick("second")
    assert capsys.readouterr().err.splitlines() == ["[1/2] first, 10 s left", "[2/2] second, 0 s left"]


def test_a_table_is_markdown():
    assert markdown(["a", "b"], [["x", 1]]) == "| a | b |\n| --- | --: |\n| x | 1 |"
