"""To the experts and back: the rows of tokens sorted by expert, and their results summed by token.

Dispatch and combine are each other's backward pass.  Both write every row once, so nothing is added in an order that
could change, and no count is read back to the host.
Shapes: T tokens, D model, E experts, K chosen experts, R = T·K rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.formats import TILE
from octile.nn.fused.quantize import requantize
from octile.ops.permute import permute, unpermute
from octile.recipe import OperandFormat
from octile.scaled import ScaledTensor


class RoutingPlan(NamedTuple):
    """Where the tokens' rows go, all int32, on the tokens' device.

    Attributes:
        place_TK: the k-th row of token t stands at place_TK[t, k]; sorted by expert, and by token within an expert.
        order_R: the inverse; row r is number order_R[r] of place_TK, flattened: token order_R[r] // K.
        offs_E: where each expert's rows end.
    """

    place_TK: Tensor
    order_R: Tensor
    offs_E: Tensor

    @property
    def token_R(self) -> Tensor:
        """Whose row each is."""
        return self.order_R // self.place_TK.shape[1]


class LocalDispatcher:
    """Dispatch and combine within one device. Expert parallelism provides another with the same methods.

    `dispatch` and `combine` have gradients, for rows in high precision; the others work for functions that have their
    own backward pass.
    """

    def plan(self, experts_TK: Tensor, load_E: Tensor) -> RoutingPlan:
        """From the experts that each token goes to, and how many tokens go to each."""
        order_R = experts_TK.flatten().argsort(stable=True)
        places_R = torch.arange(len(order_R), dtype=torch.int32, device=order_R.device)
        place_R = torch.empty_like(places_R).scatter_(0, order_R, places_R)
        return RoutingPlan(place_R.view(experts_TK.shape), order_R.to(torch.int32), load_E.cumsum(0).to(torch.int32))

    def dispatch_quantized(self, x_TD: ScaledTensor, plan: RoutingPlan) -> ScaledTensor:
        """Every token's row in 1×128 tiles once for each of its experts: [R, D]."""
        data, scale = permute(x_TD.data, x_TD.scale, plan.place_TK)
        return ScaledTensor(data, scale, TILE)

    def dispatch_requantized(
        self, x_TD: ScaledTensor, plan: RoutingPlan, how: OperandFormat, operand: str
    ) -> ScaledTensor:
        """The same rows as wgrad takes this operand, cast along the tokens: [R, D]."""
        return requantize(x_TD, how, operand, plan.token_R)

    def combine_unweighted(self, y_RD: Tensor, plan: RoutingPlan, add: Tensor | None = None) -> Tensor:
        """The sum of each token's rows, added to add [T, D]: [T, D]."""
        return unpermute(y_RD, plan.place_TK, add)

    def dispatch(self, x_TD: Tensor, plan: RoutingPlan) -> Tensor:
        """Every token's row once for each of its experts, sorted by expert: [R, D]."""
        return _Dispatch.apply(x_TD, plan)

    def combine(self, y_RD: Tensor, weights_TK: Tensor, plan: RoutingPlan) -> Tensor:
        """The weighted sum of each token's rows: [T, D]."""
        weights_R = weights_TK.flatten().index_select(0, plan.order_R)
        y_RD = (y_RD * weights_R[:, None]).to(y_RD.dtype)
        return _Combine.apply(y_RD, plan)


class _Dispatch(torch.autograd.Function):
    """Copies each token's row to its K places; backward sums them up."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: RoutingPlan) -> Tensor:
        ctx.save_for_backward(*plan)
        return x_TD.index_select(0, plan.token_R)

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None]:
        return _Combine.apply(dy_RD, RoutingPlan(*ctx.saved_tensors)), None


class _Combine(torch.autograd.Function):
    """Sums the K rows of each token; backward spreads them."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, plan: RoutingPlan) -> Tensor:
        ctx.save_for_backward(*plan)
        return unpermute(y_RD, plan.place_TK)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None]:
        return _Dispatch.apply(dx_TD, RoutingPlan(*ctx.saved_tensors)), None
