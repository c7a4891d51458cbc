"""Progress: the same figures on a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from rlhf_lightning.callbacks import Progress
from rlhf_lightning.callbacks.progress import clock, figures, time_left
from rlhf_lightning.callbacks.throughput import Throughput


def test_three_rollouts_are_three_lines_with_every_figure(tmp_path, make_config, make_toy, fit):
    """Entry 82k."""
    out = io.StringIO()
    toy = make_toy(make_config(3), [0.125, 0.25, 0.5])
    fit(toy, tmp_path, callbacks=[Throughput(), Progress(console=Console(file=out, width=20))])
    lines = out.getvalue().splitlines()
    assert len(lines) == 3  # not folded at the width of a terminal that is not there
    for line, k, score, kl in zip(
        lines, (1, 2, 3), ("0.125", "0.250", "0.500"), ("0.00", "0.25", "0.50"), strict=True
    ):
        assert re.fullmatch(
            rf"iteration {k}/3  score {score}  KL {kl}  length 2\.2  [\d,]+ tokens/s  \d+:\d\d left", line
        )
    assert lines[-1].endswith("0:00 left")
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_live_bars_with_phases(tmp_path, make_config, make_toy, fit):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    toy = make_toy(
        make_config(3), [0.125, 0.25, 0.5], seconds=0.3
    )  # the bars are redrawn four times a second
    progress = Progress(console=console)
    fit(toy, tmp_path, callbacks=[Throughput(), progress])
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue())
    assert "3/3" in shown and "update" in shown and "2/2" in shown
    assert "score 0.125" in shown and "score 0.500" in shown and "left" in shown
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is given back


def test_live_false_gives_lines_on_a_terminal_too(tmp_path, make_config, make_toy, fit):
    out = io.StringIO()
    fit(
        make_toy(make_config(2), [0.1, 0.2]), tmp_path,
        callbacks=[Throughput(), Progress(live=False, console=Console(file=out, force_terminal=True))],
    )  # fmt: skip
    assert len(out.getvalue().splitlines()) == 2


def test_a_failing_run_gives_the_cursor_and_the_module_back(tmp_path, make_config, make_toy, fit):
    out = io.StringIO()
    toy = make_toy(make_config(2), [0.1, 0.2])
    toy.fail = {1: RuntimeError("boom")}
    with pytest.raises(RuntimeError, match="boom"):
        fit(toy, tmp_path, callbacks=[Throughput(), Progress(console=Console(file=out, force_terminal=True))])
    assert out.getvalue().rstrip().endswith("\x1b[?25h")
    toy.progress("rollout", 1, 2)
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


def test_time_left_is_the_median_of_the_recent_times_what_is_left():
    assert time_left([100.0, 2.0, 3.0], iterations_left=4) == 12.0
    assert time_left([50.0] * 20 + [1.0] * 10, iterations_left=3) == 3.0  # only the last ten count
    assert time_left([5.0], iterations_left=0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.7, "1:00:00"), (90_061, "25:01:01")],
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_figures_leave_out_what_was_not_measured():
    assert (
        figures({"objective/score": -1.0, "throughput/tokens_per_s": 12345.6})
        == "score -1.000  12,346 tokens/s"
    )
