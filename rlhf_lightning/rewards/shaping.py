"""From what the reward said to the score that trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_lightning.functional.moments import RunningMoments
from rlhf_lightning.types import Ended


def shape_scores(
    scores: Tensor,
    *,
    ended: Sequence[Ended],
    missing_eos_penalty: float | None,
    moments: RunningMoments,
    normalize: bool,
    clip: float | None,
) -> Tensor:
    """Normalise, then clip, then take the penalty off answers that were cut.

    The penalty comes last, in units of the shaped score: it always costs the same, cannot be clipped away,
    and stays out of the running statistics. An answer that ended at any of the stop ids or stop strings
    pays nothing.

    Args:
        scores: as the reward gave them, (B,), finite.
        ended: why each answer stopped, B of them.
        missing_eos_penalty: taken off where ``ended`` is "length"; None: nothing is.
        moments: running mean and population deviation of the raw scores. With ``normalize`` it takes in
            ``scores`` first, so that the first iteration is already centred; otherwise it is left alone.
        normalize: (scores - mean) / deviation.
        clip: shaped scores lie in -clip .. clip before the penalty; None: no bound.

    Returns:
        (B,) float32; the input is not changed.

    Raises:
        ValueError: not one reason a score, or a score is not finite.
    """
    if scores.shape != (len(ended),):
        raise ValueError(
            f"scores must have shape ({len(ended)},), one for each ending, got {tuple(scores.shape)}"
        )
    if not scores.isfinite().all():
        raise ValueError(f"scores must be finite, got {scores.tolist()}")
    shaped = scores.float()
    if normalize:
        moments.update(scores)
        shaped = moments.normalize(scores).float()
    if clip is not None:
        shaped = shaped.clamp(-clip, clip)
    if missing_eos_penalty is not None:
        cut = torch.tensor([reason == "length" for reason in ended], dtype=torch.bool, device=scores.device)
        shaped = torch.where(cut, shaped - missing_eos_penalty, shaped)
    return shaped
