"""GEMMs of block-scaled 8-bit matrices: y = a · bᵀ, summed in FP32.

Tensor cores multiply the encoded values. Every 128 along K the accumulator is multiplied by the scales and added to
FP32 totals (promotion). The reference multiplies by the scales first and then sums in FP32; the order of additions is
not part of the specification.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7. Shapes: M and N rows of a and b, K contracted.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from octile.formats import GEMM_FORMATS, STORAGE_DTYPES, TILE
from octile.kernels import backends, cpu
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.launch_cache import launch_cached
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.ops.accumulator import accumulator_for, replacements
from octile.ops.operator import Operator, operator
from octile.ops.quantize import check_scale, dequantize

Block = Sequence[int]
OPERAND_DTYPES = tuple(STORAGE_DTYPES[name] for name in GEMM_FORMATS)
OUT_DTYPES = (torch.bfloat16, torch.float32)
MakeRequest = Callable[..., GemmRequest]
# By schedule: the operands' names and dimensions, and the name of the sizes, for messages.
NAMES = {
    Schedule.DENSE: (("a", 2), ("b", 2), ""),
    Schedule.GROUPED: (("a", 2), ("b", 3), "offs"),
    Schedule.MASKED: (("a", 3), ("b", 3), "counts"),
    Schedule.ALONG_K: (("dy", 2), ("x", 2), "offs"),
}


def gemm_kernel(op: Operator, on_cpu: bool = True) -> Callable[[MakeRequest], MakeRequest]:
    """Decorate the function that makes the `GemmRequest` of an operator's arguments; on a GPU the request is launched.

    torch's counter of FLOPs counts it.

    A request whose key was launched before is launched again at once. Others are checked, and `backends.run` finds a
    backend for them. On a CPU `kernels.cpu` computes what it can, and the reference the rest.

    Args:
        op: the operator.
        on_cpu: whether `kernels.cpu` has a kernel for it.
    """

    def register(make_request: MakeRequest) -> MakeRequest:
        @op.register_kernel("cuda")
        def launch(*args: Any) -> Tensor | None:
            request = make_request(*args)
            if replacements and accumulator_for(request.a.data, request.b.data):
                return op.reference(*args)
            result = launch_cached(request)
            if result is None:
                check_request(request)
                result = backends.run("gemm", request)
            return result if request.out is None else None

        def compute(*args: Any) -> Tensor | None:
            request = make_request(*args)
            if replacements and accumulator_for(request.a.data, request.b.data):
                return op.reference(*args)
            check_request(request)
            if cpu.why_not_multiply(request):
                return op.reference(*args)
            groups = [] if request.sizes is None else group_rows(request.sizes, request.a.data.shape[0])
            if request.schedule is Schedule.ALONG_K and any(rows.start % TILE[1] for rows in groups):
                return op.reference(*args)
            result = cpu.multiply(request)
            return result if request.out is None else None

        if on_cpu:
            op.register_kernel("cpu")(compute)
        op.register_flops(lambda *args, **kwargs: make_request(*args, **kwargs).flops())
        return make_request

    return register


@operator()
def matmul_nt(
    a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block, out_dtype: torch.dtype
) -> Tensor:
    """Multiply a[M, K] · b[N, K]ᵀ → [M, N].

    Args:
        a, b: float8_e4m3fn, float8_e5m2 or int8, any strides.
        a_scale, b_scale: float32, one scale per block; blocks are counted from the first row and column.
        a_block, b_block: extents (rows, columns) of a block.
        out_dtype: bfloat16 or float32.

    Raises:
        TypeError: a dtype is not one of these.
        ValueError: shapes, blocks or devices do not match.
    """
    check_request(_dense_request(a, a_scale, a_block, b, b_scale, b_block, out_dtype))
    return _reference(a, a_scale, a_block, b, b_scale, b_block).to(out_dtype)


@matmul_nt.register_fake
def _(a, a_scale, a_block, b, b_scale, b_block, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@gemm_kernel(matmul_nt)
def _dense_request(a, a_scale, a_block, b, b_scale, b_block, out_dtype):
    return GemmRequest(Schedule.DENSE, Operand(a, a_scale, a_block), Operand(b, b_scale, b_block), out_dtype)


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
    """Write the result of `matmul_nt` to out [M, N], bfloat16 or float32; with `accumulate` add it to out, in FP32."""
    check_request(_dense_request_out(out, a, a_scale, a_block, b, b_scale, b_block, accumulate))
    result = _reference(a, a_scale, a_block, b, b_scale, b_block)
    out.copy_(out.float() + result if accumulate else result)


@matmul_nt_out.register_fake
def _(out, a, a_scale, a_block, b, b_scale, b_block, accumulate):
    return None


@gemm_kernel(matmul_nt_out)
def _dense_request_out(out, a, a_scale, a_block, b, b_scale, b_block, accumulate):
    left, right = Operand(a, a_scale, a_block), Operand(b, b_scale, b_block)
    return GemmRequest(Schedule.DENSE, left, right, out.dtype, out, None, accumulate)


def _reference(a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block) -> Tensor:
    if replacements and (accumulate := accumulator_for(a, b)):
        return accumulate(a, a_scale, a_block, b, b_scale, b_block)
    return nt_float32(in_float32(a, a_scale, a_block), in_float32(b, b_scale, b_block))


def in_float32(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """Dequantize an operand to float32, in the memory order of data; data may be a transposed view."""
    if data.stride(-1) != 1 and data.stride(-2) == 1:
        return dequantize(data.mT, scale.mT, block[1], block[0], torch.float32).mT
    return dequantize(data, scale, *block, torch.float32)


def nt_float32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a · bᵀ in FP32, also under autocast."""
    with without_autocast(a.device):
        return a @ b.mT


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which GEMMs run in the dtype of their operands, without autocast."""
    if device.type == "meta":  # the compiler of torch 2.11 cannot trace `torch.amp.is_autocast_available`
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def check_request(request: GemmRequest) -> None:
    """Raise TypeError or ValueError if a GEMM is not possible; the message names the operator's arguments."""
    schedule, out, sizes = request.schedule, request.out, request.sizes
    (first, first_ndim), (second, second_ndim), sizes_name = NAMES[schedule]
    a, b = request.a.data, request.b.data
    check_operand(first, *request.a.parts(), first_ndim)
    check_operand(second, *request.b.parts(), second_ndim)
    if sizes is not None:
        check_sizes(sizes_name, sizes, sizes.numel() if schedule is Schedule.ALONG_K else b.shape[0], a.device)
    if out is not None:
        _check_out(out, request)
    contracted = ("T", 0) if schedule is Schedule.ALONG_K else ("K", -1)
    check_pair(a, b, request.out_dtype, (first, second), contracted)
    if schedule is Schedule.MASKED and a.shape[0] != b.shape[0]:
        raise ValueError(f"a and b must have the same number of groups: a is {tuple(a.shape)}, b is {tuple(b.shape)}")


def check_operand(name: str, data: Tensor, scale: Tensor, block: Block, ndim: int) -> None:
    """Raise TypeError or ValueError if data, scale and block are not an operand of `ndim` dimensions."""
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
    contracted: tuple[str, int] = ("K", -1),
) -> None:
    """Raise TypeError or ValueError if two operands cannot be multiplied.

    Args:
        names: the names of both operands, for messages.
        contracted: name and index of the dimension over which both are contracted.
    """
    (first, second), (side, dim) = names, contracted
    if a.shape[dim] != b.shape[dim]:
        raise ValueError(
            f"{first} and {second} must agree in {side}: {first} is {tuple(a.shape)}, {second} is {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(f"{first} is on {a.device} but {second} on {b.device}")
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16 or float32, not {out_dtype}")


def _check_out(out: Tensor, request: GemmRequest) -> None:
    shape, device = request.out_shape(), request.a.data.device
    if out.dtype not in OUT_DTYPES:
        raise TypeError(f"out must be bfloat16 or float32, not {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out must be {shape}, not {tuple(out.shape)}")
    if out.device != device:
        raise ValueError(f"out is on {out.device}, but the operands are on {device}")
    if request.schedule is not Schedule.DENSE and not out.is_contiguous():
        raise ValueError(f"out must be contiguous, not have the strides {out.stride()}")
    if request.schedule is Schedule.DENSE and has_overlap(out):
        raise ValueError(f"out must not overlap itself, as {tuple(out.shape)} with strides {out.stride()} does")


def check_sizes(name: str, sizes: Tensor, groups: int, device: torch.device) -> None:
    """Raise TypeError or ValueError if offsets or counts are not int32 [groups] on the device."""
    if sizes.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, not {sizes.dtype}")
    if tuple(sizes.shape) != (groups,):
        raise ValueError(f"{name} must be [{groups}], one for each group, not {tuple(sizes.shape)}")
    if sizes.device != device:
        raise ValueError(f"{name} is on {sizes.device}, but the operands are on {device}")


def group_rows(offs: Tensor, t: int) -> list[slice]:
    """Return the rows of each group; raise ValueError if offsets decrease or exceed t, which kernels do not check."""
    bounds = [0, *offs.tolist()]
    if bounds != sorted(bounds) or bounds[-1] > t:
        raise ValueError(f"offs must be nondecreasing from 0 to at most {t}, the number of rows, not {bounds[1:]}")
    return [slice(start, end) for start, end in pairwise(bounds)]


def has_overlap(matrix: Tensor) -> bool:
    """Return whether elements of a matrix share memory, or its rows are interleaved in memory."""
    reach = 0
    for step, size in sorted(zip(matrix.stride(), matrix.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False
