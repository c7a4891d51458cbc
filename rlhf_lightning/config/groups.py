"""The folders of choices."""

from __future__ import annotations

from pathlib import Path


def groups(*folders: Path) -> dict[str, list[str]]:
    """Groups and the words that they offer.

    Args:
        folders: config folders, such as ``conf``. Files that begin with an underscore are shared fragments,
            and the ``hydra`` group is Hydra's own business: neither is listed.
    """
    found: dict[str, set[str]] = {}
    for folder in folders:
        for group in (p for p in folder.iterdir() if p.is_dir() and p.name != "hydra"):
            names = {f.stem for f in group.glob("*.yaml") if not f.name.startswith("_")}
            if names:
                found.setdefault(group.name, set()).update(names)
    return {group: sorted(found[group]) for group in sorted(found)}
