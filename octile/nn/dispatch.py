"""To the experts and back: the rows of tokens sorted by expert, and their results summed by token.

Dispatch and combine are each other's backward pass.  Both gather, forward and backward, so nothing is added in an
order that could change, and no count is read back to the host.
Shapes: T tokens, D model, E experts, K chosen experts, R = T·K rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Tokens as the experts take them.

    `x_RD` is sorted by expert; `offs_E` int32 is where each expert's rows end.  Row r is token `order_R[r] // K`, and
    the k-th row of token t stands at `inverse_R[t·K + k]`.
    """

    x_RD: Tensor
    offs_E: Tensor
    order_R: Tensor
    inverse_R: Tensor


class LocalDispatcher:
    """Dispatch and combine within one device. Expert parallelism provides another with the same two methods."""

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, load_E: Tensor) -> Rows:
        """Every token's row once for each of its experts, sorted by expert."""
        order_R = experts_TK.flatten().argsort(stable=True)
        inverse_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        offs_E = load_E.cumsum(0).to(torch.int32)
        x_RD = _Spread.apply(x_TD, order_R, inverse_R, experts_TK.shape[1])
        return Rows(x_RD, offs_E, order_R, inverse_R)

    def combine(self, y_RD: Tensor, weights_TK: Tensor, rows: Rows) -> Tensor:
        """The weighted sum of each token's rows: [T, D]."""
        weights_R = weights_TK.flatten().index_select(0, rows.order_R)
        y_RD = (y_RD * weights_R[:, None]).to(y_RD.dtype)
        return _Collect.apply(y_RD, rows.order_R, rows.inverse_R, weights_TK.shape[1])


class _Spread(torch.autograd.Function):
    """Copies each token's row to its K places; backward sums them up."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, inverse_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order_R, inverse_R)
        ctx.k = k
        return x_TD.index_select(0, order_R // k)

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None, None]:
        return _Collect.apply(dy_RD, *ctx.saved_tensors, ctx.k), None, None, None


class _Collect(torch.autograd.Function):
    """Sums the K rows of each token; backward spreads them."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, order_R: Tensor, inverse_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order_R, inverse_R)
        ctx.k = k
        return y_RD.index_select(0, inverse_R).unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None, None, None]:
        return _Spread.apply(dx_TD, *ctx.saved_tensors, ctx.k), None, None, None
