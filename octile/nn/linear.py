"""`nn.Linear` whose three GEMMs run in a recipe's formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from octile.nn import functional
from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.fused.head_losses import HeadLosses
from octile.nn.fused.high_precision import HighPrecisionLinear
from octile.nn.smooth_swiglu import scale_columns
from octile.recipe import Recipe, check_recipe

R = TypeVar("R", bound=Recipe | None)
M = TypeVar("M", bound=nn.Module)
_recipe_changes = 0  # assignments of recipes: after one, modules decide again what is fused
_was_batch_invariant = False  # whether a module was ever given a batch-invariant recipe


class RecipeHolder(Generic[R]):
    """Mixin for a module with a recipe; it counts the assignments of recipes in all modules."""

    _recipe: R

    @property
    def recipe(self) -> R:
        """The formats of this module's GEMMs."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: R) -> None:
        global _recipe_changes, _was_batch_invariant
        check_recipe(recipe)
        self._recipe = recipe
        _recipe_changes += 1
        _was_batch_invariant = _was_batch_invariant or (recipe is not None and recipe.batch_invariant)


def recipe_of(model: nn.Module) -> Recipe | None:
    """Return the recipe of the first layer of a model that has one; None: the model is not converted."""
    holders = (module.recipe for module in model.modules() if isinstance(module, RecipeHolder))
    return next((recipe for recipe in holders if recipe is not None), None)


def was_batch_invariant() -> bool:
    """Return whether any module was given a batch-invariant recipe; where none was, nothing has to be refused."""
    return _was_batch_invariant


def recipe_changes() -> int:
    """Return how often any module's recipe was assigned."""
    return _recipe_changes


class Linear(nn.Linear, RecipeHolder[Recipe]):
    """A linear layer in FP8 with the interface, the parameters and the `state_dict` of `torch.nn.Linear`.

    fprop, dgrad and wgrad read operands that are quantized by `recipe`, and sum in FP32. The input is saved for
    backward in FP8 only. The weight is quantized once a step for all micro-batches; with delayed scaling, once for each
    micro-batch. If the weight has a buffer `main_grad` [N, K] float32, its gradient is added there, not to `.grad`.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`; any sizes; multiples of 128 are fast.
        recipe: the formats; `Recipe.deepseek_v3()` if not given.

    Shapes: x [..., in_features] → [..., out_features], in autocast's dtype if autocast is on, else in x's.
    Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.
    """

    # Computes the layer together with others on the same input, as (layer, x) → y, or None where it cannot; see
    # `octile.nn.joined_linear`
    joined: Callable[[Linear, Tensor], Tensor | None] | None = None

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
    def from_linear(cls, linear: nn.Linear, recipe: Recipe) -> Linear:
        """Make a layer that shares the parameters of `linear`, its hooks and its other attributes."""
        converted = with_class(cls, linear)
        converted.use_recipe(recipe)
        return converted

    def use_recipe(self, recipe: Recipe) -> None:
        """Change the recipe, and clear the amax history that delayed scaling has collected."""
        self.recipe = recipe
        self.history = history_for(recipe, self.weight)
        self.train(self.training)

    def forward(self, x: Tensor, column_scale: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ + bias; column_scale [in_features], if given, multiplies the weight's columns first."""
        if column_scale is None:
            y = None if self.joined is None else self.joined(self, x)
            if y is not None:
                return y
            return functional.linear(x, self.weight, self.bias, self.recipe, self.history)
        weight = scale_columns(self.weight, column_scale)
        return functional.linear(x, weight, self.bias, self.recipe.smoothed, self.history)

    def extra_repr(self) -> str:
        """The arguments of `nn.Linear` and the name of the recipe, for the printed module."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


class BatchInvariantHead(nn.Linear):
    """An output head whose rows of logits do not depend on each other, in FP32: that of `Recipe.exact`.

    Shapes: x [..., in_features] → float32 [..., out_features].
    """

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ, of operands in x's dtype; with labels [...] the losses of these logits, float32 [...].

        Losses are computed on a GPU, and their labels are those of `octile.nn.fused.cross_entropy`.
        """
        x_TK = x.flatten(0, -2)
        if labels is not None:
            return HeadLosses.apply(x_TK, self.weight, labels.flatten(), x.dtype).view(labels.shape)
        y_TN = HighPrecisionLinear.apply(x_TK, self.weight, None, x.dtype, torch.float32, None, True)
        return y_TN.unflatten(0, x.shape[:-1])


def with_class(cls: type[M], module: nn.Module) -> M:
    """Make a module of a class that shares the parameters, submodules, hooks and other attributes of `module`."""
    made = cls.__new__(cls)
    own = {name: module.__dict__[name].copy() for name in ("_parameters", "_buffers", "_modules")}
    made.__dict__ = module.__dict__ | own
    return made


def history_for(recipe: Recipe | None, weight: Tensor) -> AmaxHistory | None:
    """Make the amax history of a recipe with delayed scaling, on the weight's device; None for other recipes."""
    if recipe is None or recipe.formats is None or not recipe.formats.is_delayed:
        return None
    return AmaxHistory(recipe.formats.window, weight.device)
