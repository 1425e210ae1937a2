"""Layers that read one input: one cast of it, kept once, and one gradient back.

    forward     x → 1×128                               y_i = x · w_iᵀ
    backward    dy_i → 1×128 and 128×1                  dx = Σ dy_i · w_i
                x again, → 128×1                        dw_i = dy_iᵀ · x

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.1.  Shapes: T tokens, K inputs, N outputs.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from octile.nn.fused.block_input import BlockInput, Source
from octile.nn.fused.layers import FusedLayers, Settings, save, saved, settings
from octile.nn.fused.linear import nt, nt_sum
from octile.nn.fused.quantize import quantize_gradient, requantize
from octile.recipe import Recipe
from octile.scaled import ScaledTensor


def projections(x: BlockInput, weights: list[Tensor], recipe: Recipe, dtype: torch.dtype) -> list[Tensor]:
    """x · wᵀ of each weight [N, K], in dtype: [T, N] each."""
    s = settings(recipe, dtype, weights, x.x)
    return list(_Projections.apply(x.x, x.q, x.kept, x.source, s, *weights))


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, q: ScaledTensor, kept: tuple[Tensor, ...], source: Source, s: Settings, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        layers = FusedLayers(weights, ctx.needs_input_grad[5:], s)
        cast = layers.cast(weights)
        outputs = []
        for i, (weight, w) in enumerate(zip(weights, cast, strict=True)):
            layers.show_fprop(i, weight, lambda: x_TK, q, w)
            outputs.append(nt(q, w.w, None, s.dtype))
        save(ctx, layers, cast, x=kept)
        ctx.source, ctx.x_dtype = source, x_TK.dtype
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        layers, weights, kept = saved(ctx)
        formats = layers.settings.recipe.formats
        assert formats is not None
        both = [quantize_gradient(dy, formats) for dy in dys]
        dx = None
        if ctx.needs_input_grad[0]:
            for i, (rows, _) in enumerate(both):
                layers.show_dgrad(i, partial(dys.__getitem__, i), rows, weights[i])
            dx = nt_sum([(rows, w.w_t) for (rows, _), w in zip(both, weights, strict=True)], None, ctx.x_dtype)
        x = requantize(ctx.source.again(kept["x"]), formats.wgrad_x)
        dws = [layers.wgrad(i, partial(dys.__getitem__, i), columns, x) for i, (_, columns) in enumerate(both)]
        return dx, None, None, None, None, *dws
