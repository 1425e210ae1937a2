"""Dense FP8 GEMMs: d = a · bᵀ, and the forms that take transposed operands. Shapes: a[M, K], b[N, K], d[M, N]."""

import torch
from torch import Tensor

from octile.compat.deep_gemm.operands import (
    Block,
    ConvertedOperand,
    Pair,
    Recipe,
    check_cd,
    copy_c_to_d,
    operands,
    transposed_form,
)
from octile.ops.matmul import matmul_nt_out
from octile.ops.packed import packed_matmul_nt
from octile.ops.scale_layouts import pack_ue8m0


def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: Block | None = None,
    recipe_b: Block | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Compute d = a · bᵀ, or d = c + a · bᵀ: a[M, K] and b[N, K] E4M3 with scales, d[M, N] bfloat16 or float32.

    Args:
        a, b: (data, scale): scale float32 [⌈M/gran_m⌉, ⌈K/gran_k⌉] with any strides, or packed UE8M0.
        d: the output.
        c: None, or added in FP32; d itself, or a tensor of d's shape and dtype.
        recipe, recipe_a, recipe_b: see `operands`; the default is 1×128 for a and 128×128 for b.
        compiled_dims: no effect.
        disable_ue8m0_cast: effective on sm_100 only, where scales are otherwise packed and must be powers of two.

    Raises:
        TypeError, ValueError: an operand, scale, recipe, c or d does not fit; d is unchanged then.
    """
    left, right = operands(a, b, recipe, recipe_a, recipe_b)
    check_cd(c, d, (left.data.shape[0], right.data.shape[0]), left.data.device)
    if has_mx_tensor_cores(d) and not disable_ue8m0_cast:
        y = packed_matmul_nt(*_packed(left), *_packed(right), d.dtype if c is None else torch.float32)
        d.copy_(y if c is None else c.float() + y)
    else:
        matmul_nt_out(d, *left, *right, copy_c_to_d(d, c))


fp8_gemm_nn = transposed_form(fp8_gemm_nt, "fp8_gemm_nn", "b")
"""`fp8_gemm_nt` with b, and its scale, given as [K, N]."""

fp8_gemm_tn = transposed_form(fp8_gemm_nt, "fp8_gemm_tn", "ab", compiled_dims="mn")
"""`fp8_gemm_nt` with a given as [K, M] and b as [K, N], and their scales likewise."""

fp8_gemm_tt = transposed_form(fp8_gemm_nt, "fp8_gemm_tt", "a", compiled_dims="mn")
"""`fp8_gemm_nt` with a, and its scale, given as [K, M]."""


def has_mx_tensor_cores(t: Tensor) -> bool:
    """Whether t is on a GPU whose tensor cores apply UE8M0 scales themselves (sm_100)."""
    return t.is_cuda and torch.cuda.get_device_capability(t.device) == (10, 0)


def _packed(operand: ConvertedOperand) -> tuple[Tensor, Tensor, int]:
    """Return data, packed scales for every row, and the number of values along K that share a scale."""
    data, scale, (rows, cols) = operand
    if rows != 1:
        scale = scale.repeat_interleave(rows, dim=0)[: data.shape[0]]
    return data, pack_ue8m0(scale), cols
