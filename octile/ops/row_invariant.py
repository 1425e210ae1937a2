"""A GEMM in high precision whose rows do not depend on each other, for batch-invariant serving.

A library chooses another kernel for another number of rows, and so another order of sums: the same row then has other
last bits. Here every row is multiplied in the same form: on a CPU in blocks of 16 rows, the last one padded with zeros;
on a GPU in tiles of one size that sum over all of K in one order.

Source: He et al., "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025).
Shapes: B GEMMs, M rows, N and K of a weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import INPUT_DTYPES, check_device, check_input_dtype

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


@row_invariant_matmul_nt.register_kernel("cuda")
def _(a, b, out_dtype):
    from octile.kernels.triton import row_invariant as kernel  # late: a machine without a GPU has no Triton

    _check(a, b, out_dtype)
    return kernel.launch(a, b, out_dtype)


def _check(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> None:
    for name, t in (("a", a), ("b", b)):
        check_input_dtype(name, t)
    if out_dtype not in INPUT_DTYPES:
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}")
    if a.dim() != 3 or b.dim() != 3 or (a.shape[0], a.shape[2]) != (b.shape[0], b.shape[2]):
        raise ValueError(f"a and b must be [B, M, K] and [B, N, K], not {tuple(a.shape)} and {tuple(b.shape)}")
    check_device("a", a, "b", b)
