"""The start-up table, and that each measured process does what its figure says."""

from __future__ import annotations

import pytest

from benchmarks import startup
from benchmarks.machine import Failed


def test_table_compares_medians_with_targets():
    lines = startup.table([[0.3, 9.0, 0.4], [2.5, 2.6, 0.1], [2.9]]).splitlines()[2:]
    assert [line.split(" | ")[1:] for line in lines] == [
        ["0.40", "1", "yes |"],
        ["2.50", "2", "no |"],
        ["2.90", "3", "yes |"],
    ]


def test_processes_that_print_or_refuse():
    assert startup.whole_process(["--help"], 0) > 0
    with pytest.raises(Failed, match="ended with exit code 1, not 0"):
        startup.whole_process(["ppo.clp=0.2"], 0)


def test_the_first_token_is_reached():
    assert 0 < startup.first_token() < 120
