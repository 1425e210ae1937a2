"""GEMMs whose rows do not depend on each other: for batch-invariant serving, and for training that has its bits.

A library chooses another kernel for another number of rows, and so another order of sums: the same row then has other
last bits. Here every row is multiplied in the same form. In high precision that is on a CPU a kernel that adds the
products of each result one after the other, or without a compiler blocks of 16 rows, the last one padded with zeros. On
a GPU it is tiles that sum over all of K in one order. FP8 GEMMs on a GPU do not split K, and a result that is added to
another is rounded first, as where two operators do it.

Source: He et al., "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025).
Shapes: B GEMMs, M rows, N and K of a weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.kernels import cpu
from octile.kernels.cuda.gemm import bf16
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.kernels.row_invariant import CHUNK, WIDE
from octile.ops.accumulator import accumulator_for
from octile.ops.grouped import grouped_matmul_nt, grouped_matmul_nt_out
from octile.ops.matmul import Block, check_request, gemm_kernel, group_rows, matmul_nt, without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import INPUT_DTYPES, check_device, check_input_dtype, dequantize

ROWS = 16  # of a block on a CPU


@operator()
def row_invariant_matmul_nt(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply a · bᵀ: a[B, M, K], b[B, N, K] → [B, M, N]. A row has the same bits for any M and at any position.

    Args:
        a, b: float32, bfloat16 or float16, any strides.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        contiguous, summed in FP32 and rounded once.

    Raises:
        TypeError: a dtype is another one.
        ValueError: shapes or devices do not fit together.
    """
    _check(a, b, out_dtype)
    dtype = a.dtype if a.dtype == b.dtype == out_dtype else torch.float32  # torch's BF16 GEMM has BF16 results
    a_BMK = F.pad(a, (0, 0, 0, -a.shape[1] % ROWS)).to(dtype)
    b_BKN = b.to(dtype).mT
    out = a.new_empty(a.shape[0], a_BMK.shape[1], b.shape[1], dtype=out_dtype)
    with without_autocast(a.device):
        for start in range(0, a_BMK.shape[1], ROWS):
            out[:, start : start + ROWS] = torch.bmm(a_BMK[:, start : start + ROWS].contiguous(), b_BKN)
    return out[:, : a.shape[1]].contiguous()


@row_invariant_matmul_nt.register_fake
def _(a, b, out_dtype):
    return a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)


@row_invariant_matmul_nt.register_kernel("cpu")
def _(a, b, out_dtype):
    if cpu.library() is None:
        return row_invariant_matmul_nt.reference(a, b, out_dtype)
    _check(a, b, out_dtype)
    return cpu.multiply_rows(a, b).to(out_dtype)


@row_invariant_matmul_nt.register_flops
def _(a, b, out_dtype):
    return 2 * a.numel() * b.shape[1]


@row_invariant_matmul_nt.register_kernel("cuda")
def _(a, b, out_dtype):
    _check(a, b, out_dtype)
    out = a.new_empty(*a.shape[:2], b.shape[1], dtype=out_dtype)
    _launch_out(out, a, b)
    return out


@operator(writes=("out",))
def row_invariant_matmul_nt_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the result of `row_invariant_matmul_nt` to out [B, M, N], whose rows are contiguous.

    Raises:
        TypeError, ValueError: as there, or out has another shape, or strides within a row.
    """
    _check_out(out, a, b)
    out.copy_(row_invariant_matmul_nt(a, b, out.dtype))


@row_invariant_matmul_nt_out.register_fake
def _(out, a, b):
    return None


@row_invariant_matmul_nt_out.register_flops
def _(out, a, b):
    return 2 * a.numel() * b.shape[1]


@row_invariant_matmul_nt_out.register_kernel("cuda")
def _(out, a, b):
    _check_out(out, a, b)
    _launch_out(out, a, b)


def _launch_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the result by Triton's kernel, or where that does not divide K by Hopper's, which has the same bits."""
    from octile.kernels.triton import row_invariant as kernel  # late: a machine without a GPU has no Triton

    is_whole = b.shape[1] >= WIDE or b.shape[2] <= CHUNK
    if is_whole and out.numel() and bf16.why_unsupported(out, a, b) is None:
        bf16.launch(out, a, b)
    else:
        kernel.launch_out(out, a, b)


def _check(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> None:
    for name, t in (("a", a), ("b", b)):
        check_input_dtype(name, t)
    if out_dtype not in INPUT_DTYPES:
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}")
    if a.dim() != 3 or b.dim() != 3 or (a.shape[0], a.shape[2]) != (b.shape[0], b.shape[2]):
        raise ValueError(f"a and b must be [B, M, K] and [B, N, K], not {tuple(a.shape)} and {tuple(b.shape)}")
    check_device("a", a, "b", b)


def _check_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    _check(a, b, out.dtype)
    expected = a.shape[0], a.shape[1], b.shape[1]
    if out.shape != expected or (out.numel() and out.stride(2) != 1):
        raise ValueError(
            f"out must be {expected} with contiguous rows, not {tuple(out.shape)} with strides {out.stride()}"
        )
    check_device("a", a, "out", out)


def row_invariant_scaled_nt(
    a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block, offs: Tensor | None,
    out_dtype: torch.dtype, zero_rest: bool = True,
) -> Tensor:  # fmt: skip
    """Multiply as `matmul_nt`, or with offs as `grouped_matmul_nt`. A row has the same bits for any M and position.

    Rows after the last group are zero, or undefined without zero_rest.
    """
    operands = a, a_scale, a_block, b, b_scale, b_block
    if a.is_cpu and not cpu.can_multiply() and accumulator_for(a, b) is None:  # rows of the library depend on others
        a, b = dequantize(a, a_scale, *a_block, torch.float32), dequantize(b, b_scale, *b_block, torch.float32)
        return row_invariant_groups_nt(a, b, offs, out_dtype)
    if offs is None and (not a.is_cuda or accumulator_for(a, b)):  # whose rows are independent
        return matmul_nt(*operands, out_dtype)
    if offs is not None and zero_rest:
        return grouped_matmul_nt(*operands, offs, out_dtype)
    out = a.new_empty(len(a), b.shape[-2], dtype=out_dtype)
    if offs is None:
        row_invariant_scaled_nt_out(out, *operands, False)
    else:
        grouped_matmul_nt_out(out, *operands, offs)
    return out


@operator(writes=("out",))
def row_invariant_scaled_nt_out(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    accumulate: bool,
) -> None:
    """Write the result of `row_invariant_scaled_nt` without groups to out [M, N], bfloat16 or float32.

    With `accumulate` the result is rounded to out's dtype, and added to it.

    Raises:
        TypeError, ValueError: as `octile.ops.matmul.matmul_nt_out`.
    """
    check_request(_dense_request(out, a, a_scale, a_block, b, b_scale, b_block, accumulate))
    y = row_invariant_scaled_nt(a, a_scale, a_block, b, b_scale, b_block, None, out.dtype)
    out.add_(y) if accumulate else out.copy_(y)


@row_invariant_scaled_nt_out.register_fake
def _(out, a, a_scale, a_block, b, b_scale, b_block, accumulate):
    return None


@gemm_kernel(row_invariant_scaled_nt_out, on_cpu=False)
def _dense_request(out, a, a_scale, a_block, b, b_scale, b_block, accumulate):
    left, right = Operand(a, a_scale, a_block), Operand(b, b_scale, b_block)
    return GemmRequest(Schedule.DENSE, left, right, out.dtype, out, None, accumulate, row_invariant=True)


def row_invariant_groups_nt(a: Tensor, b: Tensor, offs: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply a [M, K] by a weight [N, K], or each group of its rows, which end at offs, by its own of [G, N, K].

    Rows after the last group are zero.
    """
    if offs is None:
        return row_invariant_matmul_nt(a[None], b[None], out_dtype)[0]
    out = a.new_zeros(len(a), b.shape[1], dtype=out_dtype)
    for g, rows in enumerate(group_rows(offs, len(a))):
        out[rows] = row_invariant_matmul_nt(a[rows][None], b[g][None], out_dtype)[0]
    return out
