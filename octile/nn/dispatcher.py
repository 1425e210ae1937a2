"""Dispatch and combine: the rows of tokens sorted by expert, and the experts' results summed by token.

Dispatch and combine are each other's backward.  Both write every row once, so nothing is summed in an order that could
change, and no count is read back to the host.
Shapes: T tokens, D model, E experts, K chosen experts, R = T·K rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.formats import TILE
from octile.nn.double_backward import creates_graph, differentiable_gradients
from octile.nn.fused.quantize import requantize
from octile.ops.groups import AlignedGroups
from octile.ops.permute import permute, unpermute, unpermute_backward
from octile.ops.routing_plan import routing_plan
from octile.recipe import OperandFormat
from octile.scaled import ScaledTensor


class RoutingPlan(NamedTuple):
    """Where the tokens' rows go, all int32, on the tokens' device.

    Attributes:
        place_TK: the k-th row of token t has the index place_TK[t, k]; rows are sorted by expert, then by token.
        order_R: the inverse; row r is entry order_R[r] of the flattened place_TK, so of token order_R[r] // K.
        offs_E: the end of each expert's rows.
    """

    place_TK: Tensor
    order_R: Tensor
    offs_E: Tensor

    @property
    def token_R(self) -> Tensor:
        """The token of each row."""
        return self.order_R // self.place_TK.shape[1]


class LocalDispatcher:
    """Dispatch and combine within one device. Expert parallelism provides another class with the same methods.

    `dispatch` and `combine` are differentiable, for rows in high precision. The other methods are for functions that
    have a backward of their own.
    """

    def plan(self, experts_TK: Tensor, load_E: Tensor) -> RoutingPlan:
        """Plan where rows go: experts_TK are the experts of each token, load_E is the number of tokens of each."""
        return RoutingPlan(*routing_plan(experts_TK, load_E))

    def dispatch(self, x_TD: Tensor, plan: RoutingPlan) -> Tensor:
        """Copy every token's row to each of its experts, sorted by expert: [R, D]."""
        return _Dispatch.apply(x_TD, plan)

    def combine(self, y_RD: Tensor, weights_TK: Tensor, plan: RoutingPlan, add: Tensor | None = None) -> Tensor:
        """Sum each token's rows by their weights, and add [T, D] if it is given, in FP32, rounded once: [T, D]."""
        if add is not None and (add.dtype, add.shape) != (y_RD.dtype, (len(plan.place_TK), y_RD.shape[1])):
            return self.combine(y_RD, weights_TK, plan) + add
        return _WeightedCombine.apply(y_RD, weights_TK.float(), add, plan.place_TK)

    def dispatch_quantized(self, x_TD: ScaledTensor, plan: RoutingPlan) -> ScaledTensor:
        """Copy every token's row, in 1×128 tiles, to each of its experts: [R, D]."""
        data, scale = permute(x_TD.data, x_TD.scale, plan.place_TK)
        return ScaledTensor(data, scale, TILE)

    def dispatch_requantized(
        self,
        x_TD: ScaledTensor,
        plan: RoutingPlan,
        operand_format: OperandFormat,
        operand: str,
        groups: AlignedGroups,
    ) -> ScaledTensor:
        """Dispatch the same rows, requantized as wgrad reads them, in the tiles of the experts' groups: [P, D]."""
        return requantize(x_TD, operand_format, operand, plan.token_R, groups)

    def combine_unweighted(self, y_RD: Tensor, plan: RoutingPlan, add: Tensor | None = None) -> Tensor:
        """Sum each token's rows, and add [T, D] if it is given: [T, D]."""
        return unpermute(y_RD, plan.place_TK, add)


class _WeightedCombine(torch.autograd.Function):
    """Sum the K rows of each token, times their weights, and an addend."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_TK: Tensor, add: Tensor | None, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, place_TK)
        return unpermute(y_RD, place_TK, add, weights_TK)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_RD, weights_TK, place_TK = ctx.saved_tensors
        dadd = dx_TD if ctx.needs_input_grad[2] else None
        if creates_graph():

            def formula(y_RD: Tensor, weights_TK: Tensor) -> Tensor:
                rows_TKD = y_RD.index_select(0, place_TK.flatten()).unflatten(0, place_TK.shape).float()
                return (rows_TKD * weights_TK[..., None]).sum(1).to(y_RD.dtype)

            return *differentiable_gradients(formula, (y_RD, weights_TK), (dx_TD,)), dadd, None
        return *unpermute_backward(dx_TD, y_RD, place_TK, weights_TK), dadd, None


class _Dispatch(torch.autograd.Function):
    """Copy each token's row to its K places; backward sums them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: RoutingPlan) -> Tensor:
        ctx.save_for_backward(*plan)
        return x_TD.index_select(0, plan.token_R)

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None]:
        return _Combine.apply(dy_RD, RoutingPlan(*ctx.saved_tensors)), None


class _Combine(torch.autograd.Function):
    """Sum the K rows of each token; backward copies the gradient to them."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, plan: RoutingPlan) -> Tensor:
        ctx.save_for_backward(*plan)
        return unpermute(y_RD, plan.place_TK)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None]:
        return _Dispatch.apply(dx_TD, RoutingPlan(*ctx.saved_tensors)), None
