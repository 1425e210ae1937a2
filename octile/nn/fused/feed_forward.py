"""A feed-forward layer as one function, dense or of experts: down(silu(gate(x)) · up(x)).

                every layer                            experts
    forward     x → 1×128, once                        dispatched as FP8 data with its scales
                gate, up = x · wᵀ in BF16
                h = silu(gate) · up → 1×128            and gate, up → 1×128, saved unless they are recomputed
                y = h · wᵀ in BF16                     combined: a token's rows are summed
    backward    dy → 1×128 and 128×1                   dispatched in 1×128, and requantized to 128×1 there
                dh = dy · w in BF16
                d(gate), d(up) → 1×128 and 128×1       and h → 128×1, all from dh and gate and up
                dx = d(gate) · w + d(up) · w in BF16   combined: a token's rows are summed
                x recomputed → 128×1
                dw = d(gate)ᵀ · x, d(up)ᵀ · x and dyᵀ · h, summed in FP32

Products with the weights of gate and up are one GEMM where these are one weight or can be joined (`FusedLayers`).
Rows that another library has dispatched, sorted by expert, are computed where they are (`sorted_experts_feed_forward`).
wgrad's operands of experts have tiles of 128 rows of one expert each (`octile.ops.groups`).

The weight of an expert's result multiplies h (`octile.ops.swiglu`). What is dispatched to experts and requantized there
has the scale rule of x, powers of two, in both directions; what is combined is BF16. An expert without tokens has no
rows, and its weights get a gradient of zeros.

Between ranks the sum of the results is a function of its own (`_Sum`), so that the shared experts run between the two,
in both directions: while the results are sent back, and while the gradients of the sums are dispatched. The gradients
of the rows are sent back while wgrad runs.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: T tokens, D model, I intermediate, E experts, K chosen experts, R = T·K rows; R = T where there are no experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import BLOCK, TILE
from octile.nn.dispatcher import InFlight, LocalDispatcher, RoutingPlan
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.layers import FusedLayers, Settings, load_saved, save_for_backward, settings
from octile.nn.fused.linear import nt, nt_sum
from octile.nn.fused.quantize import (
    WeightForms,
    align_experts,
    quantize_gradient,
    quantize_operand,
    requantize,
    transposed,
)
from octile.nn.observer import has_observers, report_quantization
from octile.ops.groups import AlignedGroups
from octile.ops.permute import unpermute
from octile.ops.swiglu import swiglu_backward_quantize, swiglu_quantize, swiglu_quantize_and_save
from octile.recipe import GemmFormats, OperandFormat
from octile.scaled import ScaledTensor


def can_fuse_size(intermediate_size: int) -> bool:
    """Whether a layer of this size can be one function: d(gate) and d(up) are adjacent, so each has whole tiles."""
    return intermediate_size % TILE[1] == 0


def feed_forward(x: BlockInput, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Compute a dense layer: [T, D] in dtype.

    Args:
        weights: gate and up [I, D], or gate_up [2I, D], the gate's rows first; and down [D, I].
    """
    s = settings(x.recipe, dtype, weights, x.x)
    return _FeedForward.apply(x.x, None, None, x, None, None, s, *weights)


def sorted_experts_feed_forward(x: BlockInput, weights: Sequence[Tensor], offs_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute rows that are sorted by expert, each by the weights of its expert: [R, D] in dtype.

    Args:
        x: rows [R, D].
        weights: gate and up [E, I, D], or gate_up [E, 2I, D], the gates' rows first; and down [E, D, I].
        offs_E: int32 [E], the end of each expert's rows. Rows after the last give zeros, and get a gradient of zeros.
    """
    s = settings(x.recipe, dtype, weights, x.x)
    return _FeedForward.apply(x.x, None, None, x, None, offs_E, s, *weights)


class _Exchange:
    """What is on its way between the experts of a forward pass and `_Sum`.

    Attributes:
        results: results of the experts, in the forward pass.
        dy: the gradient of the sums, in the backward pass; sent_dy is what this rank's experts get of all ranks.
    """

    results: InFlight[Tensor]
    dy: Tensor
    sent_dy: InFlight[ScaledTensor]


class Routed(NamedTuple):
    """How tokens get to their experts and back; `exchange` is None where the same function sums their results."""

    dispatcher: LocalDispatcher
    plan: RoutingPlan
    exchange: _Exchange | None = None


def experts_feed_forward(
    x: BlockInput,
    gate_up: Tensor,
    down: Tensor,
    weights_TK: Tensor,
    shared: Callable[[], Tensor] | None,
    routed: Routed,
    dtype: torch.dtype,
) -> Tensor:
    """Compute a mixture with weights gate_up [E, 2I, D], the gates' rows first, and down [E, D, I]: [T, D] in dtype.

    Args:
        weights_TK: float32, by which the results of each token's experts are summed.
        shared: computes [T, D] in dtype, which is added to each token's sum; None: zeros.
    """
    s = settings(x.recipe, dtype, (gate_up, down), x.x)
    if shared is None or not routed.dispatcher.exchanges:
        add = None if shared is None else shared()
        return _FeedForward.apply(x.x, weights_TK, add, x, routed, None, s, gate_up, down)
    routed = routed._replace(exchange=_Exchange())
    sent = _FeedForward.apply(x.x, weights_TK, None, x, routed, None, s, gate_up, down)
    return _Sum.apply(sent, shared(), routed, s.formats)


class _FeedForward(torch.autograd.Function):
    """A dense layer or experts, to which rows are dispatched or were before.

    Weights are gate, up and down, or gate_up and down; of experts to which rows are dispatched gate_up and down.
    With an exchange the result is a scalar without a meaning, by which autograd knows that `_Sum` comes after it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        add: Tensor | None,
        x: BlockInput,
        routed: Routed | None,
        offs_E: Tensor | None,
        s: Settings,
        *weights: Tensor,
    ) -> Tensor:
        route = _Route(routed, offs_E)
        layers = FusedLayers(weights, ctx.needs_input_grad[7:], s, shared=len(weights) - 1)
        *up_projections, down = quantized = layers.quantize(weights)
        sent, weight_R = route.send(x.q, weights_TK)
        rows = route.dispatch(sent)
        gate, up = _gate_and_up(rows, up_projections, route.offs, s)
        h, saved_gate_up = _swiglu(gate, up, weight_R, s)
        y = nt(h, down.w, route.offs, s.dtype, s.recipe.batch_invariant)

        for i, w in enumerate(up_projections):
            layers.report_fprop(i, weights, lambda: route.dispatch_values(x_TD), rows, w, route.offs)
        layers.report_fprop(-1, weights, lambda: _h_values(gate, up, weight_R), h, down, route.offs)
        is_here = sent is x.q  # what came from other ranks is saved; other layers save their input only where it was
        saved = {"x": x.saved if is_here else sent, "gate_up": saved_gate_up, "weight_R": weight_R}
        save_for_backward(ctx, layers, quantized, **saved, plan=routed and routed.plan[:3], offs_E=offs_E)
        ctx.how_saved, ctx.x_dtype = x.how_saved if is_here else None, x_TD.dtype
        ctx.dispatcher, ctx.handle = routed and routed.dispatcher, routed and routed.plan.handle
        ctx.exchange = routed and routed.exchange
        if ctx.exchange is None:
            return route.combine(y, add)
        ctx.exchange.results = route.begin_send_back(y)
        return y.new_zeros((), dtype=torch.float32)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        dy_TD = dy_TD if ctx.exchange is None else ctx.exchange.dy
        layers, weights, saved = load_saved(ctx, dy_TD)
        s, formats, weight_R = layers.settings, layers.settings.formats, saved["weight_R"]
        plan = saved["plan"] and RoutingPlan(*saved["plan"])._replace(handle=ctx.handle)
        route = _Route(plan and Routed(ctx.dispatcher, plan, ctx.exchange), saved["offs_E"])
        *up_projections, down = weights

        groups = route.align(len(dy_TD), formats)
        dy, dy_t = route.dispatch_gradient(dy_TD, formats, groups)
        dh = nt(dy, down.w_t, route.offs, s.dtype)
        x = saved["x"] if ctx.how_saved is None else ctx.how_saved.quantized(saved["x"])
        gate_up = saved["gate_up"]
        if gate_up is None:  # recomputed
            gate_up = _GateUp(*_gate_and_up(route.dispatch(x), up_projections, route.offs, s))
        d, d_t, h_t, dweight_R = _swiglu_backward(dh, gate_up, weight_R, formats, groups)
        ds, ds_t = (_split(t, len(up_projections)) for t in (d, d_t))

        def dy_values() -> Tensor:
            return route.dispatch_values(dy_TD)

        def d_values(i: int) -> Tensor:
            return _gradient_values(dh, gate_up, weight_R, len(up_projections))[i]

        def dx_rows() -> Tensor:
            pairs = [(part, w.w_t) for part, w in zip(ds, up_projections, strict=True)]
            return nt_sum(pairs, route.offs, ctx.x_dtype)

        dx, sending, sending_dweight = None, None, None
        if route.can_overlap():
            sending_dweight = route.begin_send_back(dweight_R[:, None], lasts=True)
            sending = route.begin_send_back(dx_rows()) if ctx.needs_input_grad[0] else None
        layers.report_dgrad(-1, dy_values, dy, down, route.offs)
        dws = layers.wgrad(-1, dy_values, dy_t, h_t, groups)
        x_t = route.dispatch_requantized(x, formats.wgrad_x, groups)
        for i in reversed(range(len(up_projections))):
            before = partial(d_values, i)
            layers.report_dgrad(i, before, ds[i], up_projections[i], route.offs)
            dws = layers.wgrad(i, before, ds_t[i], x_t, groups) + dws
        if sending is not None:
            dx = route.sum(sending)
        elif ctx.needs_input_grad[0]:
            dx = route.combine(dx_rows())
        dweights_TK = None
        if plan is not None:
            sending_dweight = sending_dweight or route.begin_send_back(dweight_R[:, None])
            dweights_TK = ctx.dispatcher.combine_weights(sending_dweight, plan)
        return dx, dweights_TK, dy_TD if ctx.needs_input_grad[2] else None, None, None, None, None, *dws


class _Sum(torch.autograd.Function):
    """Sum the results that `_FeedForward` has sent back, and an addend; backward sends it the gradient."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, add: Tensor | None, routed: Routed, formats: GemmFormats) -> Tensor:
        exchange = ctx.exchange = routed.exchange
        assert exchange is not None
        ctx.save_for_backward(*routed.plan[:3])
        ctx.dispatcher, ctx.handle, ctx.formats = routed.dispatcher, routed.plan.handle, formats
        results = exchange.results
        del exchange.results
        return _Route(routed).sum(results, add)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        dsent = None
        if ctx.needs_input_grad[0]:
            plan = RoutingPlan(*ctx.saved_tensors)._replace(handle=ctx.handle)
            q = quantize_operand(dy_TD, ctx.formats.routed_dy[0], "dy")
            ctx.exchange.dy, ctx.exchange.sent_dy = dy_TD, ctx.dispatcher.begin_send_quantized(q, plan)
            dsent = dy_TD.new_zeros((), dtype=torch.float32)
        return dsent, dy_TD if ctx.needs_input_grad[1] else None, None, None


class _Route:
    """Dispatch to experts and combine, in FP8 and in high precision.

    Rows stay where they are if routed is None: those of a dense layer, or, with offs_E, rows that are sorted by expert.
    """

    def __init__(self, routed: Routed | None, offs_E: Tensor | None = None):
        self.routed = routed
        self.offs = offs_E if routed is None else routed.plan.offs_E
        self.exchange = None if routed is None else routed.exchange

    def can_overlap(self) -> bool:
        """Whether other work may run while results are sent back. Observers have rows exchanged meanwhile."""
        return self.routed is not None and self.routed.dispatcher.exchanges and not has_observers()

    def send(self, x: ScaledTensor, weights_TK: Tensor | None) -> tuple[ScaledTensor, Tensor | None]:
        """Send rows, and return them with the weight of each of the experts' rows."""
        if self.routed is None or weights_TK is None:
            return x, None
        dispatcher, plan, _ = self.routed
        sending = dispatcher.begin_send(weights_TK, plan)
        return dispatcher.send_quantized(x, plan), dispatcher.dispatch_weights(sending, plan)

    def begin_send_back(self, y: Tensor, lasts: bool = False) -> InFlight[Tensor]:
        assert self.routed is not None
        return self.routed.dispatcher.begin_send_back(y, self.routed.plan, lasts=lasts)

    def sum(self, sent: InFlight[Tensor], add: Tensor | None = None) -> Tensor:
        """Sum each token's results that were sent back, and add [T, D] if it is given."""
        assert self.routed is not None
        return unpermute(sent.wait(), self.routed.plan.row_ids_TK, add)

    def dispatch(self, x: ScaledTensor) -> ScaledTensor:
        return x if self.routed is None else self.routed.dispatcher.dispatch_quantized(x, self.routed.plan)

    def align(self, tokens: int, formats: GemmFormats) -> AlignedGroups | None:
        """Align the experts' rows to the tiles of wgrad's operands; a dense layer's are not aligned."""
        rows = tokens if self.routed is None else len(self.routed.plan.order_R)
        return align_experts(self.offs, rows, formats)

    def dispatch_requantized(
        self,
        x: ScaledTensor,
        operand_format: OperandFormat,
        groups: AlignedGroups | None,
        operand: str = "wgrad_x",
    ) -> ScaledTensor:
        if self.routed is None or groups is None:
            return requantize(x, operand_format, operand, groups=groups)
        return self.routed.dispatcher.dispatch_requantized(x, self.routed.plan, operand_format, operand, groups)

    def dispatch_values(self, x: Tensor) -> Tensor:
        """Dispatch rows in high precision, for observers."""
        return x if self.routed is None else self.routed.dispatcher.dispatch(x, self.routed.plan)

    def dispatch_gradient(
        self, dy: Tensor, formats: GemmFormats, groups: AlignedGroups | None
    ) -> tuple[ScaledTensor, ScaledTensor]:
        """Quantize dy for dgrad and for wgrad. It is dispatched in tiles that can be requantized."""
        if self.routed is None:
            return quantize_gradient(dy, formats, groups=groups)
        dgrad_format, wgrad_format = formats.routed_dy
        if self.exchange is None:
            q = self.routed.dispatcher.send_quantized(quantize_operand(dy, dgrad_format, "dy"), self.routed.plan)
        else:
            q = self.exchange.sent_dy.wait()
            del self.exchange.dy, self.exchange.sent_dy
        return self.dispatch(q), self.dispatch_requantized(q, wgrad_format, groups, "wgrad_dy")

    def combine(self, y: Tensor, add: Tensor | None = None) -> Tensor:
        return y if self.routed is None else self.routed.dispatcher.combine_unweighted(y, self.routed.plan, add)


class _GateUp(NamedTuple):
    """gate and up [R, I]: in high precision, or saved in 1×128 tiles with their scales."""

    gate: Tensor
    up: Tensor
    gate_scale: Tensor | None = None
    up_scale: Tensor | None = None

    def values(self) -> tuple[Tensor, Tensor]:
        """Return both in float32."""
        if self.gate_scale is None or self.up_scale is None:
            return self.gate.float(), self.up.float()
        gate, up = ScaledTensor(self.gate, self.gate_scale, TILE), ScaledTensor(self.up, self.up_scale, TILE)
        return gate.dequantize(), up.dequantize()


def _gate_and_up(
    x: ScaledTensor, weights: Sequence[WeightForms], offs: Tensor | None, s: Settings
) -> tuple[Tensor, Tensor]:
    results = [nt(x, w.w, offs, s.dtype, s.recipe.batch_invariant) for w in weights]
    gate, up = results if len(results) == 2 else results[0].chunk(2, dim=-1)
    return gate, up


def _swiglu(gate: Tensor, up: Tensor, weight_R: Tensor | None, s: Settings) -> tuple[ScaledTensor, _GateUp | None]:
    """Compute h quantized for the down-projection, and gate and up as they are saved."""
    h_format, saved_format = _kernel_format(s.formats.x), s.recipe.swiglu_inputs
    if not isinstance(saved_format, OperandFormat):
        data, scale = swiglu_quantize(gate, up, *h_format, weight_R)
        return report_quantization("x", ScaledTensor(data, scale, TILE)), None
    data, scale, saved, saved_scale = swiglu_quantize_and_save(
        gate, up, *h_format, *_kernel_format(saved_format), weight_R
    )
    return report_quantization("x", ScaledTensor(data, scale, TILE)), _GateUp(*saved, *saved_scale)


def _swiglu_backward(
    dh: Tensor, gate_up: _GateUp, weight_R: Tensor | None, formats: GemmFormats, groups: AlignedGroups | None
) -> tuple[ScaledTensor, ScaledTensor, ScaledTensor, Tensor]:
    """Compute the gradients of gate and up.

    Returns:
        d(gate) and d(up), adjacent, [R, 2I], quantized for dgrad; the same for wgrad; h quantized for wgrad; d(weight).
    """
    in_blocks = formats.wgrad_x.block == BLOCK
    settings = (*_kernel_format(formats.dy), *_kernel_format(formats.wgrad_x), groups and groups.tiles, in_blocks)
    data, scale, data_t, scale_t, h_t, h_scale_t, dweight_R = swiglu_backward_quantize(
        dh, *gate_up, weight_R, *settings
    )
    rows = report_quantization("dy", ScaledTensor(data, scale, TILE))
    columns = report_quantization("wgrad_dy", transposed(data_t, scale_t))
    return rows, columns, report_quantization("wgrad_x", transposed(h_t, h_scale_t, in_blocks)), dweight_R


def _kernel_format(operand_format: OperandFormat) -> tuple[str, bool]:
    """Return the arguments fmt and power_of_2 of an operator."""
    return operand_format.fmt.name, operand_format.scale == "power_of_2"


def _split(d: ScaledTensor, count: int) -> list[ScaledTensor]:
    """Split d [R, 2I] into the gradients that belong to each of `count` weights."""
    pairs = zip(d.data.chunk(count, dim=1), d.scale.chunk(count, dim=1), strict=True)
    return [ScaledTensor(data, scale, d.block) for data, scale in pairs]


# For observers: in high precision, what the kernels above quantize as they compute it


def _h_values(gate: Tensor, up: Tensor, weight_R: Tensor | None) -> Tensor:
    h = F.silu(gate.float()) * up.float()
    return h if weight_R is None else h * weight_R[:, None]


def _gradient_values(dh: Tensor, gate_up: _GateUp, weight_R: Tensor | None, count: int) -> list[Tensor]:
    gate, up = gate_up.values()
    dh = dh.float() if weight_R is None else dh.float() * weight_R[:, None]
    both = [torch.ops.aten.silu_backward(dh * up, gate), dh * F.silu(gate)]
    return both if count == 2 else [torch.cat(both, dim=1)]
