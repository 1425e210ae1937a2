"""The feed-forward layer: SwiGLU, down(silu(gate(x)) · up(x)).  Source: Shazeer (arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn.linear import Linear
from octile.nn.smooth import power_of_2
from octile.nn.together import together


class MLP(nn.Module):
    """SwiGLU with the published checkpoints' names: x [..., hidden_size] → [..., hidden_size]."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = together(x, self.gate_proj, self.up_proj)
        h = F.silu(gate) * up
        down = self.down_proj
        if not (isinstance(down, Linear) and down.recipe.smooths_swiglu):
            return down(h)
        scale_I = power_of_2(h.detach().abs().flatten(0, -2).amax(0))
        return down((h / scale_I).to(h.dtype), scale_I)
