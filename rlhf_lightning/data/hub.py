"""Rows by way of the ``datasets`` library: saved folders, folders of files, datasets on the hub."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhf_lightning.errors import UserError


def read_dataset(path: str, *, split: str, limit: int | None) -> list[dict[str, Any]]:
    """The records of one split.

    Args:
        path: a folder written by ``save_to_disk``, a folder of data files, or an id on the Hugging Face hub.
        split: which split; a folder saved without splits has but one, whatever this says.
        limit: no more than the first so many rows.

    Raises:
        UserError: if there is no such dataset or split.
    """
    import datasets  # here, because it takes seconds and most runs read a plain file

    folder = Path(path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded: Any = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else path)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "a folder, but no dataset" if folder.is_dir() else "not here, and not to be had from the hub"
        hint = "point data.path at a file or folder"
        raise UserError(f"data.path={path}: {where} ({first}); {hint}") from error
    if isinstance(loaded, dict):
        if split not in loaded:
            near = get_close_matches(split, list(loaded), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"data.split={split}: data.path={path} has the splits {', '.join(loaded)}{hint}")
        loaded = loaded[split]
    if limit is not None:
        loaded = loaded.select(range(min(limit, len(loaded))))
    return list(loaded)
