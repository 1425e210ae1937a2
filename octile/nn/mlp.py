"""The feed-forward layer: SwiGLU, down(silu(gate(x)) · up(x)).  Source: Shazeer (arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn.functional import result_dtype
from octile.nn.fused import feed_forward
from octile.nn.fused.block_input import BlockInput, read
from octile.nn.fused.layers import common_recipe, fusable_norm
from octile.nn.fused.shared_quantization import shared_quantization
from octile.nn.linear import Linear
from octile.nn.norm import RMSNorm
from octile.nn.smooth_swiglu import power_of_2
from octile.recipe import Recipe


class MLP(nn.Module):
    """SwiGLU with the published checkpoints' names: x [..., hidden_size] → [..., hidden_size].

    Under a recipe that says how SwiGLU's inputs are kept, and with an intermediate_size that is a multiple of 128, its
    three layers are one function (`feed_forward.py`): in its backward pass it computes h from gate and up as they were
    kept. Otherwise, and where a layer has hooks or was replaced, they are called one after the other.
    """

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, norm: RMSNorm | None = None, residual: bool = False) -> Tensor:
        """The layer of x, or of norm(x), of which only x is then kept for the backward pass.

        Args:
            residual: adds x to the result.
        """
        recipe = self.fused_recipe()
        if recipe is None or recipe.formats is None or not fusable_norm(norm):
            y = self._in_steps(x if norm is None else norm(x))
            return x + y if residual else y
        of_x = read(x.reshape(-1, x.shape[-1]), recipe.formats.x, norm)
        y_TD = self.fused(of_x, recipe)
        return (of_x.residual + y_TD if residual else y_TD).view_as(x)

    def fused_recipe(self) -> Recipe | None:
        """The recipe, where the layers are one function under it."""
        recipe = common_recipe(self.gate_proj, self.up_proj, self.down_proj)
        fuses = recipe is not None and recipe.can_fuse_swiglu and feed_forward.takes(self.down_proj.in_features)
        return recipe if fuses else None

    def fused(self, x: BlockInput, recipe: Recipe) -> Tensor:
        """The one function: x [T, hidden_size] → [T, hidden_size]."""
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        return feed_forward.feed_forward(x, *weights, recipe, result_dtype(x.x))

    def _in_steps(self, x: Tensor) -> Tensor:
        gate, up = shared_quantization(x, self.gate_proj, self.up_proj)
        h = F.silu(gate) * up
        down = self.down_proj
        if not (isinstance(down, Linear) and down.recipe.has_smooth_swiglu):
            return down(h)
        scale_I = power_of_2(h.detach().abs().flatten(0, -2).amax(0))
        return down((h / scale_I).to(h.dtype), scale_I)
