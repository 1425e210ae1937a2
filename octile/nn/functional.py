"""The three products of a linear layer in 8 bits, with autograd.

    forward     x → 1×128, kept for the backward pass in 8 bits only       y  = x · wᵀ
    backward    dy → 1×128                                                 dx = dy · w
                dy → 128×1, kept x → 128×1                                 dw = dyᵀ · x, summed in FP32

How each operand is cast is the recipe's to say; one without casts takes the products of `plain`.  A dense layer and
the experts of a mixture differ only in which product they call, so both are one autograd function.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.1, figure 6.  Shapes: T tokens, K inputs, N outputs, G experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.fused import high_precision
from octile.nn.fused.gemms import into_main_grad, nt, wgrad
from octile.nn.fused.quantize import observe_quantization as observe_quantization
from octile.nn.fused.quantize import quantize_gradient, quantize_operand, quantize_weight, requantize
from octile.nn.fused.shared_quantization import Shared, once, shared_by_layers
from octile.nn.observer import ObservedGemm, is_observed, report, report_fprop
from octile.nn.weight_cache import may_be_kept
from octile.ops.grouped import check_sizes
from octile.ops.quantize import INPUT_DTYPES
from octile.recipe import GEMMS, GemmFormats, Recipe
from octile.scaled import ScaledTensor


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    history: AmaxHistory | None = None,
) -> Tensor:
    """y = x · weightᵀ + bias in the recipe's formats, differentiable.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: [N, K]. If it has a buffer `main_grad` [N, K] float32, its gradient is added there and `.grad` stays
            as it is; otherwise the gradient is computed in FP32 and given to autograd.
        bias: [N] or None.
        recipe: None is `torch.nn.functional.linear`, which knows no main_grad.
        history: where a recipe with delayed scaling keeps what it saw.

    Returns:
        [..., N] in autocast's dtype where autocast is on, else in x's.

    Raises:
        TypeError: x, weight or main_grad is of another dtype.
        ValueError: shapes or devices do not fit together; history is missing for a delayed recipe.
    """
    if recipe is None:
        return F.linear(x, weight, bias)
    _check(x, weight, recipe, history, weight_dims=2)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{len(weight)}], not {list(bias.shape)}")
    out_dtype = result_dtype(x)
    x_TK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y_TN = _product(x_TK, weight, None, recipe, history, out_dtype, shared_by_layers(x))
    y = y_TN.reshape(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(out_dtype)


def grouped_linear(
    x_TK: Tensor,
    weight_GNK: Tensor,
    offs: Tensor,
    recipe: Recipe | None = None,
    history: AmaxHistory | None = None,
) -> Tensor:
    """y[rows of g] = x[rows of g] · weight[g]ᵀ: the linear layers of all experts at once, differentiable.

    Args:
        x_TK: [T, K], rows sorted by expert.
        weight_GNK: [G, N, K], `main_grad` as in `linear`.
        offs: int32 [G] on x's device, the end of each expert's rows; rows past the last give zeros.
        recipe: None is a product of operands in the dtype that is returned.
        history: as in `linear`.

    Returns:
        [T, N] in autocast's dtype where autocast is on, else in x's.

    Raises:
        TypeError, ValueError: as in `linear`; offs is not int32 [G].
    """
    _check(x_TK, weight_GNK, recipe, history, weight_dims=3)
    if x_TK.dim() != 2:
        raise ValueError(f"x must be [T, K], not {list(x_TK.shape)}")
    check_sizes("offs", offs, len(weight_GNK), x_TK.device)
    return _product(x_TK, weight_GNK, offs, recipe, history, result_dtype(x_TK))


def _product(
    x_TK: Tensor,
    weight: Tensor,
    offs: Tensor | None,
    recipe: Recipe | None,
    history: AmaxHistory | None,
    out_dtype: torch.dtype,
    shared: Shared | None = None,
) -> Tensor:
    if recipe is None or recipe.formats is None or len(recipe.high_precision) == len(GEMMS):
        compute = out_dtype if recipe is None else recipe.compute
        return high_precision.PlainProduct.apply(x_TK, weight, offs, compute, out_dtype, shared)
    keep_w = may_be_kept(weight, recipe.formats.w)  # asked out here: inside, gradients are always off
    turned = torch.is_grad_enabled() and x_TK.requires_grad
    return _Product.apply(x_TK, weight, offs, recipe, history, out_dtype, shared, keep_w, turned)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight: Tensor,
        offs: Tensor | None,
        recipe: Recipe,
        history: AmaxHistory | None,
        out_dtype: torch.dtype,
        shared: Shared | None,
        keep_w: bool,
        turned: bool,
    ) -> Tensor:
        formats, in_high_precision, compute = recipe.formats, recipe.high_precision, recipe.compute
        assert formats is not None
        x = once(
            None if formats.is_delayed else shared, formats.x, lambda: quantize_operand(x_TK, formats.x, "x", history)
        )
        weights = quantize_weight(weight, formats.w, history, keep_w, turned)
        w, of_dgrad = weights.w, weights.w_t.mT
        x_has_gradient, w_has_gradient, *_ = ctx.needs_input_grad
        ctx.weights = weights if keep_w else None  # they live on in the cache: nothing more to keep
        saved_x = (x.data, x.scale) if w_has_gradient and "wgrad" not in in_high_precision else (None, None)
        saved_w = (of_dgrad.data, of_dgrad.scale) if x_has_gradient and ctx.weights is None else (None, None)
        plain_x = x_TK.to(compute) if w_has_gradient and "wgrad" in in_high_precision else None
        plain_w = weight.to(compute) if x_has_gradient and "dgrad" in in_high_precision else None
        ctx.save_for_backward(*saved_x, *saved_w, plain_x, plain_w, offs)
        ctx.blocks = x.block, of_dgrad.block
        ctx.recipe, ctx.history, ctx.x_dtype, ctx.w_dtype = recipe, history, x_TK.dtype, weight.dtype
        ctx.main_grad = getattr(weight, "main_grad", None)
        a, b = (x, w) if "fprop" not in in_high_precision else (None, None)
        looked_at = is_observed() and (x_has_gradient or w_has_gradient)
        ctx.seen = report_fprop(weight, ObservedGemm("fprop", x_TK, a, b, offs)) if looked_at else []
        if "fprop" in in_high_precision:
            return high_precision.nt(x_TK.to(compute), weight.to(compute).contiguous(), offs).to(out_dtype)
        return nt(x, w, offs, out_dtype)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, w_data, w_scale, plain_x, plain_w, offs = ctx.saved_tensors
        formats, compute = ctx.recipe.formats, ctx.recipe.compute
        x_has_gradient, w_has_gradient, *_ = ctx.needs_input_grad
        dx = dw = None
        in_8_bits = x_has_gradient and plain_w is None, w_has_gradient and plain_x is None
        dgrad_dy, wgrad_dy = _quantize_gradient(dy_TN, formats, ctx.history, *in_8_bits)
        if dgrad_dy is not None:
            w_t = ctx.weights.w_t if ctx.weights else ScaledTensor(w_data, w_scale, ctx.blocks[1]).mT
            report(ctx.seen, ObservedGemm("dgrad", dy_TN, dgrad_dy, w_t, offs))
            dx = nt(dgrad_dy, w_t, offs, ctx.x_dtype)
        elif x_has_gradient:
            report(ctx.seen, ObservedGemm("dgrad", dy_TN, offs=offs))
            dx = high_precision.nt(dy_TN.to(compute), plain_w.mT, offs).to(ctx.x_dtype)
        if wgrad_dy is not None:
            x = ScaledTensor(x_data, x_scale, ctx.blocks[0])
            if formats.wgrad_x != formats.x:
                x = requantize(x, formats.wgrad_x)
            report(ctx.seen, ObservedGemm("wgrad", dy_TN.mT, wgrad_dy.mT, x.mT, offs))
            dw = wgrad(wgrad_dy, x, offs, ctx.w_dtype, ctx.main_grad)
        elif w_has_gradient:
            report(ctx.seen, ObservedGemm("wgrad", dy_TN.mT, offs=offs))
            dw = into_main_grad(high_precision.tn(dy_TN.to(compute), plain_x, offs), ctx.w_dtype, ctx.main_grad)
        return dx, dw, None, None, None, None, None, None, None


def _quantize_gradient(
    dy: Tensor, formats: GemmFormats, history: AmaxHistory | None, dgrad: bool, wgrad: bool
) -> tuple[ScaledTensor | None, ScaledTensor | None]:
    """dy as dgrad and as wgrad take it, as far as they are made in 8 bits."""
    if dgrad and wgrad:
        return quantize_gradient(dy, formats, history)
    rows = quantize_operand(dy, formats.dy, "dy", history) if dgrad else None
    columns = (
        quantize_operand(dy, formats.wgrad_dy, "dy" if formats.wgrad_dy == formats.dy else "wgrad_dy", history)
        if wgrad
        else None
    )
    return rows, columns


def result_dtype(x: Tensor) -> torch.dtype:
    """Of a layer that reads x: autocast's where autocast is on, else x's."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)  # the meta device knows no autocast
    return torch.get_autocast_dtype(device) if on else x.dtype


def _check(x: Tensor, weight: Tensor, recipe: Recipe | None, history: AmaxHistory | None, weight_dims: int) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if t.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, not {t.dtype}")
    if weight.dim() != weight_dims:
        raise ValueError(f"weight must have {weight_dims} dimensions, not the shape {list(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {list(x.shape)} must end in the K = {weight.shape[-1]} of weight {list(weight.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x lies on {x.device} but weight on {weight.device}")
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.dtype != torch.float32:
        raise TypeError(f"weight.main_grad must be float32, not {main_grad.dtype}")
    if main_grad is not None and main_grad.shape != weight.shape:
        raise ValueError(f"weight.main_grad must be {list(weight.shape)} as weight, not {list(main_grad.shape)}")
    if main_grad is not None and main_grad.device != weight.device:
        raise ValueError(f"weight lies on {weight.device} but weight.main_grad on {main_grad.device}")
    if recipe is not None and recipe.has_delayed_scaling and history is None:
        raise ValueError(f"recipe {recipe.name!r} scales by past steps and needs a history")
