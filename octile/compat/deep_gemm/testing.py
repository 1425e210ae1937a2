"""`deep_gemm.testing`: the measures by which DeepGEMM's callers compare results."""

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["calc_diff", "count_bytes"]

Tensors: TypeAlias = "Tensor | tuple[Tensors, ...] | list[Tensors] | None"


def calc_diff(x: Tensor, y: Tensor) -> Tensor:
    """Return Σ(x − y)² / Σ(x² + y²) in float64, a scalar: 0 where x and y are equal, also if both are zero."""
    x, y = x.double(), y.double()
    size = (x.square() + y.square()).sum()
    return torch.where(size == 0, 0.0, (x - y).square().sum() / size)


def count_bytes(*tensors: Tensors) -> int:
    """Return the bytes of all elements of tensors, and of those in tuples and lists; None has none."""
    return sum(count_bytes(*t) if isinstance(t, tuple | list) else t.nbytes for t in tensors if t is not None)
