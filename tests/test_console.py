"""What a person reads: every figure is there, and no model's answer can do more than be read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_lightning.config.schema import Config
from rlhf_lightning.console import (
    Check,
    bytes_text,
    count_text,
    make_console,
    next_command,
    print_checks,
    print_end,
    print_plan,
    print_samples,
    safe_text,
)
from rlhf_lightning.models.weights import RoleWeight


@pytest.fixture
def screen():
    out = io.StringIO()
    return Console(file=out, width=110), out.getvalue


def make_config(**changes) -> Config:
    return Config.model_validate({"reward": {"kind": "length", "target": 3}, **changes})


def test_the_plan_shows_every_role_and_the_sum(screen):
    console, text = screen
    roles = [
        RoleWeight("backbone", "", "", 0, 6_740_000_000, 3 * 2**30),
        RoleWeight("policy", "policy", "language-model head", 40_000_000, 0, 160_000_000),
        RoleWeight("critic", "critic", "value head", 40_004_097, 0, 160_016_388),
        RoleWeight("reference", "none: the backbone itself", "language-model head", 0, 0, 0),
    ]
    print_plan(console, make_config(), roles=roles, data="9 prompts")
    lines = {line.split()[0]: line for line in text().splitlines() if line.strip()}
    assert lines["backbone"].split()[1:] == ["0", "6.74B", "3.00", "GiB"]
    assert lines["critic"].split()[1:] == ["critic", "value", "head", "40.0M", "0", "153", "MiB"]
    assert "none: the backbone itself" in lines["reference"]
    assert lines["total"].split() == ["total", "80.0M", "6.74B", "3.30", "GiB"]
    assert "100 iterations of 64 answers, at most 64 tokens each" in lines["run"]
    assert "tiny (tiny), nf4, bfloat16, LoRA r=16" in lines["model"]


def test_the_plan_takes_names_literally(screen):
    console, text = screen
    print_plan(
        console, make_config(model={"name": "[red]x[/nope]", "path": "[/]"}), roles=[], data="9 prompts"
    )
    assert "[red]x[/nope] ([/])" in text()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (938, "938"), (1000, "1.00k"), (12_345, "12.3k"), (123_456, "123k"), (6_740_000_000, "6.74B")],
)
def test_count_text(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3_670_016, "3.50 MiB"), (24 * 2**30, "24.0 GiB")],
)
def test_bytes_text(size, text):
    assert bytes_text(size) == text


def test_samples_show_both_answers_with_their_scores(screen):
    console, text = screen
    print_samples(
        console,
        [
            {
                "prompt": "the soup",
                "before": "was cold",
                "before_score": -0.5,
                "after": "was warm",
                "after_score": 1.25,
            }
        ],
    )
    assert [line.split() for line in text().splitlines() if line] == [
        ["prompt", "the", "soup"],
        ["before", "-0.500", "was", "cold"],
        ["after", "+1.250", "was", "warm"],
    ]


def test_a_broken_run_shows_what_there_is(screen):
    console, text = screen
    print_samples(
        console, [{"prompt": "p", "before": "b", "before_score": 0.0, "after": None, "after_score": None}]
    )
    assert "before" in text() and "after" not in text()


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (
            "[bold red]not markup[/] [/nope] [link=http://x]",
            "[bold red]not markup[/] [/nope] [link=http://x]",
        ),
        ("\x1b]0;title\x07 \x1b[2Jgone", "\\x1b]0;title\\x07 \\x1b[2Jgone"),
        ("one\ntwo\r\nthree\tfour", "one\\ntwo\\r\\nthree\\tfour"),
        ("\x9b31m \x85 \x7f \u2028", "\\x9b31m \\x85 \\x7f \\u2028"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("half \ud83d", "half \\ud83d"),
        (":smile: 美味しい 👩‍🍳", ":smile: 美味しい 👩‍🍳"),
    ],
)
def test_an_answer_is_text_and_nothing_else(answer, shown):
    out = io.StringIO()
    terminal = Console(file=out, width=200, force_terminal=True, color_system=None)
    row = dict.fromkeys(("prompt", "before", "after"), answer)
    print_samples(terminal, [row | {"before_score": 0.0, "after_score": 0.0}])
    assert safe_text(answer).plain == shown
    assert out.getvalue().count(shown) == 3
    assert not {"\x07", "\x9b", "\u202e", "\x85"} & set(out.getvalue())
    assert "\x1b]" not in out.getvalue() and "\x1b[2J" not in out.getvalue()


def test_the_end_says_where_and_what_next(tmp_path):
    out = io.StringIO()
    run_dir = tmp_path / ("long" * 40)
    run_dir.mkdir()
    row = {"prompt": "p", "before": "b", "before_score": 0.0, "after": "a", "after_score": 1.0}
    (run_dir / "before_after.json").write_text(json.dumps([row]))
    figures = {
        "last": {"objective/score": 0.75, "iteration": 9}, "best": {"objective/score": 0.875, "iteration": 6},
        "tokens_per_s": 1234.5, "peak_memory_gb": 1.5, "wall_s": 61.2,
    }  # fmt: skip
    (run_dir / "summary.json").write_text(json.dumps(figures))
    print_end(Console(file=out, width=200), run_dir, make_config())
    lines = out.getvalue().splitlines()
    assert "objective/score 0.750 (best 0.875, iteration 7), 1,234 tokens/s, 1.50 GiB, 61 s" in lines
    assert f"results   {run_dir}" in lines  # in one piece, to be copied
    assert lines[-1] == f"next      python train.py stage=evaluate run={run_dir}"
    assert any(line.startswith("prompt") for line in lines)


def test_the_end_without_figures_still_says_where(screen, tmp_path):
    console, text = screen
    print_end(console, tmp_path, make_config())
    assert "results" in text() and "next" in text()


def test_the_next_command_leads_to_the_next_stage():
    run = Path("/runs/a b")
    tiny = make_config(stage={"name": "sft"})
    assert next_command(tiny, run) == "python train.py stage=reward model=tiny model.adapter='/runs/a b'"
    model = {"path": "/models/llama", "adapter": "/runs/sft"}
    real = make_config(stage={"name": "reward"}, model=model)
    assert next_command(real, Path("/runs/rm")) == (
        "python train.py stage=ppo model.path=/models/llama model.adapter=/runs/sft "
        "reward=learned reward.path=/runs/rm data=..."
    )
    judged = make_config(stage={"name": "evaluate"}, run="/runs/ppo")
    assert next_command(judged, run) == "python -m rlhf_lightning.chat /runs/ppo"


def test_checks_show_pass_fail_and_the_figure(screen):
    console, text = screen
    print_checks(
        console, [Check("ratio is 1", True, "max |ratio - 1| = 0"), Check("KL [is] 0", False, "KL = 0.3")]
    )
    lines = text().splitlines()
    assert lines[1].split() == ["ratio", "is", "1", "pass", "max", "|ratio", "-", "1|", "=", "0"]
    assert "KL [is] 0" in lines[2] and "FAIL" in lines[2] and "KL = 0.3" in lines[2]
    assert lines[3] == "1 of 2 checks passed"


def test_the_console_colours_nothing_in_a_file(capsys):
    make_console().print("score 0.5 'quoted' /a/path")
    assert capsys.readouterr().out == "score 0.5 'quoted' /a/path\n"
