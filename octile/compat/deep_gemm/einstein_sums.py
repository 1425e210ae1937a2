"""DeepGEMM's Einstein sums, in BF16 and in FP8.

    expression         result                            dtypes of a and b
    "bhr,hdr->bhd"     d[b, h] = b[h] · a[b, h]          BF16, FP8
    "bhd,hdr->bhr"     d[b, h] = b[h]ᵀ · a[b, h]         BF16, FP8
    "bhd,bhr->hdr"     d[h] = Σ_b a[b, h] · b[b, h]ᵀ     FP8
    "bmk,bnk->mn"      d = Σ_b a[b] · b[b]ᵀ              BF16

The first three are one GEMM for each h: the projections of an attention layer's heads, and their weight gradients. In
BF16 they are a batched GEMM of cuBLAS. In FP8 they are a masked grouped GEMM, all of whose rows are in use; its result
is copied to d, in one more pass, unless d has the layout of the result. The last is one GEMM along b and k together,
for which a and b are copied once.
"""

import torch
from torch import Tensor

from octile.compat.deep_gemm.bf16 import gemm_nt
from octile.compat.deep_gemm.operands import Pair, Recipe, check_cd, check_pairs, checked_recipe, copy_c_to_d, operands
from octile.ops.grouped import masked_grouped_matmul_nt_out
from octile.ops.high_precision import without_reduced_precision_reduction
from octile.ops.matmul import without_autocast
from octile.ops.operator import check_tensor
from octile.validation import quoted

SUM_OF_GEMMS = "bmk,bnk->mn"
# By expression: the order of the dimensions in which a, b and d are [h, m, k], [h, n, k] and [h, m, n].
ORDERS = {
    "bhr,hdr->bhd": ((1, 0, 2), (0, 1, 2), (1, 0, 2)),
    "bhd,hdr->bhr": ((1, 0, 2), (0, 2, 1), (1, 0, 2)),
    "bhd,bhr->hdr": ((1, 2, 0), (1, 2, 0), (0, 1, 2)),
}
OF_BF16 = (SUM_OF_GEMMS, "bhr,hdr->bhd", "bhd,hdr->bhr")
OF_FP8 = tuple(ORDERS)


def einsum(expr: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, use_cublaslt: bool = False) -> None:
    """Write the Einstein sum of a and b, both bfloat16, to d; with accumulators in FP32.

    Args:
        expr: "bmk,bnk->mn", "bhr,hdr->bhd" or "bhd,hdr->bhr".
        a, b: bfloat16, shaped as expr says, in any strides.
        d: the output; bfloat16, for "bmk,bnk->mn" also float32.
        c: for "bmk,bnk->mn" added to the result in FP32; d itself, or a tensor of its shape and dtype.
        use_cublaslt: no effect where it is allowed, since cuBLAS computes the expressions of heads anyway.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: expr is another expression; a shape or a device does not fit; c or use_cublaslt is given with an
            expression that does not take it. d is unchanged then.
    """
    _check_expression(expr, OF_BF16)
    check_tensor("a", a)
    check_tensor("b", b)
    for name, t in (("a", a), ("b", b)):
        if t.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16, not {t.dtype}")
    shape = _shape_of_d(expr, a, b)
    check_cd(c, d, shape, a.device)
    if expr == SUM_OF_GEMMS:
        if use_cublaslt:
            raise ValueError(f"use_cublaslt must be False for {expr!r}")
        left, right = (t.transpose(0, 1).flatten(1) for t in (a, b))
        return gemm_nt(left, right, d, copy_c_to_d(d, c))
    if d.dtype != torch.bfloat16:
        raise TypeError(f"d must be bfloat16 for {expr!r}, not {d.dtype}")
    if c is not None:
        raise ValueError(f"c must be None for {expr!r}, not a tensor")
    left, right, out = _as_gemms(expr, a, b, d)
    with without_autocast(a.device), without_reduced_precision_reduction():
        if a.is_cuda:
            torch.bmm(left, right.mT, out=out)
        else:
            out.copy_(left.float() @ right.float().mT)


def fp8_einsum(expr: str, a: Pair, b: Pair, d: Tensor, c: Tensor | None = None, recipe: Recipe = (1, 128, 128)) -> None:
    """Write the Einstein sum of a and b, E4M3 with scales, to d, or c plus it.

    Args:
        expr: "bhr,hdr->bhd", "bhd,hdr->bhr" or "bhd,bhr->hdr".
        a, b: (data, scale), shaped as expr says, in any strides; a scale has the dimensions of its data, in blocks.
        d: the output, bfloat16 or float32.
        c: None, or added in FP32; d itself, or a tensor of its shape and dtype.
        recipe: (gran_m, gran_n, gran_k), the extents of blocks along a's rows, b's rows and what is contracted. The
            default is that of projections; weight gradients take (1, 1, 128).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: expr is another expression; a shape, a scale or a device does not fit. Messages about scales give
            shapes in the order (h, rows, contracted). d is unchanged then.
    """
    _check_expression(expr, OF_FP8)
    check_pairs(a, b)
    checked_recipe("recipe", recipe, "(gran_m, gran_n, gran_k)")
    shape = _shape_of_d(expr, a[0], b[0])
    for name, (_, scale) in (("a", a), ("b", b)):
        if scale.dim() != 3:
            raise ValueError(f"{name}'s scale must have 3 dimensions, not the shape {tuple(scale.shape)}")
    check_cd(c, d, shape, a[0].device)
    left_data, right_data, out = _as_gemms(expr, a[0], b[0], d)
    left_scale, right_scale, _ = _as_gemms(expr, a[1], b[1], d)
    left, right = operands((left_data, left_scale), (right_data, right_scale), recipe, None, None, dims=(3, 3))
    if out.numel() == 0:
        return
    is_written = c is None and out.is_contiguous()
    y = out if is_written else out.new_empty(out.shape, dtype=d.dtype if c is None else torch.float32)
    heads, rows, _ = out.shape
    all_rows = torch.full((heads,), rows, dtype=torch.int32, device=d.device)
    masked_grouped_matmul_nt_out(y, *left, *right, all_rows, rows)
    if c is not None:
        y += c.permute(ORDERS[expr][2])
    if not is_written:
        out.copy_(y)


def _check_expression(expr: str, supported: tuple[str, ...]) -> None:
    if not isinstance(expr, str):
        raise TypeError(f"expr must be a string, not {type(expr).__name__}")
    if expr not in supported:
        raise ValueError(f"expr must be {' or '.join(map(repr, supported))}, not {quoted(expr)}")


def _shape_of_d(expr: str, a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Check that a and b have the dimensions that expr names; return the shape of the result."""
    inputs, result = expr.split("->")
    sizes: dict[str, int] = {}
    for name, letters, t in zip("ab", inputs.split(","), (a, b), strict=True):
        if t.dim() != len(letters):
            raise ValueError(f"{name} must have the dimensions {letters!r} of {expr!r}, not the shape {tuple(t.shape)}")
        for letter, size in zip(letters, t.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"a and b must agree in {letter!r} of {expr!r}: a is {tuple(a.shape)}, b is {tuple(b.shape)}"
                )
    if a.device != b.device:
        raise ValueError(f"a and b must be on the same device, not on {a.device} and {b.device}")
    return tuple(sizes[letter] for letter in result)


def _as_gemms(expr: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return a, b and d, or their scales, as operands [h, m, k], [h, n, k] and [h, m, n]; views."""
    return tuple(t.permute(order) for t, order in zip(tensors, ORDERS[expr], strict=True))
