"""Root mean square normalization.  Source: Zhang and Sennrich (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn

from octile.nn.fused.elementwise import rms_norm


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
