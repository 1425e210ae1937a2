"""How layers cast what they multiply, and who looks on.

What a product of the forward pass takes along its channels, one of the backward pass takes along its tokens. Where a
recipe cuts both in tiles of 128, one read makes both (`octile.ops.transpose`), bit for bit as two casts would. So is a
weight cast once where dgrad reads its columns.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2.  Shapes: T tokens, K channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from octile.nn.delayed_scaling import AmaxHistory, unscaled
from octile.nn.weight_cache import quantized_weight
from octile.ops.transpose import (
    BLOCK,
    COLUMN_TILE,
    TILE,
    quantize_and_transpose,
    quantize_rows_and_columns,
    requantize_transposed,
)
from octile.recipe import GemmFormats, OperandFormat
from octile.scaled import ScaledTensor, quantize

Observer = Callable[[str, ScaledTensor], None]
_watchers: list[Observer] = []


@contextmanager
def observe_quantization(watcher: Observer) -> Iterator[None]:
    """Calls watcher(operand, quantised) for all that is cast inside: "x", "w", "dy", "wgrad_x", "wgrad_dy"."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def seen(operand: str, q: ScaledTensor) -> ScaledTensor:
    """q, which was cast as that operand, shown to those who watch."""
    for watcher in _watchers:
        watcher(operand, q)
    return q


class Weight(NamedTuple):
    """A weight in 8 bits: w [..., N, K] as fprop reads it and w_t [..., K, N] as dgrad does."""

    w: ScaledTensor
    w_t: ScaledTensor


def quantize_operand(t: Tensor, how: OperandFormat, operand: str, history: AmaxHistory | None = None) -> ScaledTensor:
    """t as the recipe casts this operand."""
    if how.amax == "delayed":
        assert history is not None  # checked before the forward pass
        return seen(operand, history.quantize(t, operand, how))
    return seen(operand, _quantize(t.detach(), how))


def quantize_weight(
    weight: Tensor, how: OperandFormat, history: AmaxHistory | None, keep: bool, turned: bool
) -> Weight:
    """A layer's weight.

    Args:
        keep: the result is kept until the weight is written again.
        turned: dgrad will read w_t, so on a GPU it lies in memory as its products read it.
    """
    if how.amax == "delayed":
        w = quantize_operand(weight, how, "w", history)
        return Weight(w, w.mT)
    turned = turned and weight.is_cuda and how.block == BLOCK
    make = _both_ways if turned else _one_way
    found = quantized_weight(weight, how, make, turned) if keep else make(weight.detach(), how)
    seen("w", found.w)
    return found


def _one_way(weight: Tensor, how: OperandFormat) -> Weight:
    w = _quantize(weight, how)
    # tiles lie along what is summed over: along the inputs for fprop, along the outputs for dgrad
    return Weight(w, _quantize(weight.mT, how) if how.block == TILE else w.mT)


def _both_ways(weight: Tensor, how: OperandFormat) -> Weight:
    data, scale, data_t = quantize_and_transpose(weight, how.fmt.name, how.scale == "power_of_2")
    return Weight(ScaledTensor(data, scale, BLOCK), ScaledTensor(data_t, scale.mT, BLOCK))


def _quantize(t: Tensor, how: OperandFormat) -> ScaledTensor:
    return unscaled(t, how) if how.amax == "unscaled" else quantize(t, how.block, how.fmt, how.scale)


def quantize_gradient(
    dy: Tensor, formats: GemmFormats, history: AmaxHistory | None = None
) -> tuple[ScaledTensor, ScaledTensor]:
    """dy [T, K] as dgrad and as wgrad take it; the same tensor where they are cast alike."""
    rows, columns = formats.dy, formats.wgrad_dy
    if rows == columns:
        both = quantize_operand(dy, rows, "dy", history)
        return both, both
    if not formats.is_tiled:
        return quantize_operand(dy, rows, "dy"), quantize_operand(dy, columns, "wgrad_dy")
    data, scale, *turned = quantize_rows_and_columns(dy.detach(), rows.fmt.name, rows.scale == "power_of_2")
    return seen("dy", ScaledTensor(data, scale, TILE)), seen("wgrad_dy", from_turned(*turned))


def requantize(
    q: ScaledTensor, how: OperandFormat, operand: str = "wgrad_x", rows: Tensor | None = None
) -> ScaledTensor:
    """An operand as wgrad takes it, made from a cast and not from the original: of an input that was kept as one.

    Args:
        rows: int32 [R], which rows of q, in which order; all of them if not given.
    """
    if q.block == TILE and how.block == COLUMN_TILE:
        turned = requantize_transposed(q.data, q.scale, how.scale == "power_of_2", how.fmt.name, rows)
        return seen(operand, from_turned(*turned))
    values = q.dequantize()
    return quantize_operand(values if rows is None else values.index_select(0, rows), how, operand)


def from_turned(data_t: Tensor, scale_t: Tensor) -> ScaledTensor:
    """[T, K] in 128×1 tiles from its transpose [K, T] in 1×128 tiles: a view."""
    return ScaledTensor(data_t.mT, scale_t.mT, COLUMN_TILE)
