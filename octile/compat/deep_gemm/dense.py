"""d = a · bᵀ in FP8, and the forms whose operands are given transposed. Shapes: a[M, K], b[N, K], d[M, N]."""

import torch
from torch import Tensor

from octile.compat.deep_gemm.operands import Block, Operand, Pair, Recipe, begin, both_transposed, check_cd, operands
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
    """d = a · bᵀ, or c + a · bᵀ: a[M, K], b[N, K], both E4M3 with scales, d[M, N] bfloat16 or float32.

    Args:
        a, b: (data, scale): scale float32 [⌈M/gran_m⌉, ⌈K/gran_k⌉] in any strides, or packed UE8M0.
        c: what the product is added to, in FP32; d itself or of its shape and dtype.
        recipe, recipe_a, recipe_b: see `operands`; the default is 1×128 for a and 128×128 for b.
        compiled_dims: no effect.
        disable_ue8m0_cast: of effect on sm_100 only, where scales are otherwise packed and must be powers of two.

    Raises:
        TypeError, ValueError: an operand, scale, recipe, c or d does not fit; nothing has been written then.
    """
    left, right = operands(a, b, recipe, recipe_a, recipe_b)
    check_cd(c, d, (left.data.shape[0], right.data.shape[0]), left.data.device)
    if multiplies_mx(d) and not disable_ue8m0_cast:
        product = packed_matmul_nt(*_packed(left), *_packed(right), d.dtype if c is None else torch.float32)
        d.copy_(product if c is None else c.float() + product)
    else:
        matmul_nt_out(d, *left, *right, begin(d, c))


def fp8_gemm_nn(
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
    """`fp8_gemm_nt` with b, and its scales, given as [K, N]."""
    fp8_gemm_nt(*both_transposed(a, b, "b"), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tn(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: Block | None = None,
    recipe_b: Block | None = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` with a given as [K, M] and b as [K, N], and their scales likewise."""
    fp8_gemm_nt(*both_transposed(a, b, "ab"), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tt(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: Block | None = None,
    recipe_b: Block | None = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` with a, and its scales, given as [K, M]."""
    fp8_gemm_nt(*both_transposed(a, b, "a"), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def multiplies_mx(t: Tensor) -> bool:
    """Whether t lies on a GPU whose tensor cores take UE8M0 scales themselves (sm_100)."""
    return t.is_cuda and torch.cuda.get_device_capability(t.device) == (10, 0)


def _packed(operand: Operand) -> tuple[Tensor, Tensor, int]:
    """data, packed scales, and how many values along K one stands for; a scale of many rows is written for each."""
    data, scale, (rows, cols) = operand
    if rows != 1:
        scale = scale.repeat_interleave(rows, dim=0)[: data.shape[0]]
    return data, pack_ue8m0(scale), cols
