"""The dashed options, which are Hydra's own; everything else on the command line is an override."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from rlhf_lightning.config.describe import known, nearest
from rlhf_lightning.config.overrides import with_home
from rlhf_lightning.errors import UserError


@dataclass(frozen=True)
class Flags:
    """What was asked for by dashed options."""

    tokens: list[str]
    multirun: bool
    config_name: str | None
    folders: tuple[Path, ...]
    hydra_only: list[str]  # options with which Hydra prints something and runs nothing


def parse(argv: list[str]) -> Flags:
    """Read the options.

    Raises:
        UserError: for an unknown option, or one that does not fit.
    """
    for word in argv:
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("-") and "=" in word and ("." in name or known(name)):
            raise UserError(f"{word} is no option: settings are given without dashes, {word.lstrip('-')}")
    parser = get_args_parser()
    parser.prog = "python train.py"

    def error(message: str) -> NoReturn:
        raise UserError(f"{message}; see python train.py --help")

    parser.error = error  # type: ignore[method-assign]
    args, rest = parser.parse_known_args(argv)
    for word in rest:
        if word.startswith("-"):
            options = [option for action in parser._actions for option in action.option_strings]
            close = nearest(word.partition("=")[0], options)
            hint = f"; did you mean {close}?" if close else "; see python train.py --help"
            raise UserError(f"{word} is no option{hint}")
    if args.package is not None and args.cfg is None:
        raise UserError(f"--package {args.package} goes with --cfg only")
    if args.resolve and args.cfg is None:
        raise UserError("--resolve goes with --cfg only")
    if args.config_path is not None or args.experimental_rerun is not None:
        raise UserError(
            "--config-path and --experimental-rerun are not supported: add a folder with --config-dir"
        )
    folders: tuple[Path, ...] = ()
    if args.config_dir is not None:
        folders = (Path(args.config_dir).absolute(),)
        if not folders[0].is_dir():
            raise UserError(f"--config-dir {args.config_dir} is no folder")
    printing = [
        *(["--hydra-help"] if args.hydra_help else []),
        *(["--cfg", args.cfg] if args.cfg else []),
        *(["--package", args.package] if args.package else []),
        *(["--resolve"] if args.resolve else []),
        *(["--info", args.info] if args.info else []),
        *(["--shell-completion"] if args.shell_completion else []),
    ]
    if args.multirun and printing:
        raise UserError(f"-m runs a sweep and {printing[0]} runs nothing: give one of them")
    tokens = [with_home(word) for word in [*args.overrides, *rest]]
    return Flags(tokens, args.multirun, args.config_name, folders, printing)
