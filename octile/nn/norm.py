"""Normalization: RMSNorm, and LayerNorm for the indexer's keys.

Sources: Zhang and Sennrich (arXiv 1910.07467); Ba et al. (arXiv 1607.06450).
"""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn.fused.elementwise import rms_norm

LAYER_NORM_EPS = 1e-6  # of DeepSeek-V3.2's indexer


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dimension, computed in FP32 whatever x is.

    Shapes: x [..., dim] → [..., dim] in x's dtype.
    """

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return x / √(mean(x²) + eps) · weight over the last dimension, computed in FP32, in x's dtype."""
        return rms_norm(x, self.weight, self.eps)[0]

    def extra_repr(self) -> str:
        """The size and eps, for the printed module."""
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.Module):
    """(x − mean(x)) / √(var(x) + eps) · weight + bias over the last dimension, in FP32 whatever x is.

    Its parameters are FP32, as published, also in a model of another dtype. Shapes: x [..., dim] → float32 [..., dim].
    """

    def __init__(self, dim: int, eps: float = LAYER_NORM_EPS):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x."""
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply fn as `nn.Module` does, but keep the dtype."""

        def keep_dtype(t: Tensor) -> Tensor:
            result = fn(t)
            return result if result.dtype == t.dtype else t.to(result.device)

        return super()._apply(keep_dtype, recurse)
