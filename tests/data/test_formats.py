"""Every form of a table of prompts, as real files; and what a person is told when one is broken."""

from __future__ import annotations

import csv
import gzip
import json
import logging
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_lightning.data.formats import read_rows
from rlhf_lightning.errors import UserError

ROWS = [
    {"prompt": "Größe, “so”:", "id": 1},
    {"prompt": "two\nlines", "id": 2},
    {"prompt": "日本 🍜", "id": 3},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def jsonl(path: Path) -> None:
    path.write_text(LINES, encoding="utf-8")


def jsonl_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(LINES.encode()))


def json_list(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1))


def comma(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "id"], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def saved(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))


def saved_splits(path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(str(path))


@pytest.mark.parametrize(
    ("name", "write", "form"),
    [
        ("a.jsonl", jsonl, "jsonl"),
        ("a.ndjson", jsonl, "jsonl"),
        ("a.jsonl.gz", jsonl_gz, "jsonl"),
        ("a.json", json_list, "jsonl"),
        ("a.csv", comma, "csv"),
        ("a.tsv", comma, "csv"),
        ("a.parquet", parquet, "parquet"),
        ("folder", saved, "hf"),
        ("folder", saved_splits, "hf"),
    ],
)
def test_each_form_gives_the_same_texts(tmp_path: Path, name: str, write, form: str) -> None:
    write(tmp_path / name)
    source = read_rows(str(tmp_path / name))
    assert [row.values["prompt"] for row in source.rows] == [row["prompt"] for row in ROWS]
    assert (source.form, source.pairs, source.columns) == (form, False, ["prompt", "id"])
    limited = read_rows(str(tmp_path / name), limit=2)
    assert limited.rows == source.rows[:2]


def test_format_by_name_wins_over_the_ending(tmp_path: Path) -> None:
    jsonl(tmp_path / "prompts.data")
    assert len(read_rows(str(tmp_path / "prompts.data"), form="jsonl").rows) == 3


def test_plain_text_and_its_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one \r\n\r\ntwo\u2028still two\nlast".encode())
    rows = read_rows(str(tmp_path / "a.txt")).rows
    assert [(row.place, row.values["text"]) for row in rows] == [
        ("line 1", "one"),
        ("line 3", "two\u2028still two"),
        ("line 4", "last"),
    ]


def test_a_line_separator_inside_a_json_string_is_no_end_of_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_rows(str(tmp_path / "a.jsonl")).rows[0].values == {"prompt": "a\u2028b"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_are_no_text(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.csv").write_text("prompt\ncafé\n", encoding=encoding)
    assert read_rows(str(tmp_path / "a.csv")).rows[0].values == {"prompt": "café"}


def test_windows_text_is_read_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes(b"plain\na clich\xe9 \x96 dull\n")
    with caplog.at_level(logging.WARNING):
        rows = read_rows(str(tmp_path / "a.txt")).rows
    assert [row.values["text"] for row in rows] == ["plain", "a cliché – dull"]
    assert "line 2 is not UTF-8; the file is read as Windows-1252" in caplog.text


def test_a_long_csv_field_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt\n{'x' * 200_000}\n")
    assert len(read_rows(str(tmp_path / "a.csv")).rows[0].values["prompt"]) == 200_000


def test_a_folder_of_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "train.jsonl")
    assert [row.values["id"] for row in read_rows(str(tmp_path / "folder")).rows] == [1, 2, 3]


def test_pairs_are_known_by_having_nothing_else(tmp_path: Path) -> None:
    for extra, pairs in (({}, True), ({"question": "q"}, False)):
        (tmp_path / "a.jsonl").write_text(json.dumps({"chosen": "a", "rejected": "b", **extra}))
        assert read_rows(str(tmp_path / "a.jsonl")).pairs is pairs
        assert read_rows(str(tmp_path / "a.jsonl"), form="hh").pairs


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": ', r"line 2 is not valid JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n\n"bare"\n', r"line 3 is a str, not an object"),
        ("a.json", b"[1, 2]", r"row 1 is a int, not an object"),
        ("a.json", b"[\n{,\n]", r"line 2 is not valid JSON"),
        ("a.csv", b"prompt,id\nhello, world,3\n", r"row 1 has more fields than the header \(prompt, id\)"),
        ("a.csv", b'prompt\n"open\n', r"row 1 is not valid CSV"),
        ("a.csv", b"prompt\n", "holds no rows"),
        ("a.txt", b"\n \n", "holds no rows"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.parquet", b"PAR1nonsense", "not a Parquet file"),
        ("a.txt.gz", gzip.compress(b"hello")[:-6], "cannot be read"),
        ("a.txt", b"ok\n\x81\xff\n", r"line 2 is neither UTF-8 nor Windows-1252 text \(byte 0x81\)"),
        ("a.neg", b"dull\n", r"cannot tell the form .* '\.neg' .* data\.format=text"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read_rows(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    for path in (str(tmp_path / "gone.jsonl"), "gone.csv", "./gone", "a/b/c"):
        with pytest.raises(UserError, match=r"data\.path=.*no such file or folder"):
            read_rows(path)


def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"data\.path=nobody/nothing: not here, and not to be had from the hub"
    ):
        read_rows("nobody/nothing")


def test_file_and_folder_confused(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"data\.format=hf: .*is a file; try data\.format=auto"):
        read_rows(str(tmp_path / "a.jsonl"), form="hf")
    with pytest.raises(UserError, match=r"data\.format=csv: .*is a folder"):
        read_rows(str(tmp_path), form="csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="a folder, but no dataset"):
        read_rows(str(tmp_path / "empty"))


def test_splits(tmp_path: Path) -> None:
    saved_splits(tmp_path / "d")
    assert len(read_rows(str(tmp_path / "d"), split="test").rows) == 1
    with pytest.raises(UserError, match=r"data\.split=trian: .* splits train, test; did you mean 'train'\?"):
        read_rows(str(tmp_path / "d"), split="trian")


def test_82f_a_missing_column_lists_what_there_is_and_a_missing_field_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"promt": "x", "id": 1}\n{"promt": null}\n{"id": 3}\n')
    source = read_rows(str(tmp_path / "a.jsonl"))
    with pytest.raises(
        UserError,
        match=r"prompt_field=prompt: no column 'prompt' in .*columns are promt, id; did you mean 'promt'",
    ):
        source.field(source.rows[0], "prompt", asked_by="data.prompt_field=prompt")
    for number in (1, 2):
        with pytest.raises(UserError, match=rf"line {number + 1} has no value in column 'promt'"):
            source.field(source.rows[number], "promt", asked_by="data.prompt_field=promt")
