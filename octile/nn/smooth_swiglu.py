"""Smooth-SwiGLU: the scale of each channel moves from an activation into the weight, before both are quantized.

The product of SwiGLU's two projections has rare, very large values in a few channels, which cost every other value of
an FP8 tensor its precision.  Each channel is divided by its largest value, and the column of the down-projection's
weight is multiplied by the same number: the result is the same, and neither operand has outliers.  The weight's amax
then changes with every micro-batch, so its scale is never delayed (`octile.recipe.Recipe.smoothed`).

Source: arXiv 2409.12517.
"""

from typing import Any

import torch
from torch import Tensor

from octile.nn.deferred_wgrad import current_main_grads, parameters_of
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.high_precision import into_main_grad
from octile.nn.main_grad import main_grads_of
from octile.ops.quantize import round_up_to_power_of_2

MAX_POWER_OF_2 = 2.0**127  # in FP32


def power_of_2_at_least(amax: Tensor) -> Tensor:
    """Return the power of two at or above each value (2¹²⁷ at most), float32; 1 for 0. NaN and Inf stay."""
    amax = amax.float()
    finite = round_up_to_power_of_2(amax.clamp(max=MAX_POWER_OF_2))
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), finite, amax))


def scale_columns(weight: Tensor, scale: Tensor) -> Tensor:
    """Return weight · scale in float32, differentiable in the weight; its gradient is added to `main_grad` if any."""
    return _ScaleColumns.apply(weight, scale)


class _ScaleColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype, ctx.main_grads, ctx.parameters = weight.dtype, main_grads_of((weight,)), parameters_of((weight,))
        return weight.float() * scale

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (scale,) = ctx.saved_tensors
        dw = dy * scale
        (main_grad,) = current_main_grads(ctx.parameters, ctx.main_grads)
        return into_main_grad(dw, ctx.dtype, main_grad), None
