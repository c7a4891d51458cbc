"""Advantages relative to the group of answers to one prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.advantages.groups import as_groups
from rlhf_lightning.functional.masked import safe_std


def grpo(scores: Tensor, *, group_size: int, scale: bool = True) -> Tensor:
    """Group-relative advantage of every response.

        A_i = (s_i − mean(s)) / (std(s) + 1e-4)        scale=False:  A_i = s_i − mean(s)

    Shao et al. 2024, section 4.1.2, https://arxiv.org/abs/2402.03300; without the division, which favours
    prompts that are nearly solved or nearly hopeless: Dr. GRPO, Liu et al. 2025,
    https://arxiv.org/abs/2503.20783.

    Note: the paper does not say which std; it is the sample's, over k − 1, as in the libraries of the field,
    and the 1e-4 is theirs too. A group without spread gets 0.

    Args:
        scores: s, one a response, (B,); the k answers to one prompt are adjacent rows.
        group_size: k >= 2.
        scale: divide by the group's deviation.
    Returns:
        (B,), at least float32; spread it with ``per_token``.
    Raises:
        ValueError: k is below 2 or does not divide B.
    """
    groups = as_groups(scores, group_size)
    mean = groups.double().mean(dim=1, keepdim=True)
    centred = groups - mean
    if scale:
        variance = centred.square().sum(dim=1, keepdim=True) / (group_size - 1)
        centred = centred / (safe_std(mean, variance) + 1e-4)
    return torch.flatten(centred).to(groups.dtype)
