"""``python train.py doctor=true``: proves that this model with these settings learns what it should.

Every check runs the parts that training runs, on real answers of the loaded model, with a real optimizer
step where one is needed. Nothing stays: tensors, counters and modes are put back to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from rlhf_lightning.console import Check, print_checks
from rlhf_lightning.doctor import endings, frozen, gradients, ratios, reward, sampling, scoring
from rlhf_lightning.doctor.exam import Exam
from rlhf_lightning.doctor.proof import Finding, Proof

if TYPE_CHECKING:
    from rlhf_lightning.data.datamodule import PromptDataModule
    from rlhf_lightning.stages.ppo import PPO

PROOFS: tuple[Proof, ...] = (
    *ratios.PROOFS,
    *scoring.PROOFS,
    *sampling.PROOFS,
    *endings.PROOFS,
    *gradients.PROOFS,
    *frozen.PROOFS,
    *reward.PROOFS,
)


def examine(module: PPO, data: PromptDataModule, console: Console) -> bool:
    """Run every check, show progress, then a table; below it one sentence for each check that failed.

    Args:
        module, data: of a run that has not begun.
        console: where it is shown.

    Returns:
        Whether all checks passed.

    Raises:
        UserError: no prompt can be had, or none can be answered.
    """
    checks = []
    with _progress(console) as progress:
        task = progress.add_task("sampling a first batch", total=len(PROOFS))
        with Exam(module, data) as exam:
            for proof in PROOFS:
                progress.update(task, description=proof.name)
                finding = judge(proof, exam)
                checks.append(Check(proof.name, finding.passed, finding.figure))
                progress.advance(task)
    print_checks(console, checks)
    for proof, check in zip(PROOFS, checks, strict=True):
        if not check.passed:
            console.print(f"\n{proof.name}: {proof.meaning}", style="red", markup=False)
    return all(check.passed for check in checks)


def judge(proof: Proof, exam: Exam) -> Finding:
    """One check; an error in it is a failure with the error as its figure, and the others go on."""
    try:
        return proof.run(exam)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no message")
        return Finding(False, f"{type(error).__name__}: {first.strip()[:160]}")
    finally:
        exam.model.eval()


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
