"""`nn.Linear` whose three products run in a recipe's formats."""

import torch
from torch import Tensor, nn

from octile.nn import functional
from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.recipe_holder import RecipeHolder
from octile.nn.smooth_swiglu import scale_columns
from octile.recipe import Recipe


class Linear(nn.Linear, RecipeHolder[Recipe]):
    """A linear layer in 8 bits with the interface, the parameters and the `state_dict` of `torch.nn.Linear`.

    fprop, dgrad and wgrad take operands as `recipe` casts them and sum in FP32. Of the input only its 8-bit form is
    kept for the backward pass; the weight is quantised once a step, for all micro-batches (with delayed scaling: for
    each). Where the weight has a buffer `main_grad` [N, K] float32, its gradient is summed there instead of in `.grad`.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`; any sizes, multiples of 128 are fast.
        recipe: the formats; `Recipe.deepseek_v3()` if not given.

    Shapes: x [..., in_features] → [..., out_features], in autocast's dtype where autocast is on, else in x's.
    Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.use_recipe(recipe or Recipe.deepseek_v3())

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe) -> "Linear":
        """A layer around the same parameters, not a copy of them; hooks and other attributes come along."""
        converted = cls.__new__(cls)
        own = {name: linear.__dict__[name].copy() for name in ("_parameters", "_buffers", "_modules")}
        converted.__dict__ = linear.__dict__ | own
        converted.use_recipe(recipe)
        return converted

    def use_recipe(self, recipe: Recipe) -> None:
        """Changes the recipe; what a delayed recipe has seen so far is forgotten."""
        self.recipe = recipe
        self.history = history_for(recipe, self.weight)
        self.train(self.training)

    def forward(self, x: Tensor, column_scale: Tensor | None = None) -> Tensor:
        """x · weightᵀ + bias; with column_scale [in_features], the weight's columns are multiplied by it before."""
        weight = self.weight if column_scale is None else scale_columns(self.weight, column_scale)
        return functional.linear(x, weight, self.bias, self.recipe, self.history)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def history_for(recipe: Recipe | None, weight: Tensor) -> AmaxHistory | None:
    """Room for what a delayed recipe sees, on the weight's device; None for the others."""
    return AmaxHistory(weight.device) if recipe is not None and recipe.has_delayed_scaling else None
