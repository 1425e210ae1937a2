"""Products of block-scaled 8-bit matrices: y = x · wᵀ, summed in FP32.

On tensor cores the 8-bit numbers are multiplied as they are, and every 128 along K the partial sum is multiplied by
its scales and added to an FP32 sum.  The reference below is that sum with the scales multiplied in beforehand; the
order of FP32 additions is not part of the specification.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.  Shapes: M, N rows of x and w, K summed over, G groups, T rows
of all groups together.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from octile.kernels import backends
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.launch_cache import launch_cached
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.ops.accumulator import accumulator_for
from octile.ops.operator import operator
from octile.ops.quantize import check_scale, dequantize

Block = Sequence[int]
OPERAND_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
OUT_DTYPES = (torch.bfloat16, torch.float32)
DENSE = Schedule.DENSE


@operator()
def matmul_nt(
    a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block, out_dtype: torch.dtype
) -> Tensor:
    """a[M, K] · b[N, K]ᵀ → [M, N]. This form is the specification.

    Args:
        a, b: float8_e4m3fn, float8_e5m2 or int8, any strides.
        a_scale, b_scale: float32, one scale a block; blocks count from the first row and column.
        a_block, b_block: extents (rows, columns) of a block.
        out_dtype: bfloat16 or float32.

    Raises:
        TypeError: a dtype is none of these.
        ValueError: shapes, blocks or devices do not fit together.
    """
    _check_matmul(a, a_scale, a_block, b, b_scale, b_block, out_dtype)
    return _reference(a, a_scale, a_block, b, b_scale, b_block).to(out_dtype)


@matmul_nt.register_fake
def _(a, a_scale, a_block, b, b_scale, b_block, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@matmul_nt.register_kernel("cuda")
def _(a, a_scale, a_block, b, b_scale, b_block, out_dtype):
    if accumulator_for(a, b):
        return matmul_nt.reference(a, a_scale, a_block, b, b_scale, b_block, out_dtype)
    request = GemmRequest(DENSE, Operand(a, a_scale, a_block), Operand(b, b_scale, b_block), out_dtype)
    y = launch_cached(request)
    if y is None:
        _check_matmul(a, a_scale, a_block, b, b_scale, b_block, out_dtype)
        y = backends.run("gemm", request)
    return y


@operator(writes=("out",))
def matmul_nt_out(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    accumulate: bool,
) -> None:
    """`matmul_nt` into out [M, N] (bfloat16 or float32), or added to what out holds, summed in FP32."""
    _check_matmul(a, a_scale, a_block, b, b_scale, b_block, out.dtype, out)
    result = _reference(a, a_scale, a_block, b, b_scale, b_block)
    out.copy_(out.float() + result if accumulate else result)


@matmul_nt_out.register_fake
def _(out, a, a_scale, a_block, b, b_scale, b_block, accumulate):
    return None


@matmul_nt_out.register_kernel("cuda")
def _(out, a, a_scale, a_block, b, b_scale, b_block, accumulate):
    if accumulator_for(a, b):
        return matmul_nt_out.reference(out, a, a_scale, a_block, b, b_scale, b_block, accumulate)
    a_operand, b_operand = Operand(a, a_scale, a_block), Operand(b, b_scale, b_block)
    request = GemmRequest(DENSE, a_operand, b_operand, out.dtype, out, accumulate=accumulate)
    if launch_cached(request) is None:
        _check_matmul(a, a_scale, a_block, b, b_scale, b_block, out.dtype, out)
        backends.run("gemm", request)


def _reference(a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block) -> Tensor:
    if accumulate := accumulator_for(a, b):
        return accumulate(a, a_scale, a_block, b, b_scale, b_block)
    return nt_float32(in_float32(a, a_scale, a_block), in_float32(b, b_scale, b_block))


def in_float32(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """Return an operand's values in float32 and in the memory order of data: also of a transposed view."""
    if data.mT.is_contiguous():
        return dequantize(data.mT, scale.mT, block[1], block[0], torch.float32).mT
    return dequantize(data, scale, *block, torch.float32)


def nt_float32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a · bᵀ in FP32, also where autocast is on."""
    with without_autocast(a.device):
        return a @ b.mT


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which GEMMs run in the dtype of their operands, without autocast."""
    if device.type == "meta":  # the compiler of torch 2.11 cannot trace `torch.amp.is_autocast_available`
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _check_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> None:
    check_operand("a", a, a_scale, a_block, ndim=2)
    check_operand("b", b, b_scale, b_block, ndim=2)
    if out is not None:
        _check_out(out, a, b)
    check_pair(a, b, out_dtype)


def check_operand(name: str, data: Tensor, scale: Tensor, block: Block, ndim: int) -> None:
    """Refuse an operand of a GEMM that is not block-scaled as stated."""
    if data.dtype not in OPERAND_DTYPES:
        raise TypeError(f"{name} must be float8_e4m3fn, float8_e5m2 or int8, not {data.dtype}")
    if data.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not the shape {tuple(data.shape)}")
    if len(block) != 2:
        raise ValueError(f"{name}'s block must be two extents (rows, columns), not {tuple(block)}")
    check_scale(name, data, scale, *block)


def check_pair(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    names: tuple[str, str] = ("a", "b"),
    summed: tuple[str, int] = ("K", -1),
) -> None:
    """Refuse operands that cannot be multiplied, contracted over the named dimension of both."""
    (first, second), (side, dim) = names, summed
    if a.shape[dim] != b.shape[dim]:
        raise ValueError(
            f"{first} and {second} must agree in {side}: {first} is {tuple(a.shape)}, {second} is {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(f"{first} lies on {a.device} but {second} on {b.device}")
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16 or float32, not {out_dtype}")


def _check_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dtype not in OUT_DTYPES:
        raise TypeError(f"out must be bfloat16 or float32, not {out.dtype}")
    if out.shape != (*a.shape[:-1], b.shape[-2]):
        raise ValueError(f"out must be {(*a.shape[:-1], b.shape[-2])}, not {tuple(out.shape)}")
    if out.device != a.device:
        raise ValueError(f"out lies on {out.device}, but the operands on {a.device}")
    if overlaps(out):
        raise ValueError(f"out must not overlap itself, as {tuple(out.shape)} of strides {out.stride()} does")


def overlaps(matrix: Tensor) -> bool:
    """Return whether elements share memory, or rows lie within each other."""
    reach = 0
    for step, size in sorted(zip(matrix.stride(), matrix.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False
