"""Dispatch and combine: the rows of tokens sorted by expert, and the experts' results summed by token.

Dispatch and combine are each other's backward.  Both write every row once, so nothing is summed in an order that could
change, and no count is read back to the host.

A row goes to its experts in two steps, and its results come back in two steps. Between ranks only the outer ones differ
from those within one device, where they do nothing:

    send         every row once to each rank that has one of its experts
    copy         the rows of a rank to its experts, sorted by expert
    send_back    the results to the ranks of their tokens
    sum          the results of each token

Shapes: T tokens, D model, E experts, K chosen experts, R = T·K rows. Between ranks E and R are of one rank, and N is
the number of rows that were sent to it; within one device N = T.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from octile.formats import TILE
from octile.nn.double_backward import creates_graph, differentiable_gradients
from octile.nn.fused.quantize import requantize
from octile.nn.interleave import is_interleaved, switch
from octile.ops.groups import AlignedGroups
from octile.ops.permute import permute, routing_plan, unpermute, unpermute_backward
from octile.recipe import OperandFormat
from octile.scaled import ScaledTensor

T = TypeVar("T")


class InFlight(Generic[T]):
    """A result of an exchange that may still be on its way; `wait` must be called before it is used.

    Args:
        result: the result.
        arrive: makes the current stream wait for it; None: it has arrived.

    Attributes:
        result: the result, not to be read before `wait`.
    """

    def __init__(self, result: T, arrive: Callable[[], object] | None = None):
        self.result, self._arrive = result, arrive

    def wait(self, switches: bool = True) -> T:
        """Let the current stream wait for the result, and return it.

        Args:
            switches: whether the other one of two interleaved passes may run before; False where an exchange that was
                begun later has been waited for.
        """
        if self._arrive is not None:
            if switches:
                switch()
            self._arrive()
            self._arrive = None
        return self.result


class RoutingPlan(NamedTuple):
    """Where the tokens' rows go, all int32, on the tokens' device.

    Attributes:
        row_ids_TK: the k-th result of token t has the index row_ids_TK[t, k] among those that `send_back` returns.
        order_R: row r is that of the chosen expert order_R[r] % K of the sent row order_R[r] // K. Rows are sorted by
            expert, then by token. Within one device it is the inverse of row_ids_TK.
        offs_E: the end of each expert's rows.
        handle: what the dispatcher needs to send rows between ranks; None within one device.
    """

    row_ids_TK: Tensor
    order_R: Tensor
    offs_E: Tensor
    handle: Any = None

    @property
    def token_R(self) -> Tensor:
        """The sent row of which each row is a copy; within one device its token."""
        return self.order_R // self.row_ids_TK.shape[1]


class LocalDispatcher:
    """Dispatch and combine within one device; `octile.parallel.experts` has the class that does so between ranks.

    `dispatch` and `combine` are differentiable, for rows in high precision. The other methods are for functions that
    have a backward of their own. Quantized rows are sent once, by `send_quantized`, and may be copied to the experts in
    several forms.

    Attributes:
        waits_for_device: whether the host waits in `plan`, so that a forward pass cannot be captured in a CUDA graph.
        exchanges: whether rows are exchanged with other ranks, so that computation can overlap with it.
    """

    waits_for_device = False
    exchanges = False

    def plan(self, experts_TK: Tensor, load_E: Tensor) -> RoutingPlan:
        """Plan where rows go: experts_TK are the experts of each token, load_E is the number of tokens of each."""
        return RoutingPlan(*routing_plan(experts_TK, load_E))

    def dispatch(self, x_TD: Tensor, plan: RoutingPlan) -> Tensor:
        """Copy every token's row to each of its experts, sorted by expert: [R, D]."""
        return _Dispatch.apply(x_TD, plan, self)

    def combine(
        self,
        y_RD: Tensor,
        weights_TK: Tensor,
        plan: RoutingPlan,
        add: Tensor | None = None,
        sent: InFlight[Tensor] | None = None,
    ) -> Tensor:
        """Sum each token's rows by their weights, and add [T, D] if it is given, in FP32, rounded once: [T, D].

        Args:
            y_RD, weights_TK, plan, add: the rows, their weights, their way and the addend.
            sent: what `begin_send_back` returned for the rows; None: they are sent here.
        """
        if add is not None and (add.dtype, add.shape) != (y_RD.dtype, (len(plan.row_ids_TK), y_RD.shape[1])):
            return self.combine(y_RD, weights_TK, plan, None, sent) + add
        return _WeightedCombine.apply(y_RD, weights_TK.float(), add, plan, self, sent)

    def combine_backward(
        self, dx_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, plan: RoutingPlan
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of y and of the float32 weights of `combine`; dx is that of its result."""
        return unpermute_backward(dx_TD, y_RD, plan.row_ids_TK, weights_TK)

    def send(self, x_TD: Tensor, plan: RoutingPlan) -> Tensor:
        """Send each row once to every rank that has one of its experts: [N, D]. Here it is where it must be."""
        return self.begin_send(x_TD, plan, overlaps=self._overlaps).wait()

    def send_quantized(self, x_TD: ScaledTensor, plan: RoutingPlan) -> ScaledTensor:
        """Send rows as `send` does, in 1×128 tiles: [N, D]; x itself if none has to be sent."""
        return self.begin_send_quantized(x_TD, plan, overlaps=self._overlaps).wait()

    def send_back(self, y_RD: Tensor, plan: RoutingPlan) -> Tensor:
        """Send each row to the rank of its token: [T·K, D], ordered by the plan's row_ids_TK."""
        return self.begin_send_back(y_RD, plan, overlaps=self._overlaps).wait()

    @property
    def _overlaps(self) -> bool:
        """Whether GEMMs run while an exchange is waited for: those of a pass that is interleaved with this one."""
        return self.exchanges and is_interleaved()

    def begin_send(self, x_TD: Tensor, plan: RoutingPlan, overlaps: bool = True) -> InFlight[Tensor]:
        """Begin `send`. Other work may be launched before its result is used.

        Args:
            x_TD, plan: the rows and their way.
            overlaps: whether GEMMs are launched before the result is waited for, and so need SMs meanwhile.
        """
        return InFlight(x_TD)

    def begin_send_quantized(
        self, x_TD: ScaledTensor, plan: RoutingPlan, overlaps: bool = True
    ) -> InFlight[ScaledTensor]:
        """Begin `send_quantized`; see `begin_send`."""
        return InFlight(x_TD)

    def begin_send_back(
        self, y_RD: Tensor, plan: RoutingPlan, overlaps: bool = True, lasts: bool = False
    ) -> InFlight[Tensor]:
        """Begin `send_back`; see `begin_send`. No other exchange may begin before the result is used, unless it lasts.

        Args:
            y_RD: the rows.
            plan, overlaps: as in `begin_send`.
            lasts: whether the result is a tensor of its own.
        """
        return InFlight(y_RD)

    def dispatch_quantized(self, x_ND: ScaledTensor, plan: RoutingPlan) -> ScaledTensor:
        """Copy every row that `send_quantized` returned to each of its experts: [R, D]."""
        data, scale = permute(x_ND.data, x_ND.scale, plan.row_ids_TK, plan.order_R)
        return ScaledTensor(data, scale, TILE)

    def dispatch_requantized(
        self,
        x_ND: ScaledTensor,
        plan: RoutingPlan,
        operand_format: OperandFormat,
        operand: str,
        groups: AlignedGroups,
    ) -> ScaledTensor:
        """Copy the same rows, requantized as wgrad reads them, in the tiles of the experts' groups: [P, D]."""
        return requantize(x_ND, operand_format, operand, plan.token_R, groups)

    def combine_unweighted(self, y_RD: Tensor, plan: RoutingPlan, add: Tensor | None = None) -> Tensor:
        """Sum each token's rows, and add [T, D] if it is given: [T, D]."""
        return unpermute(self.send_back(y_RD, plan), plan.row_ids_TK, add)

    def dispatch_weights(self, sent: InFlight[Tensor], plan: RoutingPlan) -> Tensor:
        """Return the weight of each row, [R], from the weights [T, K] for which `begin_send` was called."""
        return sent.wait(switches=False).flatten().index_select(0, plan.order_R)

    def combine_weights(self, sent: InFlight[Tensor], plan: RoutingPlan) -> Tensor:
        """Return the gradient of each weight, [T, K], from those of the rows' weights.

        Args:
            sent: what `begin_send_back` has returned for these, [R, 1].
            plan: their way.
        """
        return sent.wait(switches=False).flatten()[plan.row_ids_TK]

    def total_load(self, load_E: Tensor, plan: RoutingPlan) -> Tensor:
        """Return the number of tokens that all ranks send to each expert, of all E experts.

        Args:
            load_E: those of this rank, int64.
            plan: what was planned with them.
        """
        return load_E


class _WeightedCombine(torch.autograd.Function):
    """Sum the K rows of each token, times their weights, and an addend."""

    @staticmethod
    def forward(
        ctx: Any,
        y_RD: Tensor,
        weights_TK: Tensor,
        add: Tensor | None,
        plan: RoutingPlan,
        dispatcher: LocalDispatcher,
        sent: InFlight[Tensor] | None,
    ) -> Tensor:
        _save_plan(ctx, plan, dispatcher, y_RD, weights_TK)
        results = dispatcher.send_back(y_RD, plan) if sent is None else sent.wait()
        return unpermute(results, plan.row_ids_TK, add, weights_TK)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_RD, weights_TK, plan, dispatcher = _saved_plan(ctx)
        dadd = dx_TD if ctx.needs_input_grad[2] else None
        if creates_graph():

            def formula(y_RD: Tensor, weights_TK: Tensor) -> Tensor:
                chosen_R1 = (plan.order_R % weights_TK.shape[1])[:, None].long()
                weight_R1 = _Dispatch.apply(weights_TK, plan, dispatcher).gather(1, chosen_R1)
                return _Combine.apply(y_RD.float() * weight_R1, plan, dispatcher).to(y_RD.dtype)

            return *differentiable_gradients(formula, (y_RD, weights_TK), (dx_TD,)), dadd, None, None, None
        return *dispatcher.combine_backward(dx_TD, y_RD, weights_TK, plan), dadd, None, None, None


class _Dispatch(torch.autograd.Function):
    """Copy each token's row to the K rows of its experts; backward sums them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: RoutingPlan, dispatcher: LocalDispatcher) -> Tensor:
        _save_plan(ctx, plan, dispatcher)
        return dispatcher.send(x_TD, plan).index_select(0, plan.token_R)

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None]:
        return _Combine.apply(dy_RD, *_saved_plan(ctx)), None, None


class _Combine(torch.autograd.Function):
    """Sum the K rows of each token; backward copies the gradient to them."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, plan: RoutingPlan, dispatcher: LocalDispatcher) -> Tensor:
        _save_plan(ctx, plan, dispatcher)
        return dispatcher.combine_unweighted(y_RD, plan)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None, None]:
        return _Dispatch.apply(dx_TD, *_saved_plan(ctx)), None, None


def _save_plan(ctx: Any, plan: RoutingPlan, dispatcher: LocalDispatcher, *tensors: Tensor) -> None:
    """Save tensors, a plan and its dispatcher for backward."""
    ctx.save_for_backward(*tensors, plan.row_ids_TK, plan.order_R, plan.offs_E)
    ctx.handle, ctx.dispatcher = plan.handle, dispatcher


def _saved_plan(ctx: Any) -> tuple[Any, ...]:
    """Return what `_save_plan` saved: the tensors, the plan and the dispatcher."""
    *tensors, row_ids_TK, order_R, offs_E = ctx.saved_tensors
    return *tensors, RoutingPlan(row_ids_TK, order_R, offs_E, ctx.handle), ctx.dispatcher
