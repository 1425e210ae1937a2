"""One tensor's way from one checkpoint into another, in pieces, and the proof that it arrived.

A piece is a block of rows that begins at a multiple of 128, the height of a scale's block, so a piece is quantised
exactly as the whole would be. What arrived is read back from the disk and held against its source:

    quantised     |x − data·scale| ≤ max(2⁻⁴·|x|, 2⁻¹⁰·scale)     half a unit in the last of E4M3's 4 significant bits,
                                                                 and half its smallest value below the normal range
    to BF16       |data·scale − x| ≤ max(2⁻⁸·|data·scale|, 2⁻¹³⁴) the same for BF16's 8 significant bits
    to FP32       the same number
    copied        the same bytes
"""

import enum
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from octile.checkpoint.fp8_layout import (
    BLOCK,
    SCALE_SUFFIX,
    dequantize_weight,
    fp8_specs,
    is_fp8,
    is_scale,
    is_stored_in_fp8,
    quantize_weight,
)
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TensorFile, TensorFileWriter, TensorSpec
from octile.formats import E4M3

Target = Literal["fp8", "bf16", "float32"]
PIECE = 1 << 20  # elements, unless 128 rows have more; a few FP32 copies of it stay in a processor's cache
SLACK = 1 + 1e-6  # the scale and the product with it are rounded to FP32


class Action(enum.Enum):
    """What happens to a tensor."""

    QUANTIZE = "quantized"
    TO_BF16 = "dequantised to BF16"
    TO_FLOAT32 = "dequantised to FP32"
    COPY = "copied"
    DROP = "dropped"  # only the scale of a dequantised weight


DEQUANTIZED = {Action.TO_BF16: torch.bfloat16, Action.TO_FLOAT32: torch.float32}


def choose_action(name: str, specs: Mapping[str, TensorSpec], to: Target) -> Action:
    """What happens to a tensor of the checkpoint with these specs."""
    spec = specs[name]
    if to == "fp8":
        wide = spec.dtype in ("F32", "BF16", "F16")
        return Action.QUANTIZE if wide and is_stored_in_fp8(name, spec.shape) else Action.COPY
    if is_fp8(spec):
        return Action.TO_BF16 if to == "bf16" else Action.TO_FLOAT32
    return Action.DROP if is_scale(name, specs) else Action.COPY


def specs_after(name: str, spec: TensorSpec, change: Action) -> dict[str, TensorSpec]:
    """The tensors that the result holds in its place."""
    match change:
        case Action.QUANTIZE:
            return fp8_specs(name, spec.shape)
        case Action.TO_BF16 | Action.TO_FLOAT32:
            return {name: TensorSpec.of(DEQUANTIZED[change], spec.shape)}
        case Action.COPY:
            return {name: spec}
        case Action.DROP:
            return {}


def convert_tensor(name: str, change: Action, source: Shards, out: TensorFileWriter) -> None:
    """Writes what becomes of a tensor, in pieces.

    Raises:
        ValueError: the source is damaged, or holds NaN or Inf where it is not only copied.
    """
    spec = source.specs[name]
    match change:
        case Action.QUANTIZE:
            for start, stop in _row_pieces(spec):
                q = quantize_weight(name, source.rows(name, start, stop))
                out.write(name, q.data, row=start)
                out.write(name + SCALE_SUFFIX, q.scale, row=start // BLOCK[0])
        case Action.TO_BF16 | Action.TO_FLOAT32:
            for start, stop in _row_pieces(spec):
                values = _dequantized_rows(source, name, start, stop)
                if not values.isfinite().all():
                    raise ValueError(f"{name} in {source.folder} holds NaN or Inf")
                out.write(name, values.to(DEQUANTIZED[change]), row=start)
        case Action.COPY:
            for start, stop in _byte_pieces(spec):
                out.write_bytes(name, start, source.read_bytes(name, start, stop))


def max_error_of(name: str, change: Action, source: Shards, result: TensorFile) -> float:
    """Compares what became of a tensor, read from the disk, with its source.

    Returns:
        The largest error as a part of the largest magnitude that its block of 128×128 can hold; 0 for a copy.

    Raises:
        RuntimeError: it is not what was written.
    """
    spec, worst = source.specs[name], 0.0
    match change:
        case Action.QUANTIZE:
            for start, stop in _row_pieces(spec):
                exact = source.rows(name, start, stop).float()
                scale = result.rows(name + SCALE_SUFFIX, *_scale_rows(start, stop))
                values = dequantize_weight(result.rows(name, start, stop), scale, torch.float32)
                scale = _spread(scale, values)
                worst = max(worst, _compare(name, result, exact, values, 2.0**-4, 2.0**-10 * scale, scale))
        case Action.TO_BF16 | Action.TO_FLOAT32:
            relative, least = (2.0**-8, 2.0**-134) if change is Action.TO_BF16 else (0.0, 0.0)
            for start, stop in _row_pieces(spec):
                exact = _dequantized_rows(source, name, start, stop)
                values = result.rows(name, start, stop).float()
                scale = _spread(source.rows(name + SCALE_SUFFIX, *_scale_rows(start, stop)).float(), values)
                worst = max(worst, _compare(name, result, exact, values, relative, torch.tensor(least), scale))
        case Action.COPY:
            for start, stop in _byte_pieces(spec):
                if not torch.equal(source.read_bytes(name, start, stop), result.read_bytes(name, start, stop)):
                    raise RuntimeError(f"{name} in {result.path} reads back with other bytes than were copied")
    return worst


def _compare(
    name: str, result: TensorFile, exact: Tensor, values: Tensor, relative: float, least: Tensor, scale: Tensor
) -> float:
    """The largest |values − exact| / (448 · scale). Works in place: both are overwritten."""
    error = values.sub_(exact).abs_()
    allowed = exact.abs_().mul_(relative).clamp_(min=least).mul_(SLACK)
    if not bool((error <= allowed).all()):  # false for NaN as well
        raise RuntimeError(f"{name} in {result.path} reads back further from its source than rounding explains")
    return float(error.div_(scale).amax()) / E4M3.max if error.numel() else 0.0


def _dequantized_rows(source: Shards, name: str, start: int, stop: int) -> Tensor:
    """FP32 values of rows of an FP8 weight; its scale may lie in another file."""
    scale = source.rows(name + SCALE_SUFFIX, *_scale_rows(start, stop))
    return dequantize_weight(source.rows(name, start, stop), scale, torch.float32)


def _spread(scale: Tensor, values_NK: Tensor) -> Tensor:
    """The scale of every element, [N, K]."""
    rows, cols = values_NK.shape
    return scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :cols]


def _scale_rows(start: int, stop: int) -> tuple[int, int]:
    return start // BLOCK[0], -(-stop // BLOCK[0])


def _row_pieces(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    rows, cols = spec.shape
    step = max(PIECE // max(cols, 1) // BLOCK[0], 1) * BLOCK[0]
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _byte_pieces(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    step = 4 * PIECE
    return ((start, min(start + step, spec.nbytes)) for start in range(0, spec.nbytes, step))
