"""The losses of an output head whose logits are in FP32, in one function: their gradient is rounded to the dtype of the
operands where it is computed.

As functions of their own, head and cross-entropy would hand on a gradient in FP32, which is then converted: of a BF16
operand that moves 14 bytes a logit in backward instead of 6.

Shapes: T rows, K inputs, V classes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.high_precision import linear_backward, linear_forward
from octile.ops.cross_entropy import cross_entropy, cross_entropy_backward


class HeadLosses(Function):
    """The loss of each row [T] of logits x · weightᵀ, both cast to `compute`; labels as in `cross_entropies`."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: Tensor, labels_T: Tensor, compute: torch.dtype) -> Tensor:
        """Compute the losses; rows of logits do not depend on each other."""
        logits_TV, saved = linear_forward(ctx, x_TK, weight, None, compute, torch.float32, None, True)
        losses_T, lse_T = cross_entropy(logits_TV, labels_T)
        ctx.save_for_backward(*saved, logits_TV, labels_T, lse_T)
        return losses_T

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dlosses_T: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and of the weight."""
        *saved, logits_TV, labels_T, lse_T = ctx.saved_tensors
        dlogits_TV = cross_entropy_backward(dlosses_T, logits_TV, labels_T, lse_T, ctx.compute)
        return *linear_backward(ctx, saved, dlogits_TV), None, None
