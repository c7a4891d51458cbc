"""The memory plan on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_lightning.config.schema import Config
from rlhf_lightning.planning.advice import Advice, advise
from rlhf_lightning.planning.cards import HEADROOM, judge_cards
from rlhf_lightning.planning.plan import Part, Plan, make_plan
from rlhf_lightning.planning.roles import FLOAT
from rlhf_lightning.units import bytes_text, count_text

BAR = 28
"""Columns of the longest bar."""
_STYLES = {"fits": "green", "tight": "yellow", "no": "red"}


def show_plan(config: Config, console: Console | None = None) -> None:
    """Plan a config and print it: roles, phases, the peak's parts, cards, switches.

    Raises:
        UserError: as ``make_plan``.
    """
    console = console or Console(highlight=False)
    plan = make_plan(config)
    model, peak = config.model, plan.peak
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold")
    head.add_column()
    adapters = f"{model.quantization}, {model.dtype}, LoRA r={model.lora.r}"
    for name, text in (
        ("stage", config.stage.name),
        ("model", f"{model.name}, {count_text(plan.shape.parameters)} parameters, {adapters}"),
        ("sizes", f"from {plan.shape.source}"),
        ("at most", plan.tokens),
        ("peak", f"{bytes_text(peak.bytes)}, in the {peak.name}"),
    ):
        head.add_row(name, Text(text))
    advice, together = advise(config, plan)
    tables = [head, _roles(config, plan), _phases(plan), _parts(plan), _cards(plan)]
    for part in [*tables, _switches(advice, together, plan)]:
        console.print(part)
        console.print()
    if idle := [one.setting for one in advice if one.saved <= 0]:
        console.print(Text(f"nothing at this peak: {', '.join(idle)}", style="dim"))


def _bar(share: float) -> Text:
    eighths = round(share * BAR * 8)
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip())


def _table(*columns: str) -> Table:
    """First column to the left, sizes to the right, what follows them to the left."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in ("memory", "trains", "Adam") else "left")
    return table


def _roles(config: Config, plan: Plan) -> Table:
    table = _table("role", "what it is", "memory", "trains", "Adam")
    stored = f"{config.model.quantization}, embeddings and head {config.model.dtype}"
    if config.model.quantization == "none":
        stored = config.model.dtype
    table.add_row("backbone", Text(stored), bytes_text(plan.backbone), "", "")
    for role in plan.roles:
        trains = count_text(role.parameters) if role.trains else ""
        moments = bytes_text(2 * role.parameters * FLOAT) if role.trains else ""
        table.add_row(role.name, Text(role.what), bytes_text(role.bytes), trains, moments)
    return table


def _phases(plan: Plan) -> Table:
    table = _table("phase", "memory", "")
    for phase in plan.phases:
        line = _bar(phase.bytes / plan.peak.bytes)
        line.stylize("bold red" if phase is plan.peak else "cyan")
        table.add_row(phase.name, bytes_text(phase.bytes), line)
    return table


def _parts(plan: Plan) -> Table:
    table = _table(f"at the peak ({plan.peak.name})", "memory", "")
    parts: list[Part] = sorted(plan.peak.parts, key=lambda part: -part.bytes)
    for part in parts:
        table.add_row(part.name, bytes_text(part.bytes), _bar(part.bytes / plan.peak.bytes))
    return table


def _cards(plan: Plan) -> Table:
    verdicts = judge_cards(plan.peak.bytes)
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left", caption_style="dim")
    table.add_column("main memory" if plan.cpu else "card")
    for verdict in verdicts:
        table.add_column(f"{verdict.gib} GiB")
    table.add_row("", *(Text(verdict.word, style=_STYLES[verdict.word]) for verdict in verdicts))
    table.caption = f"fits: {HEADROOM:.0%} of it stays free; tight: less than that"
    return table


def _switches(advice: Sequence[Advice], together: int, plan: Plan) -> Table:
    table = _table("what would save most", "memory", "")
    for one in advice:
        if one.saved > 0:
            table.add_row(Text(one.setting), f"-{bytes_text(one.saved)}", _bar(one.saved / plan.peak.bytes))
    saved = f"-{bytes_text(plan.peak.bytes - together)}"
    table.add_row("all of them", saved, f"a peak of {bytes_text(together)}")
    return table
