"""Which prompts an iteration takes: a function of counters alone, so that there is no state to save."""

from __future__ import annotations

import torch

from rlhf_lightning.randomness import counted_seed


def prompt_indices(count: int, *, per_iteration: int, iteration: int, seed: int, shuffle: bool) -> list[int]:
    """The prompts of one iteration, over all ranks.

    The prompts form an endless stream: pass 0 over all of them, pass 1, and so on, each pass a permutation
    drawn from ``counted_seed(seed, "prompts", pass)``, or file order. Iteration ``k`` takes the positions
    ``k * per_iteration .. (k + 1) * per_iteration - 1``. A batch may span passes, and may hold more prompts
    than there are.

    Args:
        count: prompts there are.
        per_iteration: prompts of one iteration, over all ranks.
        iteration: k, from 0.
        seed: the run's seed.
        shuffle: False gives file order on every pass.

    Returns:
        ``per_iteration`` numbers from 0 to ``count - 1``.

    Raises:
        ValueError: if there are no prompts, or a counter is out of range.
    """
    if count < 1 or per_iteration < 1 or iteration < 0:
        raise ValueError(
            "need count >= 1, per_iteration >= 1 and iteration >= 0; "
            f"got {count}, {per_iteration} and {iteration}"
        )
    position, end = iteration * per_iteration, (iteration + 1) * per_iteration
    indices: list[int] = []
    while position < end:
        number, offset = divmod(position, count)
        taken = min(count - offset, end - position)
        if shuffle:
            generator = torch.Generator().manual_seed(counted_seed(seed, "prompts", number))
            indices += torch.randperm(count, generator=generator)[offset : offset + taken].tolist()
        else:
            indices += range(offset, offset + taken)
        position += taken
    return indices
