"""A feed-forward layer as one function, dense or of experts: down(silu(gate(x)) · up(x)).

    forward     x → 1×128, once                        and to the experts: codes with their scales
                gate, up = x · wᵀ in BF16
                h = silu(gate) · up → 1×128            and gate, up → 1×128 to be kept, unless they are made again
                y = h · wᵀ in BF16                     and from the experts: a token's rows are summed
    backward    dy → 1×128 and 128×1                   or to the experts: 1×128, once, which become 128×1 there
                dh = dy · w in BF16
                d(gate), d(up) → 1×128 and 128×1       and h → 128×1, all from dh and gate and up
                dx = d(gate) · w + d(up) · w in BF16   and from the experts: a token's rows are summed
                x again → 128×1
                dw = d(…)ᵀ · x and dyᵀ · h, summed in FP32

The weight of an expert's result multiplies h (`octile.ops.swiglu`). What travels to the experts and is quantised again
there has scales by the rule of x, powers of two, both ways; what comes back is BF16. An expert without tokens has no
rows, and its weights get a gradient of zeros.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: T tokens, D model, I intermediate, E experts, K chosen experts, R = T·K rows; R = T where there are no experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import TILE
from octile.nn.dispatcher import LocalDispatcher, RoutingPlan
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.layers import FusedLayers, Settings, save, saved, settings
from octile.nn.fused.linear import nt, nt_sum
from octile.nn.fused.quantize import Weight, from_turned, quantize_gradient, quantize_operand, requantize, seen
from octile.ops.swiglu import swiglu_backward_quantize, swiglu_quantize, swiglu_quantize_and_save
from octile.recipe import GemmFormats, OperandFormat, Recipe
from octile.scaled import ScaledTensor

WHOLE_TILES = 128  # d(gate) and d(up) lie side by side: their widths must be multiples of it


def takes(intermediate_size: int) -> bool:
    """Whether a layer of this size can be one function."""
    return intermediate_size % WHOLE_TILES == 0


def feed_forward(x: BlockInput, gate: Tensor, up: Tensor, down: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """A dense layer: weights gate and up [I, D], down [D, I] → [T, D] in dtype."""
    s = settings(recipe, dtype, (gate, up, down), x.x)
    return _FeedForward.apply(x.x, None, None, x, None, s, gate, up, down)


class Routed(NamedTuple):
    """The way of tokens to their experts and back."""

    dispatcher: LocalDispatcher
    plan: RoutingPlan


def experts(
    x: BlockInput,
    gate_up: Tensor,
    down: Tensor,
    weights_TK: Tensor,
    add: Tensor | None,
    routed: Routed,
    recipe: Recipe,
    dtype: torch.dtype,
) -> Tensor:
    """A mixture: weights gate_up [E, 2I, D], the gates' rows first, and down [E, D, I] → [T, D] in dtype.

    Args:
        weights_TK: float32, of the results of each token's experts.
        add: [T, D] in dtype, what the sum of a token's results begins with; None: zeros.
    """
    s = settings(recipe, dtype, (gate_up, down), x.x)
    return _FeedForward.apply(x.x, weights_TK, add, x, routed, s, gate_up, down)


class _FeedForward(torch.autograd.Function):
    """Its weights are gate and up, or both in one, and down."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        add: Tensor | None,
        x: BlockInput,
        routed: Routed | None,
        s: Settings,
        *weights: Tensor,
    ) -> Tensor:
        way = _Way(routed)
        layers = FusedLayers(weights, ctx.needs_input_grad[6:], s)
        *into, down = all_cast = layers.cast(weights)
        rows = way.there(x.q)
        gate, up = _gate_and_up(rows, into, way.offs, s.dtype)
        weight_R = way.weights(weights_TK)
        h, kept = _swiglu(gate, up, weight_R, s.recipe)
        y = nt(h, down.w, way.offs, s.dtype)

        for i, w in enumerate(into):
            layers.show_fprop(i, weights[i], lambda: way.values_there(x_TD), rows, w, way.offs)
        layers.show_fprop(-1, weights[-1], lambda: _h(gate, up, weight_R), h, down, way.offs)
        save(ctx, layers, all_cast, x=x.kept, halves=kept, weight_R=weight_R, plan=routed and tuple(routed.plan))
        ctx.source, ctx.x_dtype, ctx.dispatcher = x.source, x_TD.dtype, routed and routed.dispatcher
        return way.back(y, add)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        layers, weights, kept = saved(ctx)
        s, weight_R = layers.settings, kept["weight_R"]
        way = _Way(None if kept["plan"] is None else Routed(ctx.dispatcher, RoutingPlan(*kept["plan"])))
        *into, down = weights
        formats = s.recipe.formats
        assert formats is not None

        dy, dy_t = way.gradient_there(dy_TD, formats)
        dh = nt(dy, down.w_t, way.offs, s.dtype)
        x = ctx.source.again(kept["x"])
        halves = kept["halves"] or _Halves(*_gate_and_up(way.there(x), into, way.offs, s.dtype))
        d, d_t, h_t, dweight_R = _swiglu_backward(dh, halves, weight_R, formats)
        ds, ds_t = (_parts(t, len(into)) for t in (d, d_t))

        def dy_R() -> Tensor:
            return way.values_there(dy_TD)

        def d_part(i: int) -> Tensor:
            return _gradients(dh, halves, weight_R, len(into))[i]

        layers.show_dgrad(-1, dy_R, dy, down, way.offs)
        dws = [layers.wgrad(-1, dy_R, dy_t, h_t, way.offs)]
        x_t = way.again_there(x, formats.wgrad_x)
        for i in reversed(range(len(into))):
            before = partial(d_part, i)
            layers.show_dgrad(i, before, ds[i], into[i], way.offs)
            dws.insert(0, layers.wgrad(i, before, ds_t[i], x_t, way.offs))
        dx = None
        if ctx.needs_input_grad[0]:
            pairs = [(part, w.w_t) for part, w in zip(ds, into, strict=True)]
            dx = way.back(nt_sum(pairs, way.offs, ctx.x_dtype))
        dweights_TK = None if way.routed is None else dweight_R[way.routed.plan.place_TK]
        return dx, dweights_TK, dy_TD if ctx.needs_input_grad[2] else None, None, None, None, *dws


class _Way:
    """To the experts and back in 8 bits and in high precision; a dense layer's rows stay where they are."""

    def __init__(self, routed: Routed | None):
        self.routed = routed
        self.offs = None if routed is None else routed.plan.offs_E

    def there(self, x: ScaledTensor) -> ScaledTensor:
        return x if self.routed is None else self.routed.dispatcher.dispatch_quantized(x, self.routed.plan)

    def again_there(self, x: ScaledTensor, how: OperandFormat, operand: str = "wgrad_x") -> ScaledTensor:
        if self.routed is None:
            return requantize(x, how, operand)
        return self.routed.dispatcher.dispatch_requantized(x, self.routed.plan, how, operand)

    def values_there(self, x: Tensor) -> Tensor:
        return x if self.routed is None else x.index_select(0, self.routed.plan.token_R)

    def weights(self, weights_TK: Tensor | None) -> Tensor | None:
        """Those of the rows."""
        if self.routed is None or weights_TK is None:
            return None
        return weights_TK.flatten().index_select(0, self.routed.plan.order_R)

    def back(self, y: Tensor, add: Tensor | None = None) -> Tensor:
        return y if self.routed is None else self.routed.dispatcher.combine_unweighted(y, self.routed.plan, add)

    def gradient_there(self, dy: Tensor, formats: GemmFormats) -> tuple[ScaledTensor, ScaledTensor]:
        """dy as dgrad and as wgrad take it. To the experts it goes in tiles that can be cast again."""
        if self.routed is None:
            return quantize_gradient(dy, formats)
        of_dgrad, of_wgrad = formats.routed
        q = quantize_operand(dy, of_dgrad, "dy")
        return self.there(q), self.again_there(q, of_wgrad, "wgrad_dy")


class _Halves(NamedTuple):
    """gate and up [R, I]: values, or kept in 1×128 tiles with their scales."""

    gate: Tensor
    up: Tensor
    gate_scale: Tensor | None = None
    up_scale: Tensor | None = None

    def values(self) -> tuple[Tensor, Tensor]:
        """Both in float32."""
        if self.gate_scale is None or self.up_scale is None:
            return self.gate.float(), self.up.float()
        gate, up = ScaledTensor(self.gate, self.gate_scale, TILE), ScaledTensor(self.up, self.up_scale, TILE)
        return gate.dequantize(), up.dequantize()


def _gate_and_up(
    x: ScaledTensor, weights: Sequence[Weight], offs: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    results = [nt(x, w.w, offs, dtype) for w in weights]
    gate, up = results if len(results) == 2 else results[0].chunk(2, dim=-1)
    return gate, up


def _swiglu(gate: Tensor, up: Tensor, weight_R: Tensor | None, recipe: Recipe) -> tuple[ScaledTensor, _Halves | None]:
    """h as the down-projection takes it, and gate and up as they are kept."""
    assert recipe.formats is not None
    how, keep = recipe.formats.x, recipe.swiglu_inputs
    of_h = (how.fmt.name, how.scale == "power_of_2")
    if not isinstance(keep, OperandFormat):
        data, scale = swiglu_quantize(gate, up, *of_h, weight_R)
        return seen("x", ScaledTensor(data, scale, TILE)), None
    data, scale, kept, kept_scale = swiglu_quantize_and_save(
        gate, up, *of_h, keep.fmt.name, keep.scale == "power_of_2", weight_R
    )
    return seen("x", ScaledTensor(data, scale, TILE)), _Halves(*kept, *kept_scale)


def _swiglu_backward(
    dh: Tensor, halves: _Halves, weight_R: Tensor | None, formats: GemmFormats
) -> tuple[ScaledTensor, ScaledTensor, ScaledTensor, Tensor]:
    """Of gate and up, side by side, the gradients as dgrad and as wgrad take them; h as wgrad does; d(weight)."""
    of_d, of_h = ((how.fmt.name, how.scale == "power_of_2") for how in (formats.dy, formats.wgrad_x))
    data, scale, data_t, scale_t, h_t, h_scale_t, dweight_R = swiglu_backward_quantize(
        dh, *halves, weight_R, *of_d, *of_h
    )
    rows, columns = seen("dy", ScaledTensor(data, scale, TILE)), seen("wgrad_dy", from_turned(data_t, scale_t))
    return rows, columns, seen("wgrad_x", from_turned(h_t, h_scale_t)), dweight_R


def _parts(d: ScaledTensor, count: int) -> list[ScaledTensor]:
    """What belongs to each of so many weights, side by side in d [R, 2I]."""
    pairs = zip(d.data.chunk(count, dim=1), d.scale.chunk(count, dim=1), strict=True)
    return [ScaledTensor(data, scale, d.block) for data, scale in pairs]


# What the operators above cast as they make it, as values, for who looks on


def _h(gate: Tensor, up: Tensor, weight_R: Tensor | None) -> Tensor:
    h = F.silu(gate.float()) * up.float()
    return h if weight_R is None else h * weight_R[:, None]


def _gradients(dh: Tensor, halves: _Halves, weight_R: Tensor | None, count: int) -> list[Tensor]:
    gate, up = halves.values()
    dh = dh.float() if weight_R is None else dh.float() * weight_R[:, None]
    both = [torch.ops.aten.silu_backward(dh * up, gate), dh * F.silu(gate)]
    return both if count == 2 else [torch.cat(both, dim=1)]
