"""BF16 GEMMs under DeepGEMM's names, computed by cuBLASLt, and by `octile.ops.high_precision` where they are grouped.

Shapes are those of `dense`, `grouped` and `k_grouped`. Accumulators are FP32, and c is added in FP32.
"""

from collections.abc import Sequence
from itertools import accumulate as running_sum

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.compat.deep_gemm.grouped import check_layout, checked_masked, offsets, padding
from octile.compat.deep_gemm.k_grouped import check_values, checked_ks
from octile.compat.deep_gemm.operands import (
    check_cd,
    check_d,
    copy_c_to_d,
    transpose_one,
    transposed_form,
    with_given_shapes,
)
from octile.nn.fused.high_precision import nt
from octile.ops.matmul import check_sizes, without_autocast
from octile.ops.operator import check_tensor

SIDE_MULTIPLE = 16  # cuBLASLt's FP8 GEMMs need N and K to be multiples of this


def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "nk") -> None:
    """Compute d = a · bᵀ, or d = c + a · bᵀ: a[M, K] and b[N, K] bfloat16, d[M, N] bfloat16 or float32.

    Raises:
        TypeError, ValueError: an operand, c or d does not fit.
    """
    _check(a, b, torch.bfloat16, dims=(2, 2))
    check_cd(c, d, (a.shape[0], b.shape[0]), a.device)
    gemm_nt(a, b, d, copy_c_to_d(d, c))


bf16_gemm_nn = transposed_form(bf16_gemm_nt, "bf16_gemm_nn", "b")
"""`bf16_gemm_nt` with b given as [K, N]."""

bf16_gemm_tn = transposed_form(bf16_gemm_nt, "bf16_gemm_tn", "ab", compiled_dims="mn")
"""`bf16_gemm_nt` with a given as [K, M] and b as [K, N]."""

bf16_gemm_tt = transposed_form(bf16_gemm_nt, "bf16_gemm_tt", "a", compiled_dims="mn")
"""`bf16_gemm_nt` with a given as [K, M]."""


def cublaslt_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """Compute d = a · bᵀ with cuBLASLt, for comparison: a[M, K], b[N, K] both bfloat16, or E4M3 without scales.

    For E4M3 on a GPU, K and N must be multiples of 16.

    Raises:
        TypeError, ValueError: an operand, c or d does not fit.
    """
    check_tensor("a", a)
    _check(a, b, torch.float8_e4m3fn if a.dtype == torch.float8_e4m3fn else torch.bfloat16, dims=(2, 2))
    check_cd(c, d, (a.shape[0], b.shape[0]), a.device)
    if a.dtype == torch.bfloat16 or not a.is_cuda:
        return gemm_nt(a, b, d, copy_c_to_d(d, c))
    if a.shape[1] % SIDE_MULTIPLE or b.shape[0] % SIDE_MULTIPLE:
        raise ValueError(
            f"b must be [N, K] in multiples of {SIDE_MULTIPLE} where it is E4M3 on a GPU, not {tuple(b.shape)}"
        )
    y = _per_tensor(a, b, d.dtype if c is None else torch.float32)
    d.copy_(y if c is None else c.float() + y)


def _per_tensor(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    one, scaling = torch.ones((), device=a.device), F.ScalingType.TensorWise
    return F.scaled_mm(a.contiguous(), b.contiguous().mT, one, scaling, one, scaling, output_dtype=out_dtype)


cublaslt_gemm_nn = transposed_form(cublaslt_gemm_nt, "cublaslt_gemm_nn", "b")
"""`cublaslt_gemm_nt` with b given as [K, N]."""

cublaslt_gemm_tn = transposed_form(cublaslt_gemm_nt, "cublaslt_gemm_tn", "ab")
"""`cublaslt_gemm_nt` with a given as [K, M] and b as [K, N]."""

cublaslt_gemm_tt = transposed_form(cublaslt_gemm_nt, "cublaslt_gemm_tt", "a")
"""`cublaslt_gemm_nt` with a given as [K, M]."""


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Compute d[rows of g] = a[rows of g] · b[g]ᵀ: a[M, K], b[G, N, K] bfloat16, d[M, N] bfloat16 or float32.

    grouped_layout, use_psum_layout and ensure_zero_padding as in `m_grouped_fp8_gemm_nt_contiguous`.  The grouped GEMM
    cannot write into a given tensor, so its result is copied to d.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(a, b, torch.bfloat16, dims=(2, 3))
    (m, _), (groups, n, _) = a.shape, b.shape
    check_d(d, (m, n), a.device)
    check_layout(grouped_layout, m, groups, a.device, use_psum_layout)
    if m == 0 or groups == 0:
        return
    d.copy_(nt(a, b, offsets(grouped_layout, m, groups, use_psum_layout), d.dtype))
    if use_psum_layout and ensure_zero_padding:
        d.masked_fill_(padding(grouped_layout, m)[:, None], 0)


def m_grouped_bf16_gemm_nn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """Compute `m_grouped_bf16_gemm_nt_contiguous` with b given as [G, K, N]."""
    right = transpose_one("b", b)
    try:
        m_grouped_bf16_gemm_nt_contiguous(
            a, right, d, grouped_layout, compiled_dims, use_psum_layout, ensure_zero_padding
        )  # fmt: skip
    except ValueError as error:
        raise with_given_shapes(error, "b") from None


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
) -> None:
    """Compute d[g] = a[g] · b[g]ᵀ: a[G, M, K], b[G, N, K], d[G, M, N] bfloat16.

    torch has no masked GEMM, so all M rows are computed. Rows from masked_m[g] on are undefined.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(a, b, torch.bfloat16, dims=(3, 3))
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"a and b must have the same number of groups, not {a.shape[0]} and {b.shape[0]}")
    check_d(d, (*a.shape[:2], b.shape[1]), a.device)
    if d.dtype != torch.bfloat16:
        raise TypeError(f"d must be bfloat16, not {d.dtype}")
    checked_masked(masked_m, expected_m, a.shape[0], a.shape[1], a.device)
    with without_autocast(a.device):
        torch.bmm(a, b.mT, out=d)


def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks_cpu: Sequence[int],
    grouped_layout: Tensor,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """Compute d[g] = aᵀ · b over the tokens of group g, added to c[g]: a[K, m], b[K, n] bfloat16, d[G, m, n].

    Each group is a GEMM of its own, since `F.grouped_mm` rounds to BF16 before c could be added. ks_cpu gives the
    tokens of each group, any number. grouped_layout is compared with it on the CPU, and not read on a GPU.

    Raises:
        TypeError, ValueError: an argument does not fit; use_psum_layout, which has no sizes on the host.
    """
    for name, t in (("a", a), ("b", b)):
        check_tensor(name, t)
    if use_psum_layout:
        raise ValueError("use_psum_layout must be False for BF16: ks_cpu must give the groups")
    check_tensor("d", d)
    if d.dim() != 3:
        raise ValueError(f"d must be [G, m, n], not {tuple(d.shape)}")
    ks = checked_ks(ks_cpu, d.shape[0])
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != sum(ks) or b.shape[0] != sum(ks):
        raise ValueError(f"a and b must have {sum(ks)} tokens, not {tuple(a.shape)} and {tuple(b.shape)}")
    _check(a.mT, b.mT, torch.bfloat16, dims=(2, 2))
    check_cd(c, d, (len(ks), a.shape[1], b.shape[1]), a.device)
    check_tensor("grouped_layout", grouped_layout)
    check_sizes("grouped_layout", grouped_layout, len(ks), a.device)
    check_values(grouped_layout, ks, sum(ks), psum=False)
    accumulate = copy_c_to_d(d, c)
    for g, (k, end) in enumerate(zip(ks, running_sum(ks), strict=True)):
        gemm_nt(a[end - k : end].mT, b[end - k : end].mT, d[g], accumulate)


def gemm_nt(a: Tensor, b: Tensor, d: Tensor, accumulate: bool) -> None:
    """Write a · bᵀ to d, or add it to d in FP32."""
    with without_autocast(a.device):
        if not a.is_cuda:
            y = a.float() @ b.float().mT
            d.copy_(d.float() + y if accumulate else y)
        elif d.dtype == torch.bfloat16:
            torch.addmm(d, a, b.mT, out=d, beta=int(accumulate))
        elif accumulate:
            d.add_(torch.mm(a, b.mT, out_dtype=torch.float32))
        else:
            d.copy_(torch.mm(a, b.mT, out_dtype=torch.float32))


def _check(a: Tensor, b: Tensor, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    for name, t, ndim in (("a", a, dims[0]), ("b", b, dims[1])):
        check_tensor(name, t)
        if t.dtype != dtype:
            raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, not {t.dtype}")
        if t.dim() != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, not the shape {tuple(t.shape)}")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a and b must agree in K: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    if a.device != b.device:
        raise ValueError(f"a and b must be on the same device, not on {a.device} and {b.device}")
