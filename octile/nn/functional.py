"""Linear layers in a recipe's formats, as differentiable functions: `linear`, and `grouped_linear` for experts.

The data flow from the operands to the three GEMMs is in `octile.nn.fused.linear`, and that of a recipe without FP8 in
`octile.nn.fused.high_precision`.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.1, figure 6. Shapes: T tokens, K inputs, N outputs, G experts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.fused.high_precision import HighPrecisionLinear
from octile.nn.fused.layers import check_operands, is_dtensor
from octile.nn.fused.linear import QuantizedLinear
from octile.nn.fused.shared_quantization import shared_by_layers
from octile.nn.main_grad import check_main_grad
from octile.nn.weight_cache import can_cache
from octile.ops.matmul import check_sizes
from octile.ops.operator import check_tensor
from octile.ops.quantize import INPUT_DTYPES
from octile.recipe import GEMMS, Recipe, check_recipe


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    history: AmaxHistory | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias in the recipe's formats; differentiable.

    x, weight and bias may be DTensors (`octile.nn.tensor_parallel`); then so is the result.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: [N, K]. If it has a buffer `main_grad` [N, K] float32, its gradient is added there and `.grad` is
            not changed; otherwise autograd gets the gradient, computed in FP32.
        bias: [N] or None.
        recipe: None is `torch.nn.functional.linear`, which ignores main_grad.
        history: the amax history of a recipe with delayed scaling.

    Returns:
        [..., N] in autocast's dtype if autocast is on, else in x's.

    Raises:
        TypeError: x, weight or main_grad has another dtype, only some of x, weight and bias are DTensors, or recipe is
            not a Recipe, such as the name of one.
        ValueError: shapes, devices or placements do not match; history is missing for a recipe with delayed scaling.
    """
    check_recipe(recipe)
    if recipe is None:
        return F.linear(x, weight, bias)
    if is_dtensor(x) or is_dtensor(weight) or is_dtensor(bias):
        from octile.nn.tensor_parallel import local_linear  # which imports torch.distributed.tensor

        local = local_linear(x, weight, bias, recipe)
        return local.result(linear(local.x, local.weight, None, recipe, history))
    _check(x, weight, recipe, history, weight_dims=2)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{len(weight)}], not {list(bias.shape)}")
    out_dtype = result_dtype(x)
    x_TK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    shared = shared_by_layers(x)
    if _is_high_precision(recipe):
        y_TN = HighPrecisionLinear.apply(x_TK, weight, None, recipe.compute, out_dtype, shared)
    else:
        cached_and_dgrad = _cached_and_dgrad(x, weight, recipe)
        y_TN = QuantizedLinear.apply(x_TK, weight, None, recipe, history, out_dtype, shared, *cached_and_dgrad)
    y = y_TN.reshape(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(out_dtype)


def grouped_linear(
    x_TK: Tensor,
    weight_GNK: Tensor,
    offs: Tensor,
    recipe: Recipe | None = None,
    history: AmaxHistory | None = None,
) -> Tensor:
    """Return y with y[rows of g] = x[rows of g] · weight[g]ᵀ, the linear layers of all experts; differentiable.

    Args:
        x_TK: [T, K], rows sorted by expert.
        weight_GNK: [G, N, K], `main_grad` as in `linear`.
        offs: int32 [G] on x's device, the end of each expert's rows; rows after the last give zeros.
        recipe: None multiplies in the dtype that is returned.
        history: as in `linear`.

    Returns:
        [T, N] in autocast's dtype if autocast is on, else in x's.

    Raises:
        TypeError, ValueError: as in `linear`; offs is not int32 [G].
    """
    check_recipe(recipe)
    _check(x_TK, weight_GNK, recipe, history, weight_dims=3)
    if x_TK.dim() != 2:
        raise ValueError(f"x must be [T, K], not {list(x_TK.shape)}")
    check_tensor("offs", offs)
    check_sizes("offs", offs, len(weight_GNK), x_TK.device)
    out_dtype = result_dtype(x_TK)
    if recipe is None or _is_high_precision(recipe):
        compute = out_dtype if recipe is None else recipe.compute
        return HighPrecisionLinear.apply(x_TK, weight_GNK, offs, compute, out_dtype, None)
    cached_and_dgrad = _cached_and_dgrad(x_TK, weight_GNK, recipe)
    return QuantizedLinear.apply(x_TK, weight_GNK, offs, recipe, history, out_dtype, None, *cached_and_dgrad)


def result_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a layer's result for an input x: autocast's if autocast is on, else x's."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)  # the meta device has no autocast
    return torch.get_autocast_dtype(device) if on else x.dtype


def _is_high_precision(recipe: Recipe) -> bool:
    return recipe.formats is None or len(recipe.high_precision) == len(GEMMS)


def _cached_and_dgrad(x: Tensor, weight: Tensor, recipe: Recipe) -> tuple[bool, bool]:
    """Return whether the quantized weight may be cached, and whether dgrad will need it.

    Grad mode is off inside an autograd function, so this is decided before.
    """
    assert recipe.formats is not None
    needs_dgrad = torch.is_grad_enabled() and x.requires_grad
    return can_cache(weight, recipe.formats.w, needs_dgrad), needs_dgrad


def _check(x: Tensor, weight: Tensor, recipe: Recipe | None, history: AmaxHistory | None, weight_dims: int) -> None:
    check_operands(x, weight)
    for name, t in (("x", x), ("weight", weight)):
        check_tensor(name, t)
        if t.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, not {t.dtype}")
    if weight.dim() != weight_dims:
        raise ValueError(f"weight must have {weight_dims} dimensions, not the shape {list(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {list(x.shape)} must end in the K = {weight.shape[-1]} of weight {list(weight.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} but weight on {weight.device}")
    check_main_grad(weight)
    if recipe is not None and recipe.has_delayed_scaling and history is None:
        raise ValueError(f"recipe {recipe.name!r} has delayed scaling and needs a history")
