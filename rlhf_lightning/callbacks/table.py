"""A CSV file that grows by one row an iteration, and stays readable whenever the process is killed."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from rlhf_lightning.callbacks.files import complete_lines, write_text


class Table:
    """Columns: those of ``first`` that appear, then the other names in order.

    A name that appears later widens the file; the older rows stay empty there.

    Args:
        first: columns that lead; one of them is ``iteration``.
    """

    def __init__(self, path: Path, *, first: tuple[str, ...]) -> None:
        self.path = path
        self._first = first
        self._columns: list[str] = []

    def cut(self, iteration: int) -> list[dict[str, str]]:
        """Drop the rows from ``iteration`` on, and one that a kill tore; give those that stay."""
        rows = [row for row in self._read() if int(row["iteration"]) < iteration]
        self._columns = list(rows[0]) if rows else []
        if rows or self.path.exists():
            self._rewrite(rows)
        return rows

    def append(self, row: dict[str, float]) -> None:
        if new := set(row) - set(self._columns):
            rows = self._read()
            names = {*self._columns, *new}
            self._columns = [n for n in self._first if n in names] + sorted(names - set(self._first))
            self._rewrite(rows)
        # Opened for each row: nothing is left in a buffer when the process is killed.
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(self._text([row]))

    def _read(self) -> list[dict[str, str]]:
        return list(csv.DictReader(complete_lines(self.path)))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        header = ",".join(self._columns) + "\n" if self._columns else ""
        write_text(self.path, header + self._text(rows))

    def _text(self, rows: list[Any]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue()
