"""What a person sees before and after a run.

Prompts and answers are untrusted: they are shown as plain text, never read as rich's markup, and their
control characters are spelt out, so that no answer can move the cursor, set the window title or hide what it
says.
"""

from __future__ import annotations

import json
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_lightning.config.locate import locate, named_paths
from rlhf_lightning.config.schema import Config
from rlhf_lightning.units import bytes_text, count_text

if TYPE_CHECKING:  # the console starts before torch is loaded
    from rlhf_lightning.models.weights import RoleWeight

_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True)
class Check:
    """One proof of the doctor: what was examined, whether it held, the number that says so."""

    name: str
    passed: bool
    figure: str


def make_console(*, stderr: bool = False) -> Console:
    """The console of a run; colours only on a terminal."""
    return Console(highlight=False, stderr=stderr)


def safe_text(text: str) -> Text:
    """Untrusted text for the terminal: control and direction characters, line breaks too, as escapes."""
    return Text("".join(visible(character) for character in text))


def visible(character: str) -> str:
    """One character of untrusted text, spelt out where a terminal would obey it."""
    unseen = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _BIDI
    return character.encode("unicode_escape").decode("ascii") if unseen else character


def print_plan(console: Console, config: Config, *, roles: Sequence[RoleWeight], data: str) -> None:
    """What is about to run, and what it weighs, role by role."""
    model = config.model
    plan = Table.grid(padding=(0, 2))
    plan.add_column(style="bold")
    plan.add_column()
    storage = f"{model.quantization}, {model.dtype}, LoRA r={model.lora.r}"
    for name, text in (
        ("stage", config.stage.name),
        ("model", f"{model.name} ({model.path}), {storage}"),
        *_found_lines(config),
        ("data", data),
        *_stage_lines(config),
    ):
        plan.add_row(name, Text(text))
    console.print(plan)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("role", "adapter", "head"):
        table.add_column(name)
    for name in ("trainable", "frozen", "memory"):
        table.add_column(name, justify="right")
    for role in roles:
        sizes = (count_text(role.trainable), count_text(role.frozen), bytes_text(role.bytes))
        table.add_row(Text(role.name), Text(role.adapter), Text(role.head), *sizes)
    table.add_section()
    totals = [sum(getattr(role, field) for role in roles) for field in ("trainable", "frozen", "bytes")]
    table.add_row("total", "", "", count_text(totals[0]), count_text(totals[1]), bytes_text(totals[2]))
    console.print()
    console.print(table)
    console.print()


def _found_lines(config: Config) -> list[tuple[str, str]]:
    """What the paths of the config lead to, one a line; what is embedded needs no telling."""
    found = [locate(path, key=key, want=want) for key, path, want in named_paths(config)]
    texts = [one.text for one in found if one.kind != "tiny"]
    return [("found" if text == texts[0] else "", text) for text in texts]


def _stage_lines(config: Config) -> list[tuple[str, str]]:
    stage = config.stage.name
    if stage in ("sft", "reward", "dpo"):
        own = {"sft": config.sft, "reward": config.reward_model, "dpo": config.dpo}[stage]
        size = f"{own.epochs} epochs, batches of {own.batch_size}, at most {own.max_length} tokens each"
        return [("run", size), ("update", f"lr {own.lr:g}, {own.lr_schedule} after {own.warmup} steps")]
    if stage == "evaluate":
        asked = f"at most {config.evaluate.prompts} prompts, {config.evaluate.samples} answers to each"
        return [("reward", config.reward.kind), ("run", asked)]
    ppo, length = config.ppo, config.generation.max_new_tokens
    rates = f"lr {ppo.lr:g}" + (f", critic lr {ppo.critic_lr:g}" if config.has_critic else "")
    return [
        ("reward", config.reward.kind),
        ("advantage", config.advantage.kind),
        ("run", f"{ppo.iterations} iterations of {ppo.responses} answers, at most {length} tokens each"),
        ("update", f"{ppo.epochs} epochs, minibatches of {ppo.minibatch_size}, {rates}"),
        ("", f"clip {ppo.clip:g}, beta {ppo.beta:g}"),
    ]


def print_samples(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """A few prompts with the answers before and after training and their scores, from before_after.json."""
    for row in rows:
        console.print(Text("prompt  ", style="bold") + safe_text(row["prompt"]))
        for moment in ("before", "after"):
            if row[moment] is not None:
                score = Text(
                    f"{moment:<6}{row[f'{moment}_score']:>+9.3f}  ", style="dim" if moment == "before" else ""
                )
                console.print(score + safe_text(row[moment]))
        console.print()


def next_command(config: Config, run_dir: Path) -> str:
    """One command that leads on from this run to the next stage."""
    run = shlex.quote(str(run_dir))
    same = "model=tiny" if config.model.path == "tiny" else f"model.path={shlex.quote(config.model.path)}"
    rows = "" if config.model.path == "tiny" else " data=..."
    start = "" if config.model.adapter is None else f" model.adapter={shlex.quote(config.model.adapter)}"
    match config.stage.name:
        case "sft":
            return f"python train.py stage=reward {same} model.adapter={run}{rows}"
        case "reward":
            words = f"stage=ppo {same}{start} reward=learned reward.path={run}{rows}"
            return f"python train.py {words}"
        case "evaluate":
            return f"python -m rlhf_lightning.chat {shlex.quote(str(config.run))}"
        case _:
            return f"python train.py stage=evaluate run={run}"


def print_end(console: Console, run_dir: Path, config: Config) -> None:
    """The answers before and after, the figures, where the results are, and what to try next.

    Reads before_after.json and summary.json in ``run_dir``, as far as they are there.
    """
    console.print()
    samples, summary = run_dir / "before_after.json", run_dir / "summary.json"
    if samples.exists():
        print_samples(console, json.loads(samples.read_text(encoding="utf-8")))
    if summary.exists():
        figures = json.loads(summary.read_text(encoding="utf-8"))
        name = config.target[0]
        best, last = figures["best"].get(name), figures["last"].get(name)
        if best is not None and last is not None:
            console.print(
                f"{name} {last:.3f} (best {best:.3f}, "
                f"iteration {figures['best']['iteration'] + 1:.0f}), "
                f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['peak_memory_gb']:.2f} GiB, "
                f"{figures['wall_s']:.0f} s",
                markup=False,
            )
    # soft_wrap: a path or command cut in two could not be copied.
    console.print(f"results   {run_dir}", markup=False, soft_wrap=True)
    console.print(f"next      {next_command(config, run_dir)}", markup=False, soft_wrap=True)


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """The doctor's table: each proof with pass or fail and its figure."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("check", "result", "figure"):
        table.add_column(name)
    for check in checks:
        result = Text("pass", style="green") if check.passed else Text("FAIL", style="bold red")
        table.add_row(Text(check.name), result, Text(check.figure))
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks passed")
