"""GEMMs in high precision, with which the 8-bit ones are compared: how torch sums them, and the grouped ones.

Grouped GEMMs multiply FP32, BF16 or FP16 operands and sum in FP32. The result is in the operands' dtype or in FP32, so
that a weight's gradient need not be rounded to BF16. torch's `grouped_mm` has no FP32 result of BF16 operands, and is
slow with few rows in a group: on a GPU there are Triton kernels for both. They are operators so that torch.compile does
not trace them: torch 2.11 would choose strides for the operands that its grouped GEMM does not support, which aborts
the process.

Shapes: T rows of all groups together, G groups, N and K of a weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.matmul import without_autocast
from octile.ops.operator import operator

REDUCED_PRECISION = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def without_reduced_precision_reduction() -> Iterator[None]:
    """Have cuBLAS add the split-K partials of BF16 and FP16 GEMMs in FP32 inside; restore torch's settings after it.

    By default torch lets it add them in BF16 or FP16, so that such a GEMM rounds more often than one in FP8 does.

    Source: https://pytorch.org/docs/stable/notes/numerical_accuracy.html
    """
    settings = torch.backends.cuda.matmul
    before = {name: getattr(settings, name) for name in REDUCED_PRECISION}
    # whether split-K is allowed at all is one half of the same setting
    split_k = {name: getattr(settings, f"{name}_split_k", True) for name in REDUCED_PRECISION}

    def set_all(values: dict[str, bool]) -> None:
        for name, value in values.items():
            setattr(settings, name, value if split_k[name] else (value, False))

    set_all(dict.fromkeys(before, False))
    try:
        yield
    finally:
        set_all(before)


@operator()
def high_precision_grouped_nt(
    a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype, expected_rows: int = 0
) -> Tensor:
    """Multiply the rows of group g by b[g]ᵀ; rows past the last group are zero.

    Args:
        a: [T, K], a floating-point dtype, any strides.
        b: [G, N, K] in a's dtype, any strides.
        offs: int32 [G], non-decreasing: group g has the rows offs[g−1] … offs[g] − 1.
        out_dtype: a's dtype, or float32.
        expected_rows: rows expected in a group, by which a GPU's kernel is chosen: with one number the bits of a row of
            an FP32 result do not depend on the others; 0: the mean.

    Returns:
        [T, N] in out_dtype, summed in FP32 and rounded once.

    Raises:
        TypeError: out_dtype is another dtype.
    """
    _check_out_dtype(a, out_dtype)
    past = torch.arange(a.shape[0], device=a.device) >= offs[-1]
    return _grouped_nt(a.to(out_dtype), b.to(out_dtype), offs).masked_fill_(past[:, None], 0)


def _grouped_nt(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiply as `high_precision_grouped_nt`, in the dtype of the operands; rows past the last group are undefined."""
    with without_autocast(a.device):
        return F.grouped_mm(_aligned(a).contiguous(), _aligned(b, rows=True).mT, offs=offs)[
            :, : b.shape[1]
        ].contiguous()


@high_precision_grouped_nt.register_fake
def _(a, b, offs, out_dtype, expected_rows=0):
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


@high_precision_grouped_nt.register_flops
def _(a, b, offs, out_dtype, expected_rows=0):
    return 2 * a.numel() * b.shape[1]


@high_precision_grouped_nt.register_kernel("cuda")
def _(a, b, offs, out_dtype, expected_rows=0):
    from octile.kernels.triton import high_precision as kernel  # late: a machine without a GPU has no Triton

    _check_out_dtype(a, out_dtype)
    has_few_rows = (expected_rows or kernel.mean_rows(a, b)) <= kernel.FEW_ROWS and a.dtype != torch.float32
    if out_dtype != a.dtype or has_few_rows or a.dtype == torch.float16:  # of which torch's waits for the host
        return kernel.launch_nt(a, b, offs, expected_rows, out_dtype)
    y = _grouped_nt(a, b, offs)
    kernel.zero_rest(y, offs)
    return y


@operator()
def high_precision_grouped_tn(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute aᵀ · b over the rows of each group.

    Args:
        a: [T, N], a floating-point dtype, any strides.
        b: [T, K] in a's dtype, any strides.
        offs, out_dtype: as in `high_precision_grouped_nt`.

    Returns:
        [G, N, K] in out_dtype, summed in FP32 and rounded once.

    Raises:
        TypeError: out_dtype is another dtype.
    """
    _check_out_dtype(a, out_dtype)
    a, b = a.to(out_dtype), b.to(out_dtype)
    with without_autocast(a.device):
        dw = F.grouped_mm(_aligned(a).contiguous().mT, _aligned(b).contiguous(), offs=offs)
        return dw[:, : a.shape[1], : b.shape[1]].contiguous()


@high_precision_grouped_tn.register_fake
def _(a, b, offs, out_dtype):
    return a.new_empty(offs.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)


@high_precision_grouped_tn.register_flops
def _(a, b, offs, out_dtype):
    return 2 * a.numel() * b.shape[1]


@high_precision_grouped_tn.register_kernel("cuda")
def _(a, b, offs, out_dtype):
    if out_dtype == a.dtype != torch.float16:  # of which torch's waits for the host
        return high_precision_grouped_tn.reference(a, b, offs, out_dtype)
    from octile.kernels.triton import high_precision as kernel

    _check_out_dtype(a, out_dtype)
    return kernel.launch_tn(a, b, offs).to(out_dtype)


def _check_out_dtype(a: Tensor, out_dtype: torch.dtype) -> None:
    if out_dtype not in (a.dtype, torch.float32):
        raise TypeError(f"out_dtype must be float32, or {a.dtype} as a, not {out_dtype}")


def _aligned(t: Tensor, rows: bool = False) -> Tensor:
    """Pad t with zeros to a multiple of 8 columns (and rows): grouped_mm needs strides of whole 16 bytes."""
    missing = (0, -t.shape[-1] % 8, 0, -t.shape[-2] % 8 if rows else 0)
    return F.pad(t, missing) if any(missing) else t
