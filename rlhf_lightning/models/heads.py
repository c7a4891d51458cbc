"""Scalar heads in float32: V(s_t) for the critic, one score a response for the reward."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_lightning.errors import UserError


class ScalarHead(nn.Module):
    """``(..., H) -> (...)``: one float32 number from a hidden state, whatever the backbone's dtype.

    Starts near zero, N(0, 0.01 / (H + 1)) in variance, so that first values do not drown the advantages.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, hidden_size) * 0.1 / (hidden_size + 1) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.float() @ self.weight[0] + self.bias).float()

    def save(self, path: Path) -> None:
        state = self.state_dict()
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path)

    def load(self, path: Path) -> None:
        """Copy weight (1, H) and bias (1,) from a safetensors file.

        Raises:
            UserError: the file lacks one of them, or was made for another hidden size.
        """
        tensors = load_file(path)
        for name, own in self.state_dict().items():
            if name not in tensors or tensors[name].shape != own.shape:
                found = tuple(tensors[name].shape) if name in tensors else "nothing"
                raise UserError(
                    f"{path}: {name} must have shape {tuple(own.shape)} for this backbone, found {found}"
                )
            own.copy_(tensors[name])
