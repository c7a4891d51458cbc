"""Frozen linear maps that read one input, with an adapter's low-rank terms on them, as one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Term(NamedTuple):
    """What an adapter adds to one map: ``scale * B A x`` (Hu et al. 2021, equation 3)."""

    A: Tensor  # (r, I), trains in float32
    B: Tensor  # (O, r)
    scale: float


class Low(NamedTuple):
    """All terms of a group side by side in the dtype of the arithmetic."""

    A: Tensor  # (R, I): the A of every term below one another
    B: Tensor  # (O, R): each term's scaled B where its rows and columns cross, 0 elsewhere


@dataclass(frozen=True)
class Linears:
    """``y = W x + b + sum of terms``, several maps of one input stacked by rows.

    Args:
        weight: gives W (O, I) in the dtype of the arithmetic, kept or de-quantised on the spot.
        bias: (O,), or None.
        sizes: rows of each map; they sum to O.
        terms: the adapter's term on each map, None where it has none.
    """

    weight: Callable[[], Tensor]
    bias: Tensor | None
    sizes: tuple[int, ...]
    terms: tuple[Term | None, ...]

    @property
    def parameters(self) -> list[Tensor]:
        """A and B of each term in turn: the order in which ``backward`` gives their gradients."""
        return [tensor for term in self.terms if term is not None for tensor in (term.A, term.B)]

    def low(self, dtype: torch.dtype) -> Low | None:
        """The terms ready to multiply; None where there are none."""
        present = [term for term in self.terms if term is not None]
        if not present:
            return None
        a = torch.cat([term.A.detach() for term in present]).to(dtype)
        b = torch.zeros(sum(self.sizes), len(a), dtype=dtype, device=a.device)
        for term, rows, columns in self._blocks():
            torch.mul(term.B.detach(), term.scale, out=b[rows, columns])
        return Low(a, b)

    def forward(self, x: Tensor, low: Low | None) -> Tensor:
        """(N, I) -> (N, O)."""
        return self.opened(x, low)[0]

    def opened(self, x: Tensor, low: Low | None) -> tuple[Tensor, Tensor | None]:
        """The output, and A x from between the terms' two factors, (N, R), which ``backward`` can use."""
        y = linear(x, self.weight(), self.bias)
        if low is None:
            return y, None
        inner = linear(x, low.A)
        return y.addmm_(inner, low.B.T), inner

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        low: Low | None,
        *,
        opened: Tensor | None = None,
        input_grad: bool = True,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Gradients of the input (N, I), or None, and of ``parameters`` in their own dtype.

        Args:
            grad: (N, O) gradient of the output.
            x: the input again.
            opened: A x, where it was kept.
        """
        if low is None:
            return (grad @ self.weight() if input_grad else None), []
        inner = grad @ low.B  # (N, R)
        grad_a, grad_b = inner.T @ x, grad.T @ (linear(x, low.A) if opened is None else opened)
        found = []
        for term, rows, columns in self._blocks():
            found += [grad_a[columns].to(term.A.dtype), grad_b[rows, columns].to(term.B.dtype) * term.scale]
        if not input_grad:
            return None, found
        return (grad @ self.weight()).addmm_(inner, low.A), found

    def _blocks(self) -> Sequence[tuple[Term, slice, slice]]:
        """Each term with its rows of the output and its columns of the stacked ranks."""
        found, row, column = [], 0, 0
        for size, term in zip(self.sizes, self.terms, strict=True):
            if term is not None:
                found.append((term, slice(row, row + size), slice(column, column + len(term.A))))
                column += len(term.A)
            row += size
        return found
