"""Autograd function of several linear layers that read one input, which is quantized and saved once.

    forward     x → 1×128                               y_i = x · w_iᵀ
    backward    dy_i → 1×128 and 128×1                  dx = Σ dy_i · w_i
                x recomputed → 128×1                    dw_i = dy_iᵀ · x

Each line is one GEMM where the layers can be joined (`FusedLayers`), with the y_i and dy_i next to each other.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.1.  Shapes: T tokens, K inputs, N outputs.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from octile.kernels.memory_layout import contiguous_copy
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.layers import FusedLayers, Settings, load_saved, save_for_backward, settings
from octile.nn.fused.linear import nt, nt_sum
from octile.nn.fused.quantize import quantize_joined_gradient, requantize


def projections(
    x: BlockInput,
    weights: Sequence[Tensor],
    sizes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    contiguous: bool = False,
) -> list[Tensor]:
    """Compute x · wᵀ for each weight [N, K], and split its columns: [T, size] for each size, in dtype.

    Args:
        sizes: for each weight, sizes whose sum is N.
        contiguous: whether the results are contiguous; otherwise those of one GEMM are views of its result.
    """
    s = settings(x.recipe, dtype, weights, x.x)
    return list(_Projections.apply(x.x, x, [list(weight_sizes) for weight_sizes in sizes], contiguous, s, *weights))


class _Projections(torch.autograd.Function):
    """Its results are the columns of the y_i, so that their gradients are not joined before they are quantized."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        x: BlockInput,
        sizes: list[list[int]],
        contiguous: bool,
        s: Settings,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight whose results nothing reads gets no gradient instead of zeros
        layers = FusedLayers(weights, ctx.needs_input_grad[5:], s, shared=len(weights))
        quantized = layers.quantize(weights)
        outputs: list[Tensor] = []
        ctx.sizes = sizes
        for i, w in enumerate(quantized):
            layers.report_fprop(i, weights, lambda: x_TK, x.q, w)
            gemm_sizes = [size for layer in layers.gemms[i] for size in sizes[layer]]
            parts = nt(x.q, w.w, None, s.dtype, s.recipe.batch_invariant).split(gemm_sizes, dim=-1)
            # no map: the compiler of torch 2.11 does not trace it here, and would break the layer's graph
            outputs += [contiguous_copy(part) for part in parts] if contiguous else parts
        save_for_backward(ctx, layers, quantized, x=x.saved)
        ctx.how_saved, ctx.x_dtype = x.how_saved, x_TK.dtype
        return tuple(outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        some_dy = next(dy for dy in dys if dy is not None)
        layers, weights, saved = load_saved(ctx, some_dy)
        formats, rest = layers.settings.formats, iter(dys)
        dys_of_layers = [list(islice(rest, len(sizes))) for sizes in ctx.sizes]
        is_read = [any(dy is not None for dy in layer_dys) for layer_dys in dys_of_layers]
        filled = [
            [some_dy.new_zeros(len(some_dy), n) if dy is None else dy for dy, n in zip(layer_dys, sizes, strict=True)]
            for layer_dys, sizes in zip(dys_of_layers, ctx.sizes, strict=True)
        ]
        gemm_parts = [[dy for layer in gemm for dy in filled[layer]] for gemm in layers.gemms]
        quantized_dys = [quantize_joined_gradient(parts, formats) for parts in gemm_parts]
        values = [partial(torch.cat, parts, dim=1) for parts in gemm_parts]  # for observers
        dx = None
        if ctx.needs_input_grad[0]:
            for i, (dgrad_dy, _) in enumerate(quantized_dys):
                layers.report_dgrad(i, values[i], dgrad_dy, weights[i])
            pairs = [(dgrad_dy, w.w_t) for (dgrad_dy, _), w in zip(quantized_dys, weights, strict=True)]
            dx = nt_sum(pairs, None, ctx.x_dtype)
        x = requantize(ctx.how_saved.quantized(saved["x"]), formats.wgrad_x)
        dws: list[Tensor | None] = []
        for i, (_, wgrad_dy) in enumerate(quantized_dys):
            dws += layers.wgrad(i, values[i], wgrad_dy, x)
        read_dws = [dw if read else None for dw, read in zip(dws, is_read, strict=True)]
        return dx, None, None, None, None, *read_dws
