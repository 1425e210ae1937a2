"""What lies between GEMMs in high precision, with one kernel each way: SwiGLU and RMSNorm.

torch's own functions round each product to BF16 and pass over memory for each. Here, as where FP8 functions compute the
same, everything is in FP32 and each result is rounded once.

The formulas below in torch's functions define the results. They are called where the operators cannot be: in
transforms, on subclasses of Tensor and in other dtypes. Second derivatives are theirs, too.

Shapes: any leading dimensions, I or K channels.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.double_backward import creates_graph, differentiable_gradients
from octile.ops import norm as norm_operators
from octile.ops.operator import PLAIN_TENSORS, is_transformed
from octile.ops.quantize import INPUT_DTYPES
from octile.ops.swiglu import swiglu as swiglu_operator
from octile.ops.swiglu import swiglu_backward


def swiglu(*projections: Tensor) -> Tensor:
    """Return silu(gate) · up, differentiable.

    Args:
        projections: gate and up [..., I], or one tensor [..., 2I], the gate's channels first.

    Returns:
        [..., I] in their dtype, rounded once.
    """
    gate, up = _halves(projections)
    if not can_use_operators(gate, up) or gate.dtype != up.dtype or gate.shape != up.shape:
        return _swiglu(*projections)
    return _SwiGLU.apply(projections[0], projections[1] if len(projections) == 2 else None)


def _swiglu(*projections: Tensor) -> Tensor:
    gate, up = _halves(projections)
    return (F.silu(_at_least_float32(gate)) * _at_least_float32(up)).to(torch.promote_types(gate.dtype, up.dtype))


def _halves(projections: Sequence[Tensor]) -> Sequence[Tensor]:
    return projections if len(projections) == 2 else projections[0].chunk(2, dim=-1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor | None) -> Tensor:  # torch's compiler counts the arguments
        projections = (first,) if second is None else (first, second)
        ctx.save_for_backward(*projections)
        gate, up = _halves(projections)
        return swiglu_operator(_matrix(gate), _matrix(up)).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        projections = ctx.saved_tensors
        if creates_graph():
            gradients = differentiable_gradients(_swiglu, projections, (dh,))
            return gradients if len(projections) == 2 else (*gradients, None)
        gate, up = _halves(projections)
        d = swiglu_backward(_matrix(dh), _matrix(gate), _matrix(up)).view(*gate.shape[:-1], 2 * gate.shape[-1])
        return (d, None) if len(projections) == 1 else d.chunk(2, dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / √(mean(x²) + eps) · weight over the last dimension, and x for a residual addition; differentiable.

    Backward adds the gradient of the residual in FP32, before that of x is rounded.

    Args:
        x: [..., K].
        weight: [K].

    Returns:
        both [..., K] in x's dtype, the first one rounded once.
    """
    if not can_use_operators(x, weight) or x.shape[-1] > norm_operators.MAX_COLUMNS:
        return _rms_norm(x, weight, eps), x
    return _RMSNorm.apply(x, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y_TK, rstd_T = norm_operators.rms_norm(_matrix(x), weight, eps)
        ctx.save_for_backward(x, weight, rstd_T)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y_TK.view(x.shape), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dresidual: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rstd_T = ctx.saved_tensors
        if dy is None:
            return dresidual, None, None
        if creates_graph():

            def formula(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
                return _rms_norm(x, weight, ctx.eps), x

            return *differentiable_gradients(formula, (x, weight), (dy, dresidual)), None
        add = None if dresidual is None else _matrix(dresidual)
        dx_TK, dweight_K = norm_operators.rms_norm_backward(_matrix(dy), _matrix(x), weight, rstd_T, add)
        return dx_TK.view(x.shape), dweight_K.to(weight.dtype), None


def can_use_operators(*tensors: Tensor) -> bool:
    """Whether octile's operators can compute with these tensors; see the head of this file."""
    if is_transformed():
        return False
    return all(type(t) in PLAIN_TENSORS and t.dtype in INPUT_DTYPES for t in tensors)


def _matrix(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
