"""``python -m rlhf_lightning.export RUN``: a trained adapter, or the whole model, for use anywhere."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_lightning.config.network import stay_local
from rlhf_lightning.config.subject import Subject, find_subject
from rlhf_lightning.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    args = _parse(argv)
    try:
        _export(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_lightning.export",
        description="Write a trained adapter as a folder of its own, or merged into its model.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder, or folder or hub id of an adapter")
    parser.add_argument("--merge", action="store_true", help="one whole model, which needs no PEFT")
    parser.add_argument(
        "--to", metavar="FOLDER", help="new or empty folder (default: RUN/export, RUN/merged)"
    )
    parser.add_argument(
        "--model", metavar="BASE", help="the base model's folder or hub id, where it has moved"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of a merged model (default: bfloat16)"
    )
    parser.add_argument("--device", default="auto", help="where merging is computed: auto, cpu, cuda, ...")
    return parser.parse_args(argv)


def _export(args: argparse.Namespace) -> None:
    subject = find_subject(args.run, base=args.model)  # before anything heavy
    if subject.adapter is None:
        raise UserError(f"RUN={args.run} is a whole model already: there is no adapter to export")
    if args.dtype and not args.merge:
        raise UserError(f"--dtype {args.dtype} goes with --merge: an adapter keeps the numbers it has")
    target = _target(args, subject)
    print(subject.text)
    stay_local([subject.adapter, subject.model.path])
    from rlhf_lightning.exporting import adapter, merged
    from rlhf_lightning.loading import pick_device, quiet

    quiet()
    with written_whole(target) as folder:
        if args.merge:
            report = merged.write(
                subject, folder, dtype=args.dtype or "bfloat16", device=pick_device(args.device), tell=_tell
            )
        else:
            report = adapter.write(subject, folder)
    print(*report, sep="\n")
    print(f"exported  {target}")


def _target(args: argparse.Namespace, subject: Subject) -> Path:
    name = "merged" if args.merge else "export"
    if args.to is None and subject.run is None:
        raise UserError("--to FOLDER is needed where RUN is no run folder")
    target = Path(args.to).expanduser().absolute() if args.to else (subject.run or Path()).absolute() / name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target} is there already and not an empty folder: name another")
    return target


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` that takes its name at the end; whatever goes wrong, nothing stays.

    Raises:
        UserError: it cannot be made.
    """
    folder = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--to {target} cannot be written: {error.strerror}") from error
    try:
        yield folder
        if target.exists():
            target.rmdir()
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _tell(step: str) -> None:
    print(f"  {step} ...", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
