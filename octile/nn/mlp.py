"""The feed-forward layer: SwiGLU, down(silu(gate(x)) · up(x)).  Source: Shazeer (arXiv 2002.05202).

The product of two projections has rare, very large values in a few channels, which cost every other value of an FP8
tensor its precision.  Smooth-SwiGLU (arXiv 2409.12517) divides each channel by its largest value and multiplies the
down-projection's weight by the same number, before both are quantised: the result is the same and both are tame.
Shapes: T tokens, D model, I intermediate, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn import functional
from octile.nn.linear import Linear


class MLP(nn.Module):
    """SwiGLU with the published checkpoints' names: x [..., hidden_size] → [..., hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate_proj(x)) * self.up_proj(x)
        down = self.down_proj
        if not (isinstance(down, Linear) and down.recipe.smooths_swiglu):
            return down(h)
        scale_I = power_of_2(h.detach().abs().flatten(0, -2).amax(0))
        return functional.linear(h / scale_I, down.weight * scale_I, None, down.recipe, down.history)


def power_of_2(amax: Tensor) -> Tensor:
    """The powers of two at or above each number, in its dtype; 1 for 0. NaN and Inf stay."""
    mantissa, exponent = torch.frexp(amax.float())  # amax = mantissa · 2^exponent, mantissa in [½, 1)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, amax)).to(amax.dtype)
