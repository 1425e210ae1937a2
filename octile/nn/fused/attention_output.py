"""The projection of attention's output, which is saved once, in E5M6, for attention's backward pass and for wgrad.

    forward     o → 1×128 for the GEMM, and → E5M6, saved        y = o · wᵀ
    backward    dy → 1×128 and 128×1, do = dy · w                dw = dyᵀ · o, the saved o → 128×1

`rotary_attention` and `latent_attention` call these functions within their own autograd functions.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: B batch, S sequence, T = B·S tokens, H heads, V channels of a value, X = H·V, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octile.nn.fused.layers import FusedLayers
from octile.nn.fused.linear import nt
from octile.nn.fused.quantize import WeightForms, quantize_gradient, quantize_operand, requantize
from octile.scaled import ScaledTensor, quantize


def output(
    o_BSHV: Tensor, layers: FusedLayers, i: int, weights: Sequence[Tensor], w: WeightForms
) -> tuple[Tensor, ScaledTensor]:
    """Compute y = o · wᵀ [T, N], and o as it is saved.

    Args:
        i: the number of the layer among layers, with all their weights and w, its quantized weight.
    """
    s = layers.settings
    format_of_o = s.recipe.attention_output
    assert format_of_o is not None
    o_TX = o_BSHV.flatten(2).flatten(0, 1)
    o = quantize_operand(o_TX, s.formats.x, "x")
    layers.report_fprop(i, weights, lambda: o_TX, o, w)
    y_TN = nt(o, w.w, None, s.dtype, s.recipe.batch_invariant)
    return y_TN, quantize(o_TX, format_of_o.block, format_of_o.fmt, format_of_o.scale)


def output_backward(
    dy_TN: Tensor, shape: torch.Size, saved_o: ScaledTensor, layers: FusedLayers, i: int, w: WeightForms
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of o, in the shape [B, S, H, V], and of the weight."""
    formats = layers.settings.formats
    dy, dy_t = quantize_gradient(dy_TN, formats)
    layers.report_dgrad(i, lambda: dy_TN, dy, w)
    do_TX = nt(dy, w.w_t, None, layers.settings.dtype)
    (dw,) = layers.wgrad(i, lambda: dy_TN, dy_t, requantize(saved_o, formats.wgrad_x))
    return do_TX.view(shape), dw
