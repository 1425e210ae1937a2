"""The conversion of one tensor, in chunks of rows, and the comparison of the result with its source.

A chunk begins at a row that is a multiple of 128, the height of a block, so it is quantized exactly as the whole
tensor would be. The result is read back from the disk and compared with its source:

    quantized     |x − data·scale| ≤ max(2⁻⁴·|x|, 2⁻¹⁰·scale)     half a unit in the last of E4M3's 4 significant bits;
                                                                 half the smallest subnormal below the normal range
    to BF16       |data·scale − x| ≤ max(2⁻⁸·|data·scale|, 2⁻¹³⁴) the same for BF16's 8 significant bits
    to FP32       equal
    cast          the bytes of the source, cast to BF16
    copied        the same bytes
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from octile.checkpoint.fp8_layout import (
    BLOCK,
    SCALE_SUFFIX,
    dequantize_weight,
    expand_scale,
    fp8_specs,
    is_fp8,
    is_scale,
    is_stored_in_fp8,
    quantize_weight,
    scale_name,
)
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TORCH_DTYPES, TensorFile, TensorFileWriter, TensorSpec
from octile.formats import E4M3

Target = Literal["fp8", "bf16", "float32"]
CHUNK = 1 << 20  # elements, unless 128 rows have more; a few FP32 copies of a chunk fit into a processor's cache
TOLERANCE = 1 + 1e-6  # the scale and the product with it are rounded to FP32


class Action(enum.Enum):
    """What a conversion does with a tensor."""

    QUANTIZE = "quantize"
    TO_BF16 = "dequantize to BF16"
    TO_FLOAT32 = "dequantize to FP32"
    CAST = "cast FP32 or FP16 to BF16"
    COPY = "copy"
    DROP = "drop"  # only the scale of a weight that is dequantized


DEQUANTIZED = {Action.TO_BF16: torch.bfloat16, Action.TO_FLOAT32: torch.float32}


def choose_action(name: str, specs: Mapping[str, TensorSpec], to: Target, keep: Sequence[str] = ()) -> Action:
    """Decide what happens to a tensor.

    Args:
        name: name of the tensor.
        specs: name → spec of all tensors of the checkpoint.
        to: the target format.
        keep: as in `is_stored_in_fp8`.
    """
    spec = specs[name]
    if to == "fp8":
        is_high_precision = spec.dtype in ("F32", "BF16", "F16")
        return Action.QUANTIZE if is_high_precision and is_stored_in_fp8(name, spec.shape, keep) else Action.COPY
    if is_fp8(spec):
        return Action.TO_BF16 if to == "bf16" else Action.TO_FLOAT32
    return Action.DROP if is_scale(name, specs) else Action.COPY


def specs_after(name: str, spec: TensorSpec, action: Action) -> dict[str, TensorSpec]:
    """Return the specs of the tensors that a tensor becomes."""
    match action:
        case Action.QUANTIZE:
            return fp8_specs(name, spec.shape)
        case Action.TO_BF16 | Action.TO_FLOAT32:
            return {name: TensorSpec.of(DEQUANTIZED[action], spec.shape)}
        case Action.CAST:
            return {name: TensorSpec.of(torch.bfloat16, spec.shape)}
        case Action.COPY:
            return {name: spec}
        case Action.DROP:
            return {}


def convert_tensor(name: str, action: Action, source: Shards, out: TensorFileWriter) -> None:
    """Convert a tensor and write the result, chunk by chunk.

    Raises:
        ValueError: the source is damaged, or holds NaN or Inf and is not only copied.
    """
    spec = source.specs[name]
    match action:
        case Action.QUANTIZE:
            for start, stop in _row_chunks(spec):
                q = quantize_weight(name, source.rows(name, start, stop))
                out.write(name, q.data, row=start)
                out.write(name + SCALE_SUFFIX, q.scale, row=start // BLOCK[0])
        case Action.TO_BF16 | Action.TO_FLOAT32:
            for start, stop in _row_chunks(spec):
                values = _dequantized_rows(source, name, start, stop)
                if not values.isfinite().all():
                    raise ValueError(f"{name} in {source.folder} holds NaN or Inf")
                out.write(name, values.to(DEQUANTIZED[action]), row=start)
        case Action.CAST:
            for start, stop in _byte_chunks(spec):
                out.write_bytes(name, _byte_in_bf16(spec, start), _cast_bytes(source, name, start, stop))
        case Action.COPY:
            for start, stop in _byte_chunks(spec):
                out.write_bytes(name, start, source.read_bytes(name, start, stop))


def max_error_of(name: str, action: Action, source: Shards, result: TensorFile) -> float:
    """Compare the result of a conversion, read from the disk, with its source.

    Returns:
        The largest error, relative to the largest magnitude that a value of its 128×128 block can have; 0 for a copy
        and a cast.

    Raises:
        RuntimeError: the result differs from the source by more than rounding.
    """
    spec, worst = source.specs[name], 0.0
    match action:
        case Action.QUANTIZE:
            for start, stop in _row_chunks(spec):
                exact = source.rows(name, start, stop).float()
                scale = result.rows(name + SCALE_SUFFIX, *_scale_rows(start, stop))
                values = dequantize_weight(result.rows(name, start, stop), scale, torch.float32)
                scale = expand_scale(scale, values)
                worst = max(worst, _compare(name, result, exact, values, 2.0**-4, 2.0**-10 * scale, scale))
        case Action.TO_BF16 | Action.TO_FLOAT32:
            relative, absolute = (2.0**-8, 2.0**-134) if action is Action.TO_BF16 else (0.0, 0.0)
            for start, stop in _row_chunks(spec):
                exact = _dequantized_rows(source, name, start, stop)
                values = result.rows(name, start, stop).float()
                scale = expand_scale(_scale_of_rows(source, name, start, stop), values)
                worst = max(worst, _compare(name, result, exact, values, relative, torch.tensor(absolute), scale))
        case Action.CAST:
            for start, stop in _byte_chunks(spec):
                found = result.read_bytes(name, _byte_in_bf16(spec, start), _byte_in_bf16(spec, stop))
                if not torch.equal(_cast_bytes(source, name, start, stop), found):
                    raise RuntimeError(f"{name} in {result.path} does not hold the numbers that were cast")
        case Action.COPY:
            for start, stop in _byte_chunks(spec):
                if not torch.equal(source.read_bytes(name, start, stop), result.read_bytes(name, start, stop)):
                    raise RuntimeError(f"{name} in {result.path} does not hold the bytes that were copied")
    return worst


def _compare(
    name: str, result: TensorFile, exact: Tensor, values: Tensor, relative: float, absolute: Tensor, scale: Tensor
) -> float:
    """Return the largest |values − exact| / (448 · scale). Works in place: values and exact are overwritten.

    Raises:
        RuntimeError: an error exceeds max(relative · |exact|, absolute).
    """
    error = values.sub_(exact).abs_()
    allowed = exact.abs_().mul_(relative).clamp_(min=absolute).mul_(TOLERANCE)
    if not bool((error <= allowed).all()):  # also for NaN
        raise RuntimeError(f"{name} in {result.path} differs from its source by more than rounding")
    return float(error.div_(scale).amax()) / E4M3.max if error.numel() else 0.0


def _dequantized_rows(source: Shards, name: str, start: int, stop: int) -> Tensor:
    """Dequantize rows of an FP8 weight to FP32. Its scale may be in another file."""
    return dequantize_weight(source.rows(name, start, stop), _scale_of_rows(source, name, start, stop), torch.float32)


def _scale_of_rows(source: Shards, name: str, start: int, stop: int) -> Tensor:
    """Read the scales of rows of an FP8 weight, float32 [⌈rows/128⌉, ⌈K/128⌉]."""
    return source.rows(scale_name(name, source.specs), *_scale_rows(start, stop)).float()


def _cast_bytes(source: Shards, name: str, start: int, stop: int) -> Tensor:
    """Read bytes of a tensor in FP32 or FP16, and return those of the same numbers in BF16."""
    numbers = source.read_bytes(name, start, stop).view(TORCH_DTYPES[source.specs[name].dtype])
    return numbers.to(torch.bfloat16).view(torch.uint8)


def _byte_in_bf16(spec: TensorSpec, byte: int) -> int:
    """Return the byte at which a number begins in BF16 that begins at `byte` in a tensor with this spec."""
    return byte // TORCH_DTYPES[spec.dtype].itemsize * torch.bfloat16.itemsize


def _scale_rows(start: int, stop: int) -> tuple[int, int]:
    return start // BLOCK[0], -(-stop // BLOCK[0])


def _row_chunks(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    rows, cols = spec.shape
    step = max(CHUNK // max(cols, 1) // BLOCK[0], 1) * BLOCK[0]
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _byte_chunks(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    step = 4 * CHUNK
    return ((start, min(start + step, spec.nbytes)) for start in range(0, spec.nbytes, step))
