"""What the earlier processes of a run left in W&B's own files.

W&B writes from a process of its own, a moment behind the run: after a kill the files may end before the last
checkpoint or after it. Its Python package no longer has a reader for them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# LevelDB's log format, after W&B's header: records cut to fit into blocks, each part with a checksum, its
# length and its kind (https://github.com/google/leveldb/blob/main/doc/log_format.md).
_HEADER, _BLOCK, _PART = 7, 32768, 7
_FULL, _LAST = 1, 4


def last_iteration(run_dir: Path, run_id: str) -> int:
    """The highest iteration in the files of one run, -1 where there is none."""
    found = -1
    for path in run_dir.glob(f"wandb/*run-*/run-{run_id}.wandb"):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    if "iteration" in (item.key, *item.nested_key):
                        found = max(found, int(json.loads(item.value_json)))
    return found


def records(path: Path) -> Iterator[Any]:
    """The whole records of a file; one that a kill tore, and what would follow it, is left out."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), _HEADER, b""
    while place + _PART <= len(data):
        room = _BLOCK - place % _BLOCK
        if room < _PART:
            place += room
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + _PART])
        part = data[place + _PART : place + _PART + length]
        if len(part) < length or kind == 0:
            return
        whole += part
        place += _PART + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(whole)
            yield record
            whole = b""
