"""What the layers of a block read: an activation, or its norm, cast once for all of them and kept once.

wgrad needs the cast again. How it is had decides what is kept:

    itself     the cast, one byte a value, where nobody else keeps the activation
    values     made again from the activation, where a layer that is not cast, an expert gate, keeps that anyway
    norm       made again from what was normalised, which the norm's own backward pass keeps: nothing more is kept

Source: DeepSeek-V3 (arXiv 2412.19437) §3.2.3 (norms are recomputed) and §3.3.3.  Shapes: T tokens, K channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octile.formats import TILE
from octile.nn.fused.quantize import quantize_operand, seen
from octile.nn.norm import RMSNorm
from octile.nn.observer import is_observed
from octile.ops.norm import rms_norm_backward, rms_norm_quantize
from octile.recipe import OperandFormat
from octile.scaled import ScaledTensor, quantize


@dataclass(frozen=True)
class Source:
    """How a kept input becomes the cast again; see the head of this file."""

    how: Literal["itself", "values", "norm"]
    cast: OperandFormat
    eps: float = 0.0

    def again(self, kept: tuple[Tensor, ...]) -> ScaledTensor:
        """The cast, bit for bit as it was."""
        if self.how == "values":
            return quantize(kept[0], TILE, self.cast.fmt, self.cast.scale)
        data, scale = kept if self.how == "itself" else self._norm(kept, values=False)[:2]
        return ScaledTensor(data, scale, TILE)

    def values_again(self, kept: tuple[Tensor, ...]) -> Tensor:
        """The activation or the norm itself, which a cast that was kept does not give."""
        return kept[0] if self.how == "values" else self._norm(kept, values=True)[3]

    def _norm(self, kept: tuple[Tensor, ...], values: bool) -> tuple[Tensor, ...]:
        x_TK, weight_K = kept
        return rms_norm_quantize(x_TK, weight_K, self.eps, self.cast.fmt.name, self.cast.scale == "power_of_2", values)


class BlockInput(NamedTuple):
    """An input of several layers.

    Attributes:
        x: [T, K], the activation or its norm; the layers' gradients go here. A norm has numbers only where they were
            asked for, or somebody looks on.
        q: its cast.
        kept: what the layers keep of it, all of them the same tensors; `source` says what they are.
        residual: what was read, before a norm. Whoever adds it to the layers' result takes it from here: the norm's
            backward pass then adds the two gradients as it writes its own.
    """

    x: Tensor
    q: ScaledTensor
    kept: tuple[Tensor, ...]
    source: Source
    residual: Tensor


def read(x: Tensor, how: OperandFormat, norm: RMSNorm | None = None, values: bool = False) -> BlockInput:
    """x [T, K], or its norm, as an input of layers that take it as `how` casts it, in 1×128 tiles.

    Args:
        values: a layer reads x as it is, not cast, and keeps it.
    """
    if norm is not None:
        y, data, scale, residual = _NormAndCast.apply(x, norm.weight, norm.eps, how, values or is_observed())
        q = seen("x", ScaledTensor(data, scale, TILE))
        return BlockInput(y, q, (x.detach(), norm.weight.detach()), Source("norm", how, norm.eps), residual)
    q = quantize_operand(x, how, "x")
    if values:
        return BlockInput(x, q, (x.detach(),), Source("values", how), x)
    return BlockInput(x, q, (q.data, q.scale), Source("itself", how), x)


class _NormAndCast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight_K: Tensor, eps: float, how: OperandFormat, values: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        data, scale, rstd, y = rms_norm_quantize(x_TK, weight_K, eps, how.fmt.name, how.scale == "power_of_2", values)
        if not values:
            y = x_TK.new_empty(()).expand(x_TK.shape)  # a place for the gradient
        ctx.save_for_backward(x_TK, weight_K, rstd)
        ctx.mark_non_differentiable(data, scale)
        ctx.set_materialize_grads(False)
        return y, data, scale, x_TK.view_as(x_TK)

    @staticmethod
    def backward(ctx: Any, dy_TK: Tensor | None, _: None, __: None, dx_TK: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy_TK is None:
            return dx_TK, None, None, None, None
        x_TK, weight_K, rstd_T = ctx.saved_tensors
        dx_TK, dweight_K = rms_norm_backward(dy_TK, x_TK, weight_K, rstd_T, dx_TK)
        return dx_TK, dweight_K.to(weight_K.dtype), None, None, None
