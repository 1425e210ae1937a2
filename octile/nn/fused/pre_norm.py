"""The norm before a layer, fused with the quantization of the layer's input and with the residual addition.

Each half of a transformer block computes x + layer(norm(x)). With

    x, normed = pre_norm(x, norm, layer)
    x = x + layer(normed)

the norm and both uses of x are one autograd function where the layer is fused:

    forward     norm(x) → 1×128 in one kernel; only x and one value a token are saved for backward
    backward    dx = the norm's gradient + the residual's gradient, added in FP32 as the norm's kernel writes dx; the
                gradients of a mixture's gate, experts and shared experts are added as the kernel reads them

Where the layer is not fused, the norm and both uses of x are one function as well, with norm(x) in high precision.
A norm that has hooks or was replaced is called: the results are x itself and norm(x).

Source: DeepSeek-V3 (arXiv 2412.19437) §3.2.3 and §3.3.3.  Shapes: T tokens, K channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octile.formats import TILE
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.block_input import BlockInput, Saved
from octile.nn.fused.elementwise import rms_norm
from octile.nn.fused.fusion import FusableModule, check_not_batch_invariant, has_hooks, is_fusable_norm
from octile.nn.norm import RMSNorm
from octile.nn.observer import has_gemm_observers, report_quantization
from octile.ops.norm import rms_norm_backward, rms_norm_quantize
from octile.recipe import OperandFormat, Recipe
from octile.scaled import ScaledTensor


def pre_norm(x: Tensor, norm: nn.Module, layer: nn.Module) -> tuple[Tensor, Tensor | BlockInput]:
    """Return x for the residual addition, and norm(x) as the layer reads it.

    Args:
        x: [..., K].
        norm: fused if it is an `octile.nn.RMSNorm` without hooks.
        layer: the module that is called with the second result, and with nothing else in between. The norm is fused
            into an `MLA`, `MHA`, `MLP` or `MoE` whose layers are fused, unless it has hooks itself, which see tensors.
    """
    if not is_fusable_norm(norm):
        check_not_batch_invariant(layer.modules())
        return x, norm(x)
    assert isinstance(norm, RMSNorm)
    fusion = layer.fusion() if isinstance(layer, FusableModule) and not has_hooks(layer) else None
    if fusion is None:
        if not (isinstance(layer, FusableModule) and layer.is_batch_invariant_unfused()):
            check_not_batch_invariant(layer.modules())
        y, residual = rms_norm(x, norm.weight, norm.eps)
        return residual, y
    assert isinstance(layer, FusableModule)
    residual, normed = norm_block_input(x, norm, fusion.recipe, layer.reads_high_precision)
    return residual.view_as(x), normed


def norm_block_input(x: Tensor, norm: RMSNorm, recipe: Recipe, values: bool = False) -> tuple[Tensor, BlockInput]:
    """Return x [..., K] as [T, K] for a residual addition, and norm(x), quantized once for all layers that read it.

    Args:
        recipe: recipe of these layers; one with `formats`.
        values: whether other layers read and save norm(x) in high precision.
    """
    assert recipe.formats is not None
    x_format, x_TK, n_views = recipe.formats.x, x.reshape(-1, x.shape[-1]), 2 if values else 0
    values = values or has_gemm_observers()
    y, data, scale, residual, *views = _NormAndQuantize.apply(x_TK, norm.weight, norm.eps, x_format, values, n_views)
    q = report_quantization("x", ScaledTensor(data, scale, TILE))
    saved: tuple[Tensor, ...] = (x_TK.detach(), norm.weight.detach())
    how_saved = Saved("norm", x_format, norm.eps)
    if recipe.norms == "kept":
        saved, how_saved = (data, scale), Saved("quantized", x_format)
        if values:
            saved, how_saved = (y.detach(), *saved), Saved("both", x_format)
    return residual, BlockInput(y, q, saved, how_saved, recipe, x.shape, tuple(views))


class _NormAndQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight_K: Tensor, eps: float, x_format: OperandFormat, values: bool, n_views: int
    ) -> tuple[Tensor, ...]:
        power_of_2 = x_format.scale == "power_of_2"
        data, scale, rstd, y = rms_norm_quantize(x_TK, weight_K, eps, x_format.fmt.name, power_of_2, values)
        if not values:
            y = x_TK.new_empty(()).expand(x_TK.shape)  # no values, but autograd sends the layers' gradients here
        ctx.save_for_backward(x_TK, weight_K, rstd)
        ctx.mark_non_differentiable(data, scale)
        ctx.set_materialize_grads(False)
        return y, data, scale, x_TK.view_as(x_TK), *(y.view_as(y) for _ in range(n_views))

    @staticmethod
    @first_derivative_only
    def backward(
        ctx: Any,
        dy_TK: Tensor | None,
        _: None,
        __: None,
        dresidual_TK: Tensor | None,
        *other_dys: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        dys_TK = [dy for dy in (dy_TK, *other_dys) if dy is not None]
        if not dys_TK:
            return dresidual_TK, None, None, None, None, None
        x_TK, weight_K, rstd_T = ctx.saved_tensors
        first, *others = dys_TK
        dx_TK, dweight_K = rms_norm_backward(first, x_TK, weight_K, rstd_T, dresidual_TK, *others)
        return dx_TK, dweight_K.to(weight_K.dtype), None, None, None, None
