"""torchtitan's `GroupedExperts` in a recipe's formats, on the rows that torchtitan has sorted by expert.

torchtitan's mixture of experts, or its expert parallelism, hands the experts rows [R, D] that are sorted by expert and
the number of rows of each. octile's grouped GEMMs take any number of rows, so none is padded here; those with which
expert parallelism has padded an expert's rows are zeros, and so are their results. The experts stay the same object,
with the same parameters and names: routing, dispatch, combine, checkpoints and parallelism are torchtitan's.

Where recipe and sizes allow it, the experts are one function, which saves the rows and SwiGLU's inputs in FP8
(`octile.nn.fused.feed_forward`). Otherwise they are grouped GEMMs before and after SwiGLU.

Source: torchtitan 0.2, `torchtitan.models.moe.moe`. Shapes: R rows, D model, E experts of this rank, I intermediate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import GroupedExperts

from octile.nn.functional import grouped_linear, result_dtype
from octile.nn.fused.block_input import quantize_block_input
from octile.nn.fused.elementwise import swiglu
from octile.nn.fused.feed_forward import can_fuse_size, sorted_experts_feed_forward
from octile.nn.fused.layers import is_dtensor
from octile.nn.linear import RecipeHolder, history_for
from octile.nn.moe import down_projections
from octile.nn.tensor_parallel import check_blocks
from octile.ops.quantize import INPUT_DTYPES
from octile.recipe import Recipe

WEIGHTS = ("w1", "w3", "w2")  # of the gates [E, I, D], of up [E, I, D] and of down [E, D, I]


class QuantizedGroupedExperts(GroupedExperts, RecipeHolder[Recipe]):
    """`GroupedExperts` whose GEMMs, forward and backward, run in the formats of its recipe."""

    @property
    def linear_layers(self) -> int:
        """How many linear layers its stacked weights stand for."""
        return len(WEIGHTS) * self.num_experts

    def use_recipe(self, recipe: Recipe) -> None:
        """Change the recipe, and clear the amax history that delayed scaling has collected."""
        self.recipe = recipe
        self.w1_history, self.w3_history, self.w2_history = (history_for(recipe, getattr(self, w)) for w in WEIGHTS)
        self.train(self.training)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Compute rows [R, D] that are sorted by expert: [R, D] in autocast's dtype if autocast is on, else in x's.

        Args:
            x: the rows; those after the last expert's give zeros.
            num_tokens_per_expert: [E], how many rows each expert has.

        Raises:
            ValueError: tensor parallelism has divided a block of the weights, or what has one scale, among ranks.
        """
        recipe, dtype = self.recipe, result_dtype(x)
        gate, up, down = (_local(getattr(self, name), recipe) for name in WEIGHTS)
        offs = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        if recipe.can_fuse_swiglu and can_fuse_size(down.shape[-1]):
            return sorted_experts_feed_forward(quantize_block_input(x, recipe), (gate, up, down), offs, dtype)
        pairs = (gate, self.w1_history), (up, self.w3_history)
        h = swiglu(*(grouped_linear(x, weight, offs, recipe, history) for weight, history in pairs))
        return down_projections(h, offs, down, recipe, self.w2_history)

    def extra_repr(self) -> str:
        """The name of the recipe, for the printed module."""
        return f"recipe={self.recipe.name}"


class StackedExperts:
    """torchtitan's `GroupedExperts` as `octile.convert` sees them.

    Args:
        experts: the module.

    Attributes:
        linear_layers: how many linear layers its stacked weights stand for.
        why_unsupported: why it cannot be converted; None: it can.
    """

    def __init__(self, experts: Any):
        self.experts = experts
        self.linear_layers: int = len(WEIGHTS) * experts.num_experts
        self.why_unsupported = _why_unsupported(experts)

    def use_recipe(self, recipe: Recipe) -> None:
        """Have the experts computed by this recipe."""
        self.experts.__class__ = QuantizedGroupedExperts
        self.experts.use_recipe(recipe)


def stacked_experts(module: nn.Module) -> StackedExperts | None:
    """Return how a recipe gets to torchtitan's experts; None for any other module."""
    return StackedExperts(module) if isinstance(module, GroupedExperts) else None


def _why_unsupported(experts: GroupedExperts) -> str | None:
    if type(experts) is not GroupedExperts:
        return f"{type(experts).__name__} (a subclass of GroupedExperts)"
    if not {getattr(experts, name).dtype for name in WEIGHTS} <= set(INPUT_DTYPES):
        return "stacked experts that are quantized already"
    return None


def _local(weight: Any, recipe: Recipe) -> Tensor:
    """Return the part of a stacked weight that is on this rank, as expert and tensor parallelism have divided it."""
    if not is_dtensor(weight):
        return weight
    local = weight.to_local()
    for dim, size in enumerate(weight.shape[1:], start=1):
        divided = zip(weight.placements, weight.device_mesh.shape, strict=True)
        ranks = math.prod(n for placement, n in divided if placement.is_shard(dim))
        if ranks > 1:
            check_blocks("the experts' hidden_dim", size, ranks, recipe)
    return local
