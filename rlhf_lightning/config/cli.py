"""From the command line to a running job. Torch and its kin are loaded only after all was judged."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rlhf_lightning.config.resume import RESOLVED
from rlhf_lightning.errors import Interrupted, UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlhf_lightning.config.composing import Command
    from rlhf_lightning.config.schema import Config

ENDED_BY = 128  # plus a signal's number is what shells report for a process that it ended


@dataclass(frozen=True)
class Job:
    """How one job ended."""

    folder: Path
    code: int
    value: float | None = None
    error: str = ""


@dataclass
class Jobs:
    """Runs each job that Hydra hands over, and keeps its end: an error shows at once and hides no other."""

    done: list[Job] = field(default_factory=list)
    current: Path | None = None

    def __call__(self, cfg: DictConfig) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        self.current = Path(hydra.runtime.output_dir)
        job = self._run(cfg, self.current)
        self.done.append(job)
        if job.code and not str(hydra.launcher.get("_target_")).endswith("BasicLauncher"):
            raise RuntimeError(job.error)  # another process counts the failures there
        return job.value

    def _run(self, cfg: DictConfig, folder: Path) -> Job:
        try:
            return Job(folder, 0, start(cfg, folder))
        except UserError as e:
            self._keep(folder, str(e), str(e))
            return Job(folder, e.exit_code, error=str(e).splitlines()[0])
        except SystemExit as e:
            if not e.code:
                return Job(folder, 0)
            code = e.code if isinstance(e.code, int) else 1
            shown = error = "" if isinstance(e.code, int) else str(e.code)
            self._keep(folder, shown, error or f"ended with exit code {code}")
            return Job(folder, code, error=error or f"ended with exit code {code}")
        except Exception as e:
            shown, error = traceback.format_exc().rstrip(), f"{type(e).__name__}: {e}"
        self._keep(folder, shown, shown)
        return Job(folder, 1, error=error.splitlines()[0] if error else "failed")

    @staticmethod
    def _keep(folder: Path, shown: str, kept: str) -> None:
        if shown:
            print(shown, file=sys.stderr, flush=True)
        (folder / "error.txt").write_text(kept + "\n", encoding="utf-8")


def start(cfg: DictConfig, folder: Path) -> float | None:
    """Judge, write down, run.

    Returns:
        The value of ``config.objective`` at the end, for a sweeper.
    """
    from rlhf_lightning.config.network import stay_local_without_network
    from rlhf_lightning.config.resolve import validate

    config = validate(cfg)
    write_resolved(config, folder)
    stay_local_without_network(config)
    if config.stage.name == "pipeline":
        from rlhf_lightning.pipeline import run_pipeline

        return run_pipeline(config, folder)
    from rlhf_lightning.run import run  # torch and all that: only now

    return run(config, folder)


def write_resolved(config: Config, folder: Path) -> None:
    """The plain settings, from the first second. Who comes second to a folder is refused, unless resuming.

    Raises:
        UserError: where another run has its settings there.
    """
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    if config.resume is not None:
        whole = folder / f".{RESOLVED}.tmp"  # a kill in here must not leave a run without its settings
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, folder / RESOLVED)
        return
    try:
        with open(folder / RESOLVED, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        text = f"hydra.run.dir={folder} belongs to another run: take another folder, or resume={folder}"
        raise UserError(text) from None


def main(root: Path, argv: list[str] | None = None) -> int:
    """The whole command line.

    Args:
        root: folder that holds ``conf`` and ``sweeps``.
        argv: the words after the program's name; None: this process's own.
    Returns:
        The exit code: 0, 1 for any fault, 3 where the guard ended a run, 130 where the user interrupted,
        143 after SIGTERM.
    """
    argv = sys.argv[1:] if argv is None else argv
    jobs = Jobs()
    try:
        return _main(root, argv, jobs)
    except UserError as e:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(e, file=sys.stderr)
        return 1
    except yaml.YAMLError as e:
        print(_torn(e), file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        folder = jobs.current
        begun = folder is not None and (folder / RESOLVED).is_file()
        hint = f"; continue with: python train.py resume={folder}" if begun else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return ENDED_BY + (error.number if isinstance(error, Interrupted) else signal.SIGINT)


def _torn(error: yaml.YAMLError) -> str:
    """A config file that is no YAML, in one sentence."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else "a config file"
    return f"{place}: no valid YAML: {problem or ' '.join(str(error).split())}"


def _main(root: Path, argv: list[str], jobs: Jobs) -> int:
    if "--help" in argv or "-h" in argv:
        from rlhf_lightning.config.help import page

        topics = [word for word in argv if not word.startswith("-") and "=" not in word]
        print(page(root / "conf", topics[0] if topics else None))
        return 0
    if argv == ["--version"]:
        from rlhf_lightning import __version__

        print(f"rlhf_lightning {__version__}")
        return 0

    from rlhf_lightning.config.arguments import parse
    from rlhf_lightning.config.composing import Command
    from rlhf_lightning.config.preflight import plan

    flags = parse(argv)
    command = Command(
        root / "conf", flags.tokens, flags.config_name or "config", flags.multirun, flags.folders
    )
    if flags.hydra_only:
        _hand_over(command, flags.hydra_only, jobs)
        return 0
    judged = plan(command)
    for note in judged.notes:
        print(note, file=sys.stderr)
    if any(job.plan for job in judged.jobs):
        _show_plan(judged.jobs, multirun=judged.multirun)
        return 0
    _hand_over(judged.command, ["--multirun"] if judged.multirun else [], jobs)
    if judged.multirun:
        print(table(jobs.done))
    return max((job.code for job in jobs.done), default=0)


def _show_plan(jobs: list[Config], *, multirun: bool) -> None:
    """The memory plan of one run, in place of the run: no folder is made."""
    from rlhf_lightning.planning.show import show_plan

    if multirun:
        raise UserError("plan=true looks at one run: leave out -m")
    show_plan(jobs[0])


def table(done: list[Job]) -> str:
    """How the jobs of a sweep ended, one a line."""
    failed = sum(job.code != 0 for job in done)
    lines = [f"{len(done)} jobs: {len(done) - failed} ok, {failed} failed"]
    for number, job in enumerate(done):
        value = "" if job.value is None else f"{job.value:.4g}"
        end = f"failed  {job.error}" if job.code else f"ok      {value}"
        lines.append(f"  {number:>3}  {end}  {job.folder}")
    return "\n".join(lines)


def _hand_over(command: Command, flags: list[str], jobs: Jobs) -> None:
    """Let Hydra run it: its own parser, folders and launcher, its exceptions as sentences."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from rlhf_lightning.config import composing, overrides
    from rlhf_lightning.config.resolve import report

    words = overrides.read(command.tokens, composing.offered(command))
    if words.faults:
        raise UserError(report(words.faults))
    composing.register_folders(command)
    entry = hydra.main(
        version_base=composing.VERSION_BASE, config_path=str(command.conf), config_name=command.config_name
    )
    with _arguments([*flags, *command.tokens]), _raising():
        try:
            entry(jobs.__call__)()
        except (HydraException, OmegaConfBaseException, ValueError) as e:
            raise UserError(overrides.in_one_sentence(e)) from e
        except SystemExit as e:
            if e.code:
                raise


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    """Hydra reads the process's own arguments."""
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _raising() -> Iterator[None]:
    """Hydra's switch that makes it raise where it would print and exit by itself."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
