"""Grouped GEMMs of a mixture of experts: every group of rows has its own weight.

    grouped   rows are sorted by group, and `offs[g]` is where group g ends; no padding, groups may be empty
    masked    a is [G, M, K], of which `counts[g]` rows are used: for decoding, where the host does not know the sizes
    wgrad     groups along the contracted dimension: dw[g] = dy[rows of g]ᵀ · x[rows of g]

Each has a variant `…_out` that writes to a tensor of the caller; that of wgrad can add to it.

Offsets and counts stay on the device. Shapes: T rows of all groups together, G groups, N and K sides of a weight.
"""

import torch
from torch import Tensor

from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.ops import accumulator
from octile.ops.accumulator import accumulator_for, replacements
from octile.ops.matmul import Block, check_request, gemm_kernel, group_rows, in_float32, nt_float32
from octile.ops.operator import operator
from octile.ops.scale_layouts import refuse_unless


@operator()
def grouped_matmul_nt(
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply a[rows of g] · b[g]ᵀ for each group g: a[T, K], b[G, N, K] → [T, N]; rows after the last group are zero.

    Args:
        a, a_scale, a_block: as in `matmul_nt`; blocks are counted from row 0, not from the first row of a group.
        b, b_scale, b_block: [G, N, K] with scale [G, ⌈N/R⌉, ⌈K/C⌉].
        offs: int32 [G], nondecreasing: group g has the rows from offs[g−1] to offs[g], exclusive.
        out_dtype: bfloat16 or float32.
    """
    check_request(_grouped_request(a, a_scale, a_block, b, b_scale, b_block, offs, out_dtype))
    return _grouped(a, a_scale, a_block, b, b_scale, b_block, offs).to(out_dtype)


def _grouped(a, a_scale, a_block, b, b_scale, b_block, offs) -> Tensor:
    groups = group_rows(offs, a.shape[0])
    if replacements and (gemm := accumulator_for(a, b)):
        return accumulator.grouped(gemm, a, a_scale, a_block, b, b_scale, b_block, groups)
    a_TK = in_float32(a, a_scale, a_block)
    b_GNK = in_float32(b, b_scale, b_block)
    out_TN = torch.empty(a.shape[0], b.shape[1], device=a.device)
    for g, rows in enumerate(groups):
        torch.mm(a_TK[rows], b_GNK[g].mT, out=out_TN[rows])
    out_TN[groups[-1].stop if groups else 0 :] = 0.0
    return out_TN


@grouped_matmul_nt.register_fake
def _(a, a_scale, a_block, b, b_scale, b_block, offs, out_dtype):
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


@gemm_kernel(grouped_matmul_nt)
def _grouped_request(a, a_scale, a_block, b, b_scale, b_block, offs, out_dtype):
    left, right = Operand(a, a_scale, a_block), Operand(b, b_scale, b_block)
    return GemmRequest(Schedule.GROUPED, left, right, out_dtype, None, offs)


@operator(writes=("out",))
def grouped_matmul_nt_out(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    offs: Tensor,
    alignment: int = 1,
) -> None:
    """Write the result of `grouped_matmul_nt` to out [T, N], contiguous, bfloat16 or float32.

    Rows after the last group are not written.

    Args:
        out: the output.
        a, a_scale, a_block, b, b_scale, b_block, offs: as in `grouped_matmul_nt`.
        alignment: number that the sizes of groups are multiples of, by which a GPU kernel is chosen. A result does not
            depend on it.
    """
    check_request(_grouped_request_out(out, a, a_scale, a_block, b, b_scale, b_block, offs))
    is_after = (torch.arange(a.shape[0], device=a.device) >= (offs[-1] if offs.numel() else 0))[:, None]
    out.copy_(torch.where(is_after, out, _grouped(a, a_scale, a_block, b, b_scale, b_block, offs).to(out.dtype)))


@grouped_matmul_nt_out.register_fake
def _(out, a, a_scale, a_block, b, b_scale, b_block, offs, alignment=1):
    return None


@gemm_kernel(grouped_matmul_nt_out)
def _grouped_request_out(out, a, a_scale, a_block, b, b_scale, b_block, offs, alignment=1):
    left, right = Operand(a, a_scale, a_block), Operand(b, b_scale, b_block)
    return GemmRequest(Schedule.GROUPED, left, right, out.dtype, out, offs, zero_rest=False, alignment=alignment)


@operator()
def masked_grouped_matmul_nt(
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    counts: Tensor,
    out_dtype: torch.dtype,
    expected_rows: int = 0,
) -> Tensor:
    """Multiply the first counts[g] rows of a[g] · b[g]ᵀ: a[G, M, K], b[G, N, K] → [G, M, N].

    The reference sets the other rows to zero; on a GPU they are undefined.

    Args:
        counts: int32 [G], each from 0 to M.
        expected_rows: rows expected in a group, by which a GPU kernel is chosen; 0: not known.
    """
    check_request(_masked_request(a, a_scale, a_block, b, b_scale, b_block, counts, out_dtype))
    _check_counts(counts, a.shape[1])
    result = _masked(a, a_scale, a_block, b, b_scale, b_block)
    return result.masked_fill_(_unused(a, counts), 0.0).to(out_dtype)


def _masked(a, a_scale, a_block, b, b_scale, b_block) -> Tensor:
    if replacements and (gemm := accumulator_for(a, b)):
        return accumulator.masked(gemm, a, a_scale, a_block, b, b_scale, b_block)
    return nt_float32(in_float32(a, a_scale, a_block), in_float32(b, b_scale, b_block))


def _check_counts(counts: Tensor, m: int) -> None:
    """Raise ValueError if a count is negative or more than m. GPU kernels clamp counts instead."""
    refuse_unless(((counts >= 0) & (counts <= m)).all(), f"counts must be from 0 to the {m} rows of a group")


def _unused(a: Tensor, counts: Tensor) -> Tensor:
    """Return which rows are not used: bool [G, M, 1]."""
    return (torch.arange(a.shape[1], device=a.device) >= counts[:, None])[..., None]


@masked_grouped_matmul_nt.register_fake
def _(a, a_scale, a_block, b, b_scale, b_block, counts, out_dtype, expected_rows=0):
    return a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)


@gemm_kernel(masked_grouped_matmul_nt, on_cpu=False)
def _masked_request(a, a_scale, a_block, b, b_scale, b_block, counts, out_dtype, expected_rows=0):
    left, right = Operand(a, a_scale, a_block), Operand(b, b_scale, b_block)
    return GemmRequest(Schedule.MASKED, left, right, out_dtype, None, counts, expected_rows=expected_rows)


@operator(writes=("out",))
def masked_grouped_matmul_nt_out(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    counts: Tensor,
    expected_rows: int = 0,
) -> None:
    """Write the result of `masked_grouped_matmul_nt` to out [G, M, N], contiguous, bfloat16 or float32.

    The reference does not write the other rows; on a GPU they are undefined.
    """
    check_request(_masked_request_out(out, a, a_scale, a_block, b, b_scale, b_block, counts))
    _check_counts(counts, a.shape[1])
    result = _masked(a, a_scale, a_block, b, b_scale, b_block)
    out.copy_(torch.where(_unused(a, counts), out, result.to(out.dtype)))


@masked_grouped_matmul_nt_out.register_fake
def _(out, a, a_scale, a_block, b, b_scale, b_block, counts, expected_rows=0):
    return None


@gemm_kernel(masked_grouped_matmul_nt_out, on_cpu=False)
def _masked_request_out(out, a, a_scale, a_block, b, b_scale, b_block, counts, expected_rows=0):
    left, right = Operand(a, a_scale, a_block), Operand(b, b_scale, b_block)
    return GemmRequest(Schedule.MASKED, left, right, out.dtype, out, counts, expected_rows=expected_rows)


@operator()
def grouped_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    dy_block: Block,
    x: Tensor,
    x_scale: Tensor,
    x_block: Block,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply dw[g] = dy[rows of g]ᵀ · x[rows of g]: dy[T, N], x[T, K] → [G, N, K]; an empty group gives zeros.

    Args:
        dy, x: quantized along the tokens, in blocks such as 128×1. A block may extend over the end of a group; those of
            groups that `octile.ops.groups` aligns do not.
        offs: int32 [G], as in `grouped_matmul_nt`.
    """
    check_request(_wgrad_request(dy, dy_scale, dy_block, x, x_scale, x_block, offs, out_dtype))
    return _wgrad(dy, dy_scale, dy_block, x, x_scale, x_block, offs).to(out_dtype)


def _wgrad(dy, dy_scale, dy_block, x, x_scale, x_block, offs) -> Tensor:
    groups = group_rows(offs, dy.shape[0])
    if replacements and (gemm := accumulator_for(dy, x)):
        return accumulator.wgrad(gemm, dy, dy_scale, dy_block, x, x_scale, x_block, groups)
    dy_TN = in_float32(dy, dy_scale, dy_block)
    x_TK = in_float32(x, x_scale, x_block)
    out_GNK = torch.empty(offs.numel(), dy.shape[1], x.shape[1], device=x.device)
    for g, rows in enumerate(groups):
        torch.mm(dy_TN[rows].mT, x_TK[rows], out=out_GNK[g])
    return out_GNK


@grouped_wgrad.register_fake
def _(dy, dy_scale, dy_block, x, x_scale, x_block, offs, out_dtype):
    return x.new_empty(offs.shape[0], dy.shape[1], x.shape[1], dtype=out_dtype)


@gemm_kernel(grouped_wgrad)
def _wgrad_request(dy, dy_scale, dy_block, x, x_scale, x_block, offs, out_dtype):
    left, right = Operand(dy, dy_scale, dy_block), Operand(x, x_scale, x_block)
    return GemmRequest(Schedule.ALONG_K, left, right, out_dtype, None, offs)


@operator(writes=("out",))
def grouped_wgrad_out(
    out: Tensor,
    dy: Tensor,
    dy_scale: Tensor,
    dy_block: Block,
    x: Tensor,
    x_scale: Tensor,
    x_block: Block,
    offs: Tensor,
    accumulate: bool,
) -> None:
    """Write the result of `grouped_wgrad` to out [G, N, K], contiguous, bfloat16 or float32.

    With `accumulate` the result is added to out, in FP32.
    """
    check_request(_wgrad_request_out(out, dy, dy_scale, dy_block, x, x_scale, x_block, offs, accumulate))
    dw = _wgrad(dy, dy_scale, dy_block, x, x_scale, x_block, offs)
    out.copy_(out.float() + dw if accumulate else dw)


@grouped_wgrad_out.register_fake
def _(out, dy, dy_scale, dy_block, x, x_scale, x_block, offs, accumulate):
    return None


@gemm_kernel(grouped_wgrad_out)
def _wgrad_request_out(out, dy, dy_scale, dy_block, x, x_scale, x_block, offs, accumulate):
    left, right = Operand(dy, dy_scale, dy_block), Operand(x, x_scale, x_block)
    return GemmRequest(Schedule.ALONG_K, left, right, out.dtype, out, offs, accumulate)
