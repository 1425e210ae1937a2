"""Dense FP8 GEMMs: d = a · bᵀ, and the forms that take transposed operands. Shapes: a[M, K], b[N, K], d[M, N]."""

import torch
from torch import Tensor

from octile.compat.deep_gemm.operands import (
    Block,
    ConvertedOperand,
    Pair,
    Recipe,
    check_cd,
    check_d,
    checked_integers,
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
    _gemm_nt(left, right, d, c, disable_ue8m0_cast)


def _gemm_nt(
    left: ConvertedOperand, right: ConvertedOperand, d: Tensor, c: Tensor | None, disable_ue8m0_cast: bool
) -> None:
    if has_mx_tensor_cores(d) and not disable_ue8m0_cast:
        y = packed_matmul_nt(*_packed(left), *_packed(right), d.dtype if c is None else torch.float32)
        d.copy_(y if c is None else c.float() + y)
    else:
        matmul_nt_out(d, *left, *right, copy_c_to_d(d, c))


fp8_gemm_nn = transposed_form(fp8_gemm_nt, "fp8_gemm_nn", "b")
"""`fp8_gemm_nt` with b, and its scale, given as [K, N]."""

fp8_gemm_tn = transposed_form(fp8_gemm_nt, "fp8_gemm_tn", "ab", compiled_dims="mn")
"""`fp8_gemm_nt` with a, and its scale, given as [K, M], and b, and its scale, as [K, N]."""

fp8_gemm_tt = transposed_form(fp8_gemm_nt, "fp8_gemm_tt", "a", compiled_dims="mn")
"""`fp8_gemm_nt` with a, and its scale, given as [K, M]."""


def fp8_gemm_nt_skip_head_mid(
    a: Pair,
    b: Pair,
    d: Tensor,
    head_splits: tuple[int, int, int],
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Compute a · bᵀ and write it to d with a gap in each head: the middle columns of a head keep what they hold.

    A head has left + right columns of a · bᵀ and left + mid + right columns of d. This is how keys that are projected
    without their rotated part are written to where that part already is. The product is written to a tensor of its
    own first and copied from there, in one more pass over d.

    Args:
        a, b, recipe, compiled_dims, disable_ue8m0_cast: as in `fp8_gemm_nt`: a[M, K] and b[N, K].
        d: the output [M, N / (left + right) · (left + mid + right)], bfloat16 or float32.
        head_splits: (left, mid, right), in columns.

    Raises:
        TypeError, ValueError: an argument does not fit; d is unchanged then.
    """
    left, right = operands(a, b, recipe, None, None)
    (m, _), (n, _) = left.data.shape, right.data.shape
    before, gap, after = _checked_splits(head_splits, n)
    heads = n // (before + after)
    check_d(d, (m, n + heads * gap), left.data.device)
    y = d.new_empty(m, n)
    _gemm_nt(left, right, y, None, disable_ue8m0_cast)
    head_first, _, head_last = d.unflatten(1, (heads, before + gap + after)).split((before, gap, after), 2)
    first, last = y.unflatten(1, (heads, before + after)).split((before, after), 2)
    head_first.copy_(first)
    head_last.copy_(last)


def _checked_splits(head_splits: tuple[int, int, int], n: int) -> tuple[int, int, int]:
    splits = checked_integers("head_splits", head_splits, "(left, mid, right) in integers")
    if len(splits) != 3 or min(splits) < 0 or splits[0] + splits[2] < 1:
        raise ValueError(
            f"head_splits must be (left, mid, right), at least 0 each and left + right at least 1, not {splits}"
        )
    before, gap, after = splits
    if n == 0 or n % (before + after):
        raise ValueError(f"head_splits must divide b's {n} rows into heads of left + right, not be {splits}")
    return before, gap, after


def has_mx_tensor_cores(t: Tensor) -> bool:
    """Whether t is on a GPU whose tensor cores apply UE8M0 scales themselves (sm_100)."""
    return t.is_cuda and torch.cuda.get_device_capability(t.device) == (10, 0)


def _packed(operand: ConvertedOperand) -> tuple[Tensor, Tensor, int]:
    """Return data, packed scales for every row, and the number of values along K that share a scale."""
    data, scale, (rows, cols) = operand
    if rows != 1:
        scale = scale.repeat_interleave(rows, dim=0)[: data.shape[0]]
    return data, pack_ue8m0(scale), cols
