"""Quantize the operands of a layer's three GEMMs, and report each to observers.

fprop reads an operand along its channels, wgrad reads it along its tokens. Where a recipe has tiles of 128 for both,
one kernel reads a gradient once and writes both forms (`octile.ops.transpose`), bit for bit what two quantizations
would give. The same holds for a weight in 128×128 blocks, which dgrad reads transposed. A weight whose blocks have one
row is quantized from the original for each of the two, along the dimension that the GEMM sums over.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2.  Shapes: T tokens, K channels, N outputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, TILE
from octile.nn.delayed_scaling import AmaxHistory, quantize_unscaled
from octile.nn.gathered_weight import GatheredWeight, gathered, gathered_transposed
from octile.nn.observer import has_observers, report_quantization
from octile.nn.weight_cache import WeightRequest, quantized_weight, quantized_weights
from octile.ops.groups import ROWS, AlignedGroups, align_groups, take_tiles
from octile.ops.transpose import (
    quantize_and_transpose,
    quantize_joined,
    quantize_joined_rows_and_columns,
    quantize_matrices,
    quantize_rows_and_columns,
    quantize_transposed,
    requantize_transposed,
    transpose_encoded,
    why_not_join,
)
from octile.recipe import GemmFormats, OperandFormat, Recipe
from octile.scaled import ScaledTensor, quantize


class QuantizedWeight(NamedTuple):
    """A quantized weight: w [..., N, K] as fprop reads it, and w_t [..., K, N] as dgrad reads it."""

    w: ScaledTensor
    w_t: ScaledTensor


class RecomputedWeight:
    """A weight whose transpose is made in the backward pass, each time it is asked for: see `QuantizedWeight`.

    Args:
        weight: in high precision, as it was in the forward pass, or gathered in FP8.
        operand_format: with 128×128 blocks.
        dy: a gradient of this backward pass.
    """

    def __init__(self, weight: Tensor, operand_format: OperandFormat, dy: Tensor):
        self.weight, self.operand_format, self.dy = weight, operand_format, dy

    @property
    def w(self) -> ScaledTensor:
        """The weight as fprop reads it."""
        if isinstance(self.weight, GatheredWeight):
            return gathered(self.weight)
        return _quantize(self.weight.detach(), self.operand_format)

    @property
    def w_t(self) -> ScaledTensor:
        """The weight as dgrad reads it."""
        if isinstance(self.weight, GatheredWeight):
            return gathered_transposed(self.weight, self.dy)
        power_of_2 = self.operand_format.scale == "power_of_2"
        data_t, scale = quantize_transposed(self.weight.detach(), self.operand_format.fmt.name, power_of_2, self.dy)
        return ScaledTensor(data_t, scale.mT, BLOCK)


class RecomputedJoinedWeight:
    """The weights of `quantize_joined_weights`, whose transpose is quantized in the backward pass: `RecomputedWeight`.

    Args:
        weights: in high precision, as they were in the forward pass, or gathered in FP8.
        operand_format, dy: as for `RecomputedWeight`.
    """

    def __init__(self, weights: Sequence[Tensor], operand_format: OperandFormat, dy: Tensor):
        self.weights, self.operand_format, self.dy = weights, operand_format, dy

    @property
    def w(self) -> ScaledTensor:
        """The weights as fprop reads them."""
        data, scale, _ = _quantize_joined(self.weights, self.operand_format, with_transposed=False)
        return ScaledTensor(data, scale, BLOCK)

    @property
    def w_t(self) -> ScaledTensor:
        """The weights as dgrad reads them."""
        _, scale, data_t = _quantize_joined(self.weights, self.operand_format, with_data=False, dy=self.dy)
        return ScaledTensor(data_t, scale.mT, BLOCK)


WeightForms = QuantizedWeight | RecomputedWeight | RecomputedJoinedWeight


def recomputes_transposed(recipe: Recipe, weight: Tensor, is_cached: bool) -> bool:
    """Whether a weight's transpose is made in the backward pass: not if the cache holds a frozen weight."""
    if isinstance(weight, GatheredWeight):  # whose memory FSDP2 frees between the passes
        return True
    return recipe.recomputes_transposed_weights and (not is_cached or weight.requires_grad)


def quantize_operand(
    t: Tensor, operand_format: OperandFormat, operand: str, history: AmaxHistory | None = None
) -> ScaledTensor:
    """Quantize one operand.

    Args:
        t: [..., M, K] in high precision.
        operand: its name, for observers and for the amax history: "x", "w", "dy", "wgrad_x" or "wgrad_dy".
        history: needed where the format has delayed scaling.
    """
    if operand_format.amax == "delayed":
        assert history is not None  # functional.linear checks it before the forward pass
        return report_quantization(operand, history.quantize(t, operand, operand_format))
    return report_quantization(operand, _quantize(t.detach(), operand_format))


def quantize_weight(
    weight: Tensor, operand_format: OperandFormat, history: AmaxHistory | None, cache: bool, needs_dgrad: bool
) -> QuantizedWeight:
    """Quantize a layer's weight [..., N, K] for fprop and dgrad.

    Args:
        history: needed where the format has delayed scaling.
        cache: whether the result may be taken from, and stored in, the weight cache.
        needs_dgrad: whether dgrad will read w_t of the result. On a GPU it is then laid out as dgrad's GEMM reads it.
    """
    if isinstance(weight, GatheredWeight):
        w = report_quantization("w", gathered(weight))
        return QuantizedWeight(w, w.mT)
    if operand_format.amax == "delayed":
        w = quantize_operand(weight, operand_format, "w", history)
        return QuantizedWeight(w, w.mT)
    transpose = needs_dgrad and weight.is_cuda and operand_format.block == BLOCK
    make = _quantize_both_layouts if transpose else _quantize_one_layout
    if cache:
        quantized = quantized_weight(weight, operand_format, make, transpose)
    else:
        quantized = make(weight.detach(), operand_format)
    report_quantization("w", quantized.w)
    return quantized


def quantize_joined_weights(
    weights: Sequence[Tensor], operand_format: OperandFormat, cache: bool, needs_dgrad: bool
) -> QuantizedWeight:
    """Quantize weights that multiply one input as one matrix of their rows; see `why_not_join_weights`.

    Args:
        weights: [..., N_i, K].
        cache, needs_dgrad: as in `quantize_weight`.

    Returns:
        w [..., ΣN_i, K] and w_t [..., K, ΣN_i], whose blocks are those of each weight alone.
    """
    transpose = needs_dgrad and weights[0].is_cuda

    def make(weights: Sequence[Tensor], operand_format: OperandFormat) -> QuantizedWeight:
        data, scale, data_t = _quantize_joined(weights, operand_format, with_transposed=transpose)
        w = ScaledTensor(data, scale, BLOCK)
        return QuantizedWeight(w, ScaledTensor(data_t, scale.mT, BLOCK) if transpose else w.mT)

    if cache:
        quantized = quantized_weights(weights, operand_format, make, transpose)
    else:
        quantized = make([w.detach() for w in weights], operand_format)
    if has_observers():
        for part in split_rows(quantized.w, [w.shape[-2] for w in weights]):
            report_quantization("w", part)
    return quantized


def quantize_requested(requests: Sequence[WeightRequest]) -> None:
    """Quantize weights in 128×128 blocks and store them in the weight cache, by as few launches as possible.

    Args:
        requests: what `recorded_requests` has returned. Those for other formats, and for stacked weights that are
            joined, are left to their first use.
    """
    alike: dict[tuple[OperandFormat, bool, Hashable], dict[Hashable, WeightRequest]] = {}
    for request in requests:
        weights, w_format, transposed = request
        are_stacks_joined = len(weights) > 1 and weights[0].dim() > 2
        if w_format.block == BLOCK and w_format.amax == "current" and not are_stacks_joined:
            key = w_format, transposed, (weights[0].dtype, weights[0].device)
            alike.setdefault(key, {})[tuple(map(id, weights))] = request  # once
    for (w_format, transposed, _), found in alike.items():
        groups = [request.weights for request in found.values()]
        detached = [w.detach() for weights in groups for w in weights]
        power_of_2 = w_format.scale == "power_of_2"
        parts = iter(quantize_matrices(detached, [*map(len, groups)], w_format.fmt.name, power_of_2, transposed))
        for weights, data, scale, data_t in zip(groups, parts, parts, parts, strict=True):
            w = ScaledTensor(data, scale, BLOCK)
            quantized = QuantizedWeight(w, ScaledTensor(data_t, scale.mT, BLOCK) if transposed else w.mT)
            quantized_weights(weights, w_format, lambda *_, quantized=quantized: quantized, transposed)


def why_not_join_weights(weights: Sequence[Tensor], operand_format: OperandFormat) -> str | None:
    """Return why `quantize_joined_weights` does not support these weights; None: it does."""
    if operand_format.block != BLOCK or operand_format.amax != "current":
        return "a block has rows of several weights"
    if any(w.dtype != weights[0].dtype for w in weights):
        return "the weights have several dtypes"
    if weights[0].dim() == 2:
        return why_not_join("weights", weights, 0)
    if any((w.shape[:-2], w.shape[-1]) != (weights[0].shape[:-2], weights[0].shape[-1]) for w in weights):
        return "the stacked weights have several sizes"
    return "a block has rows of several weights" if any(w.shape[-2] % BLOCK[0] for w in weights[:-1]) else None


def split_rows(q: ScaledTensor, sizes: Sequence[int]) -> list[ScaledTensor]:
    """View matrices [..., M, K] as parts of these numbers of rows, of which each but the last has whole blocks."""
    ends = list(accumulate(sizes))
    rows = q.block[0]
    return [
        ScaledTensor(q.data[..., end - size : end, :], q.scale[..., (end - size) // rows : -(-end // rows), :], q.block)
        for size, end in zip(sizes, ends, strict=True)
    ]


def _quantize_joined(
    weights: Sequence[Tensor],
    operand_format: OperandFormat,
    with_data: bool = True,
    with_transposed: bool = True,
    dy: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    fmt, power_of_2 = operand_format.fmt.name, operand_format.scale == "power_of_2"
    is_gathered = any(isinstance(w, GatheredWeight) for w in weights)
    if weights[0].dim() == 2 and not is_gathered:
        return quantize_joined([w.detach() for w in weights], fmt, power_of_2, with_data, with_transposed, dy)
    if not (with_data or is_gathered) and dy is not None:
        transposes, scales = zip(*(quantize_transposed(w.detach(), fmt, power_of_2, dy) for w in weights), strict=True)
        data_t = _cat_encoded(transposes, dim=-1)
        return data_t.mT, torch.cat(scales, dim=-2), data_t
    parts = [gathered(w) if isinstance(w, GatheredWeight) else _quantize(w.detach(), operand_format) for w in weights]
    data = _cat_encoded([part.data for part in parts], dim=-2)
    scale = torch.cat([part.scale for part in parts], dim=-2)
    return data, scale, transpose_encoded(data, dy) if with_transposed else data.mT


def _cat_encoded(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate encoded values as bytes: inside autocast `torch.cat` refuses dtypes of 8 bits."""
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)


def _quantize_one_layout(weight: Tensor, operand_format: OperandFormat) -> QuantizedWeight:
    w = _quantize(weight, operand_format)
    # a tile lies along the dimension that the GEMM sums over: the inputs in fprop, the outputs in dgrad
    is_tiled = operand_format.block[0] == 1
    return QuantizedWeight(w, _quantize(weight.mT, operand_format) if is_tiled else w.mT)


def _quantize_both_layouts(weight: Tensor, operand_format: OperandFormat) -> QuantizedWeight:
    power_of_2 = operand_format.scale == "power_of_2"
    data, scale, data_t = quantize_and_transpose(weight, operand_format.fmt.name, power_of_2)
    return QuantizedWeight(ScaledTensor(data, scale, BLOCK), ScaledTensor(data_t, scale.mT, BLOCK))


def _quantize(t: Tensor, operand_format: OperandFormat) -> ScaledTensor:
    if operand_format.amax == "unscaled":
        return quantize_unscaled(t, operand_format)
    return quantize(t, operand_format.block, operand_format.fmt, operand_format.scale)


def align_experts(offs: Tensor | None, rows: int, formats: GemmFormats) -> AlignedGroups | None:
    """Align experts' rows to the tiles of wgrad's operands; None for a dense layer, or where a tensor has one scale.

    Raises:
        ValueError: wgrad's operands have blocks that would extend over two tiles.
    """
    blocks = formats.wgrad_x.block, formats.wgrad_dy.block
    extents = [extent for extent, _ in blocks if extent is not None]
    if offs is None or not extents:
        return None
    for extent in extents:
        if ROWS % extent:
            raise ValueError(f"blocks of wgrad's operands must have rows that divide {ROWS} for experts, not {extent}")
    return AlignedGroups(*align_groups(offs, rows))


def quantize_gradient(
    dy: Tensor, formats: GemmFormats, history: AmaxHistory | None = None, groups: AlignedGroups | None = None
) -> tuple[ScaledTensor, ScaledTensor]:
    """Quantize an output gradient dy [T, N] for dgrad and for wgrad; one tensor serves both where the formats agree.

    With groups, wgrad's operand is [P, N], in the groups' tiles.
    """
    dgrad_format, wgrad_format = formats.dy, formats.wgrad_dy
    if dgrad_format == wgrad_format and groups is None:
        both = quantize_operand(dy, dgrad_format, "dy", history)
        return both, both
    if not formats.is_tiled:
        return quantize_operand(dy, dgrad_format, "dy"), quantize_wgrad_gradient(dy, formats, None, groups)
    power_of_2, tiles = dgrad_format.scale == "power_of_2", None if groups is None else groups.tiles
    data, scale, data_t, scale_t = quantize_rows_and_columns(dy.detach(), dgrad_format.fmt.name, power_of_2, tiles)
    rows = report_quantization("dy", ScaledTensor(data, scale, TILE))
    return rows, report_quantization("wgrad_dy", transposed(data_t, scale_t))


def quantize_joined_gradient(parts: Sequence[Tensor], formats: GemmFormats) -> tuple[ScaledTensor, ScaledTensor]:
    """Quantize parts [T, N_i] of an output gradient [T, N], next to each other, for dgrad and for wgrad."""
    first, dgrad_format = parts[0], formats.dy
    alike = all(part.dtype == first.dtype for part in parts)
    if len(parts) == 1 or not (formats.is_tiled and alike and why_not_join("parts", parts, 1) is None):
        return quantize_gradient(first if len(parts) == 1 else torch.cat(list(parts), dim=1), formats)
    detached, power_of_2 = [part.detach() for part in parts], dgrad_format.scale == "power_of_2"
    data, scale, data_t, scale_t = quantize_joined_rows_and_columns(detached, dgrad_format.fmt.name, power_of_2)
    rows = report_quantization("dy", ScaledTensor(data, scale, TILE))
    return rows, report_quantization("wgrad_dy", transposed(data_t, scale_t))


def quantize_wgrad_gradient(
    dy: Tensor, formats: GemmFormats, history: AmaxHistory | None, groups: AlignedGroups | None
) -> ScaledTensor:
    """Quantize an output gradient dy [T, N] for wgrad alone."""
    operand = "dy" if formats.wgrad_dy == formats.dy else "wgrad_dy"
    return quantize_operand(in_tiles(dy, groups), formats.wgrad_dy, operand, history)


def requantize(
    q: ScaledTensor,
    operand_format: OperandFormat,
    operand: str = "wgrad_x",
    rows: Tensor | None = None,
    groups: AlignedGroups | None = None,
) -> ScaledTensor:
    """Quantize a quantized operand again, as wgrad reads it.

    Args:
        q: [T, K], saved for backward; the original is gone.
        operand: its name, for observers.
        rows: int32 [R], the rows of q that the result has, in their order; None: all of them.
        groups: groups of these rows; None: a dense layer.

    Returns:
        [T, K], or [R, K], or with groups [P, K], in their tiles.
    """
    if q.block == TILE and operand_format.block in (COLUMN_TILE, BLOCK):
        power_of_2, in_blocks = operand_format.scale == "power_of_2", operand_format.block == BLOCK
        tiles = None if groups is None else groups.tiles
        settings = (power_of_2, operand_format.fmt.name, rows, tiles, in_blocks)
        data_t, scale_t = requantize_transposed(q.data, q.scale, *settings)
        return report_quantization(operand, transposed(data_t, scale_t, in_blocks))
    values = q.dequantize()
    values = values if rows is None else values.index_select(0, rows)
    return quantize_operand(in_tiles(values, groups), operand_format, operand)


def in_tiles(t: Tensor, groups: AlignedGroups | None) -> Tensor:
    """Copy the rows of experts to their tiles; t itself without groups."""
    return t if groups is None else take_tiles(t, groups.tiles)


def transposed(data_t: Tensor, scale_t: Tensor, in_blocks: bool = False) -> ScaledTensor:
    """View the transpose [K, T] in 1×128 tiles as [T, K] in 128×1 tiles; or in 128×128 blocks as in the same."""
    return ScaledTensor(data_t.mT, scale_t.mT, BLOCK if in_blocks else COLUMN_TILE)
