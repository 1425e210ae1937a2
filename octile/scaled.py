"""ScaledTensor, a block-scaled tensor data · scale, and the functions that quantize, dequantize and multiply it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octile.formats import E4M3, E5M6, STORAGE_DTYPES, FloatFormat, IntFormat, by_name
from octile.ops import grouped as grouped_ops
from octile.ops import groups as group_ops
from octile.ops import matmul as matmul_ops
from octile.ops import quantize as quantize_ops
from octile.ops.operator import check_tensor
from octile.recipe import Extent, ScaleRule

_FORMATS = {dtype: by_name[name] for name, dtype in STORAGE_DTYPES.items()}


@dataclass(frozen=True, eq=False, repr=False)
class ScaledTensor:
    """Quantized matrices in 8 bits (or 12 bits: E5M6) with one FP32 scale per block; the values are data × scale.

    Attributes:
        data: float8_e4m3fn, float8_e5m2 or int8 [..., M, K]; E5M6 as uint8 [..., M, 3K/2].
        scale: float32 [..., ⌈M/R⌉, ⌈K/C⌉].
        block: extents (R, C) of a block.

    It is a dataclass and a pytree, so it passes through `torch.compile`, `pickle`, `torch.save` and `torch.load` with
    `weights_only=True`, and can be a value of a `state_dict`. Before `torch.load`, import the class
    (`from octile import ScaledTensor`): `import octile` alone does not register it.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int]

    @property
    def fmt(self) -> FloatFormat | IntFormat:
        """The number format of the data."""
        return _FORMATS[self.data.dtype]

    @property
    def shape(self) -> torch.Size:
        """The shape of the values, [..., M, K]; packed data have fewer columns than K."""
        return torch.Size((*self.data.shape[:-1], quantize_ops.columns(self.data)))

    @property
    def device(self) -> torch.device:
        """The device of data and scales."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales together."""
        return self.data.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ScaledTensor:
        """Copy the tensor to another device.

        Raises:
            TypeError: device is a dtype; `dequantize` returns the values in a dtype.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"device must be a device, not {device}: dequantize({device}) returns the values in it")
        data = self.data.to(device, non_blocking=non_blocking)
        return ScaledTensor(data, self.scale.to(device, non_blocking=non_blocking), self.block)

    def cpu(self) -> ScaledTensor:
        """Return the tensor with data and scales on the CPU."""
        return self.to("cpu")

    def cuda(self) -> ScaledTensor:
        """Return the tensor with data and scales on the current GPU."""
        return self.to("cuda")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values data × scale, [..., M, K]."""
        return dequantize(self, dtype)

    def requantize(self, block: tuple[Extent, Extent], scale: ScaleRule = "float32") -> ScaledTensor:
        """Quantize the values again in other blocks.

        If both scales are powers of two, values are only shifted: bits are lost only if a value falls below the normal
        range of its new block.
        """
        return quantize(self.dequantize(), block, self.fmt, scale)

    @property
    def mT(self) -> ScaledTensor:
        """The transposed tensor [..., K, M] in blocks of C×R, a view; exact for every block."""
        if self.fmt is E5M6:
            raise TypeError("packed E5M6 has no transposed view: dequantize it first")
        return ScaledTensor(self.data.mT, self.scale.mT, self.block[::-1])

    def transpose(self) -> ScaledTensor:
        """Return the transposed tensor [..., K, M] in blocks of the same shape R×C, as a GEMM along M needs it.

        This is exact for square blocks and for per-tensor scales. For tiles such as 1×128 the values are requantized,
        with a warning; `requantize` lets the caller choose the scales and does not warn.
        """
        rows, cols = self.block
        if rows == cols or (rows >= self.shape[-2] and cols >= self.shape[-1]):
            return self.mT
        warnings.warn(f"transposing {rows}×{cols} tiles requantizes the values", stacklevel=2)
        powers_of_2 = bool((self.scale.frexp().mantissa == 0.5).all())
        requantized = self.requantize((cols, rows), "power_of_2" if powers_of_2 else "float32")
        return ScaledTensor(requantized.mT.data.contiguous(), requantized.mT.scale, self.block)

    def state_dict(self, name: str = "weight") -> dict[str, Tensor]:
        """Return data and scale under the names of published FP8 checkpoints: `name` and `name_scale_inv`."""
        return {name: self.data, f"{name}_scale_inv": self.scale}

    @classmethod
    def from_state_dict(
        cls, state: dict[str, Tensor], name: str = "weight", block: tuple[int, int] = (128, 128)
    ) -> ScaledTensor:
        """Make a tensor from data and scale, the inverse of `state_dict`; published checkpoints have 128×128 blocks.

        Raises:
            KeyError: state lacks one of the two names.
            TypeError: the dtype of the data or of the scale is none of a quantized tensor's.
            ValueError: the shape of the scale does not match the data and the block.
        """
        data, scale = state[name], state[f"{name}_scale_inv"]
        quantize_ops.check_quantized(name, data, scale, *block)
        return cls(data, scale, block)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle stores: the data as bytes, since torch does not unpickle 8-bit floats (torch 2.13)."""
        return self.__dict__ | {"data": self.data.view(torch.uint8), "dtype": self.data.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtype = state.pop("dtype")
        self.__dict__.update(state, data=state["data"].view(dtype))

    def __repr__(self) -> str:
        rows, cols = self.block
        size = f"{self.nbytes / max(self.shape.numel(), 1):.3f} bytes a value"
        return f"ScaledTensor({list(self.shape)} {self.fmt.name}, {rows}×{cols} blocks, {size}, {self.device})"


def _from_leaves(leaves: Iterable[Any], block: Any) -> ScaledTensor:
    data, scale = leaves
    return ScaledTensor(data, scale, block)


pytree.register_pytree_node(
    ScaledTensor,
    lambda q: ([q.data, q.scale], q.block),
    _from_leaves,
    serialized_type_name="octile.ScaledTensor",
)
torch.serialization.add_safe_globals([ScaledTensor])


def quantize(
    x: Tensor,
    block: tuple[Extent, Extent] = (1, 128),
    fmt: FloatFormat | IntFormat = E4M3,
    scale: ScaleRule = "float32",
) -> ScaledTensor:
    """Quantize matrices block by block: scale = amax / fmt.max, data = x / scale rounded to nearest even.

    A block of zeros gives zeros and scale 1. A NaN or an Inf makes its whole block NaN. No other value becomes NaN, and
    none saturates: the amax of a block becomes the largest value of the format, or, with power-of-two scales, which are
    rounded up, at least half of it. Below fmt.max · 2⁻¹²⁶ it becomes less, since scales are at least 2⁻¹²⁶.

    Args:
        x: [..., M, K], float32, bfloat16 or float16.
        block: extents (rows, columns) of a block; None is the whole side, so (1, None) has one scale per row
            and (None, None) one per matrix. Blocks at the edge are smaller.
        fmt: E4M3, E5M2, INT8, or E5M6 (K even).
        scale: "float32", or "power_of_2": rounded up to a power of two.

    The result has no gradient; octile.nn.Linear trains in FP8.

    Raises:
        TypeError: x is not a tensor or has another dtype, block is not a pair of integers or None, or fmt is not a
            format.
        ValueError: x is not a matrix, or block, fmt or scale is not one of these.

    Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, not {type(x).__name__}")
    if x.dim() < 2:
        raise ValueError(f"x must be a matrix [..., M, K], not {tuple(x.shape)}")
    if scale not in ("float32", "power_of_2"):
        raise ValueError(f"scale must be 'float32' or 'power_of_2', not {scale!r}")
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise TypeError(f"block must be two extents (rows, columns), not {block!r}")
    if not all(extent is None or (isinstance(extent, int) and not isinstance(extent, bool)) for extent in block):
        raise TypeError(f"block's extents must be integers or None, not {block!r}")
    if not isinstance(fmt, FloatFormat | IntFormat):
        raise TypeError(f"fmt must be a format such as octile.E4M3, not {fmt!r}")
    extents = resolve(block, x.shape)
    data, scales = quantize_ops.quantize(x.detach(), *extents, fmt.name, scale == "power_of_2")
    return ScaledTensor(data, scales, extents)


def resolve(block: tuple[Extent, Extent], shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Return a block's extents for a matrix [..., M, K], with None replaced by the whole side."""
    rows, cols = block
    return max(shape[-2], 1) if rows is None else rows, max(shape[-1], 1) if cols is None else cols


def dequantize(q: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values data × scale, [..., M, K], multiplied in FP32 and rounded to dtype.

    Raises:
        TypeError: q is not a ScaledTensor, or dtype is not float32, bfloat16 or float16.
    """
    data, scale, block = _parts("q", q)
    if dtype not in quantize_ops.INPUT_DTYPES:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, not {dtype}")
    return quantize_ops.dequantize(data, scale, *block, dtype)


def matmul_nt(
    a: ScaledTensor,
    b: ScaledTensor,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Multiply a[M, K] · b[N, K]ᵀ → [M, N], summed in FP32.

    Args:
        a, b: E4M3, E5M2 or INT8 in any blocks (on a GPU: of a multiple of 32 columns, or all of K); 1×128 with 128×128
            and 1×128 with 1×128 are fast.
        out_dtype: bfloat16 (default) or float32; out's dtype if out is given.
        out: [M, N], written in place and returned.
        accumulate: add the result to out.

    Raises:
        TypeError, ValueError: an operand, dtype, shape or device does not match; accumulate without out.
    """
    if out is None:
        if accumulate:
            raise ValueError("accumulate=True needs out, the tensor to add to")
        out_dtype = _checked_out_dtype(torch.bfloat16 if out_dtype is None else out_dtype)
        return matmul_ops.matmul_nt(*_parts("a", a), *_parts("b", b), out_dtype)
    check_tensor("out", out)
    if out_dtype not in (None, out.dtype):
        raise TypeError(f"out_dtype is {out_dtype} but out is {out.dtype}")
    matmul_ops.matmul_nt_out(out, *_parts("a", a), *_parts("b", b), accumulate)
    return out


def grouped_matmul_nt(
    a: ScaledTensor, b: ScaledTensor, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiply a[rows of g] · b[g]ᵀ for each group g: a[T, K], b[G, N, K] → [T, N], summed in FP32.

    Groups need no alignment and may be empty; rows after the last group are zero. offs stays on the device.

    Args:
        a, b: as in `matmul_nt`.
        offs: int32 [G] on a's device, nondecreasing, the end of each group of rows.
        out_dtype: bfloat16 or float32.

    Raises:
        TypeError: a or b is not a ScaledTensor or has another format, offs is not int32, or out_dtype is another.
        ValueError: a shape or device does not match; or, on a CPU, offs decreases or exceeds T.
    """
    return grouped_ops.grouped_matmul_nt(*_parts("a", a), *_parts("b", b), offs, _checked_out_dtype(out_dtype))


def masked_grouped_matmul_nt(
    a: ScaledTensor,
    b: ScaledTensor,
    counts: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    expected_rows: int = 0,
) -> Tensor:
    """Multiply the first counts[g] rows of a[g] · b[g]ᵀ: a[G, M, K], b[G, N, K] → [G, M, N], summed in FP32.

    The other rows of the result are undefined.

    Args:
        a, b: as in `matmul_nt`.
        counts: int32 [G] on a's device, each from 0 to M; a GPU takes others for the nearest of these.
        out_dtype: bfloat16 or float32.
        expected_rows: rows that a group uses on average; 0: not known. The kernel is chosen on the host, which does not
            know the counts. It affects the speed, not the result.

    Raises:
        TypeError: a or b is not a ScaledTensor or has another format, counts is not int32, or out_dtype is another.
        ValueError: a shape or device does not match; or, on a CPU, a count is not from 0 to M.
    """
    out_dtype = _checked_out_dtype(out_dtype)
    return grouped_ops.masked_grouped_matmul_nt(*_parts("a", a), *_parts("b", b), counts, out_dtype, expected_rows)


def align_groups(x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Copy groups of rows so that each begins at a multiple of 128, with zeros after its rows: x[T, K] → [P, K].

    A tile of 128×1 then holds rows of one group. Otherwise an outlier of one group would take precision from the first
    and last rows of its neighbors in `grouped_wgrad`, and a NaN would reach them. Layers of octile do this themselves.

    Args:
        x: [T, K], any dtype.
        offs: int32 [G] on x's device, nondecreasing, the end of each group of rows.

    Returns:
        the rows [P, K], P being a multiple of 128 that follows from T and G alone; and the end of each group among
        them, int32 [G], multiples of 128. Rows after the last group follow the groups, and zeros follow these.

    Raises:
        TypeError: x is not a tensor, or offs is not int32.
        ValueError: x is not a matrix, or offs is not [G], is on another device, or, on a CPU, is not as above.
    """
    check_tensor("x", x)
    if x.dim() != 2:
        raise ValueError(f"x must be a matrix [T, K], not {tuple(x.shape)}")
    check_tensor("offs", offs)
    quantize_ops.check_device("x", x, "offs", offs)
    groups = group_ops.AlignedGroups(*group_ops.align_groups(offs, len(x)))
    return group_ops.take_tiles(x, groups.tiles), groups.offs


def grouped_wgrad(
    dy: ScaledTensor,
    x: ScaledTensor,
    offs: Tensor,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Multiply dw[g] = dy[rows of g]ᵀ · x[rows of g]: dy[T, N], x[T, K], both in blocks along T (128×1) → [G, N, K].

    Groups may end at any row. A block that extends over the end of a group mixes the magnitudes of two groups; with
    `align_groups`, before quantization, none does. The dw of an empty group is zero.

    Args:
        dy, x: E4M3, E5M2 or INT8.
        offs: int32 [G] on x's device, nondecreasing, the end of each group of rows.
        out_dtype: float32 (default) or bfloat16; out's dtype if out is given.
        out: [G, N, K], contiguous, written in place and returned.
        accumulate: add the result to out, in FP32.

    Raises:
        TypeError: dy or x is not a ScaledTensor or has another format, offs is not int32, out is not a tensor, or its
            dtype or out_dtype is another.
        ValueError: a shape or device does not match, out is not contiguous, or accumulate is given without out; or, on
            a CPU, offs decreases or exceeds T.
    """
    if out is None:
        if accumulate:
            raise ValueError("accumulate=True needs out, the tensor to add to")
        out_dtype = _checked_out_dtype(torch.float32 if out_dtype is None else out_dtype)
        return grouped_ops.grouped_wgrad(*_parts("dy", dy), *_parts("x", x), offs, out_dtype)
    check_tensor("out", out)
    if out_dtype not in (None, out.dtype):
        raise TypeError(f"out_dtype is {out_dtype} but out is {out.dtype}")
    grouped_ops.grouped_wgrad_out(out, *_parts("dy", dy), *_parts("x", x), offs, accumulate)
    return out


def _parts(name: str, q: ScaledTensor) -> tuple[Any, Any, Any]:
    if not isinstance(q, ScaledTensor):
        raise TypeError(f"{name} must be a ScaledTensor, as octile.quantize returns, not {type(q).__name__}")
    return q.data, q.scale, q.block


def _checked_out_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """Return out_dtype, after a check that it is a dtype: torch's dispatcher asks for an integer where it is not."""
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be bfloat16 or float32, not {out_dtype!r}")
    return out_dtype
