"""Rows from a file, a folder or a hub: JSON lines, CSV, Parquet, plain text, Hugging Face datasets."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import logging
import zlib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhf_lightning.data.hub import read_dataset
from rlhf_lightning.errors import UserError

log = logging.getLogger(__name__)

ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
TEXT_COLUMN = "text"


@dataclass(frozen=True)
class Row:
    """One record, and where a person finds it: ``line 3`` of a file, ``row 3`` of a table, both from 1."""

    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """What was read: from where, in which form, and the rows."""

    path: str
    form: str  # jsonl, csv, parquet, text or hf
    pairs: bool  # the rows are chosen and rejected dialogues, their prompt inside
    rows: list[Row]

    @property
    def columns(self) -> list[str]:
        """Every column that some row has, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def field(self, row: Row, name: str, *, asked_by: str) -> Any:
        """One value of a row.

        Args:
            row: one of ``rows``.
            name: the column.
            asked_by: the setting that wants it, such as ``data.prompt_field=prompt``.

        Raises:
            UserError: naming all columns and the nearest if no row has it, or the place if this row lacks it.
        """
        value = row.values.get(name)
        if value is not None:
            return value
        if name in self.columns:
            raise UserError(f"data.path={self.path}: {row.place} has no value in column {name!r}")
        near = get_close_matches(name, self.columns, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"{asked_by}: no column {name!r} in data.path={self.path}; "
            f"the columns are {', '.join(self.columns)}{hint}"
        )


def read_rows(path: str, *, form: str = "auto", split: str = "train", limit: int | None = None) -> Source:
    """All rows of a file, a folder or a dataset on the hub.

    A file is told by its ending, with or without ``.gz``; a folder, or a name that is neither, goes to the
    ``datasets`` library. Text is UTF-8, with or without a byte order mark, UTF-16 with one, or else
    Windows-1252.

    Args:
        path: file, folder or hub id.
        form: ``data.format``; ``hh`` says what the rows mean, and the ending still says how they are stored.
        split: which split of a dataset.
        limit: read no more than the first so many rows.

    Returns:
        At least one row.

    Raises:
        UserError: if nothing is there, the form cannot be told, a row cannot be read, or there are no rows.
    """
    place = Path(path).expanduser()
    if not place.exists() and _looks_like_file(path):
        raise UserError(f"data.path={path}: no such file or folder (looked for {place.absolute()})")
    if form == "hf" or not place.is_file():
        if form not in ("auto", "hf", "hh") or place.is_file():
            found = "a folder" if place.is_dir() else "a file" if place.is_file() else "not a file here"
            raise UserError(f"data.format={form}: data.path={path} is {found}; try data.format=auto")
        stored, rows = "hf", _numbered(read_dataset(path, split=split, limit=limit))
    else:
        stored = _stored_form(place, path, form)
        rows = _read_file(place, path, stored, limit)
    if not rows:
        raise UserError(f"data.path={path}: holds no rows")
    # Only a table of nothing but pairs is taken for one unasked: a misspelt prompt column must not end here.
    pairs = form == "hh" or (form == "auto" and set(rows[0].values) == {"chosen", "rejected"})
    return Source(path, stored, pairs, rows)


def _looks_like_file(path: str) -> bool:
    """Whether a path that is not there was meant as a file, not as ``name`` or ``owner/name`` on the hub."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or _ending(Path(path)) in ENDINGS


def _ending(place: Path) -> str:
    return (place.with_suffix("") if place.suffix.lower() == ".gz" else place).suffix.lower()


def _stored_form(place: Path, path: str, form: str) -> str:
    if form not in ("auto", "hh"):
        return form
    ending = _ending(place)
    if ending in ENDINGS:
        return ENDINGS[ending]
    if form == "hh":
        return "jsonl"
    raise UserError(
        f"data.format=auto: cannot tell the form of data.path={path} from its ending {ending!r} (known: "
        f"{', '.join(ENDINGS)}, each also with .gz); set data.format, for example data.format=text"
    )


def _read_file(place: Path, path: str, stored: str, limit: int | None) -> list[Row]:
    try:
        data = place.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"data.path={path}: cannot be read ({error})") from error
    if stored == "parquet":
        return _parquet(data, path, limit)
    text = _decode(data, path)
    if stored == "csv":
        return _csv(text, path, "\t" if _ending(place) == ".tsv" else ",", limit)
    return _jsonl(text, path, limit) if stored == "jsonl" else _text(text, limit)


def _decode(data: bytes, path: str) -> str:
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        try:
            text = data.decode("cp1252")
        except UnicodeDecodeError:
            raise UserError(
                f"data.path={path}: line {line} is neither UTF-8 nor Windows-1252 text "
                f"(byte 0x{data[error.start]:02x}); convert the file to UTF-8"
            ) from None
    log.warning("data.path=%s: line %d is not UTF-8; the file is read as Windows-1252 (cp1252)", path, line)
    return text


def _lines(text: str) -> list[tuple[int, str]]:
    # str.splitlines would also break at U+2028 and other marks that may stand inside a JSON string.
    numbered = enumerate(text.replace("\r\n", "\n").split("\n"), start=1)
    return [(number, line) for number, line in numbered if line.strip()]


def _text(text: str, limit: int | None) -> list[Row]:
    """One prompt a line; blank lines separate, and space around a line is not part of it."""
    return [Row(f"line {number}", {TEXT_COLUMN: line.strip()}) for number, line in _lines(text)[:limit]]


def _jsonl(text: str, path: str, limit: int | None) -> list[Row]:
    """One object a line; or, as in many ``.json`` files, one list of objects."""
    if text.lstrip().startswith("["):
        try:
            objects = json.loads(text)
        except json.JSONDecodeError as e:
            raise UserError(f"data.path={path}: line {e.lineno} is not valid JSON ({e.msg})") from e
        found = [(f"row {number}", item) for number, item in enumerate(objects, start=1)][:limit]
    else:
        found = []
        for number, line in _lines(text)[:limit]:
            try:
                found.append((f"line {number}", json.loads(line)))
            except json.JSONDecodeError as e:
                raise UserError(f"data.path={path}: line {number} is not valid JSON ({e.msg})") from e
    for place, item in found:
        if not isinstance(item, dict):
            raise UserError(
                f"data.path={path}: {place} is a {type(item).__name__}, "
                'not an object such as {"prompt": "..."}'
            )
    return [Row(place, item) for place, item in found]


def _csv(text: str, path: str, delimiter: str, limit: int | None) -> list[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    try:
        for values in reader:
            if None in values:
                raise UserError(
                    f"data.path={path}: row {len(rows) + 1} has more fields than the header "
                    f"({', '.join(reader.fieldnames or [])}); a field with a comma needs quotes"
                )
            rows.append(Row(f"row {len(rows) + 1}", dict(values)))
            if len(rows) == limit:
                break
    except csv.Error as error:
        raise UserError(f"data.path={path}: row {len(rows) + 1} is not valid CSV ({error})") from error
    return rows


def _parquet(data: bytes, path: str, limit: int | None) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data))
    except pa.ArrowException as error:
        raise UserError(f"data.path={path}: not a Parquet file ({error})") from error
    return _numbered(table.slice(0, limit).to_pylist())


def _numbered(records: list[dict[str, Any]]) -> list[Row]:
    return [Row(f"row {number}", record) for number, record in enumerate(records, start=1)]
