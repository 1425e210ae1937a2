"""Grouped FP8 GEMMs, in which every group of rows (expert) has its own b. Shapes: a[M, K], b[G, N, K].

One of three tensors on the device says which rows belong to a group:

    m_indices      int32 [M], the group of each row, −1 for padding; groups in ascending order
    psum           int32 [G], the end of each group; the next group begins at the next multiple of the alignment
    masked_m       int32 [G], how many of the first rows of a[G, M, K] are in use

octile's operator takes the ends of groups that follow one another without gaps, so padding belongs to the group before
it: its rows are computed and never read, which up to the end of a tile costs nothing.
"""

from typing import TypeVar

import torch
from torch import Tensor

from octile.compat.deep_gemm.operands import (
    Block,
    Pair,
    Recipe,
    check_d,
    checked_integer,
    operands,
    transpose_pairs,
    with_given_shapes,
)
from octile.compat.deep_gemm.settings import get_mk_alignment_for_contiguous_layout
from octile.ops.grouped import grouped_matmul_nt_out, masked_grouped_matmul_nt_out
from octile.ops.matmul import check_sizes
from octile.ops.operator import check_tensor
from octile.ops.scale_layouts import refuse_unless

Rows = TypeVar("Rows", int, Tensor)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    recipe_a: Block | None = None,
    recipe_b: Block | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Compute d[rows of g] = a[rows of g] · b[g]ᵀ: a[M, K], b[G, N, K], d[M, N] bfloat16 or float32, contiguous.

    Args:
        a, b, recipe, recipe_a, recipe_b: as in `fp8_gemm_nt`.
        d: the output.
        grouped_layout: m_indices, or psum with use_psum_layout; see above.
        ensure_zero_padding: with use_psum_layout, also write zeros to the rows between groups, in another pass over d.
        compiled_dims, disable_ue8m0_cast, expected_m_for_psum_layout: no effect.

    Raises:
        TypeError, ValueError: an argument does not fit. The values of grouped_layout are checked on the CPU. On a GPU,
            a device assertion fails where m_indices descend or name no group, and psum is not checked.
    """
    left, right = operands(a, b, recipe, recipe_a, recipe_b, dims=(2, 3))
    (m, _), (groups, n, _) = left.data.shape, right.data.shape
    check_d(d, (m, n), left.data.device, contiguous=True)
    check_layout(grouped_layout, m, groups, left.data.device, use_psum_layout)
    if m == 0 or groups == 0:
        return
    offs = offsets(grouped_layout, m, groups, use_psum_layout)
    grouped_matmul_nt_out(d, *left, *right, offs, get_mk_alignment_for_contiguous_layout())
    if use_psum_layout and ensure_zero_padding:
        d.masked_fill_(padding(grouped_layout, m)[:, None], 0)


def m_grouped_fp8_gemm_nn_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    recipe_a: Block | None = None,
    recipe_b: Block | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """Compute `m_grouped_fp8_gemm_nt_contiguous` with b, and its scales, given as [G, K, N]."""
    left, right = transpose_pairs(a, b, "b")
    try:
        m_grouped_fp8_gemm_nt_contiguous(
            left,
            right,
            d,
            grouped_layout,
            recipe,
            recipe_a,
            recipe_b,
            compiled_dims,
            disable_ue8m0_cast,
            use_psum_layout,
            ensure_zero_padding,
        )
    except ValueError as error:
        raise with_given_shapes(error, "b") from None


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    recipe_a: Block | None = None,
    recipe_b: Block | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Compute d[g] = a[g] · b[g]ᵀ for the first masked_m[g] rows: a[G, M, K], b[G, N, K], d[G, M, N], contiguous.

    The other rows of d are undefined afterwards.

    Args:
        a, b, recipe, recipe_a, recipe_b: as in `fp8_gemm_nt`.
        d: the output, bfloat16 or float32.
        masked_m: the number of rows in use of each group.
        expected_m: the number that is expected, by which the kernel is chosen.
        compiled_dims, disable_ue8m0_cast: no effect.

    Raises:
        TypeError, ValueError: an argument does not fit. The values of masked_m are checked on the CPU only.
    """
    left, right = operands(a, b, recipe, recipe_a, recipe_b, dims=(3, 3))
    (groups, m, _), (groups_b, n, _) = left.data.shape, right.data.shape
    if groups != groups_b:
        raise ValueError(f"a and b must have the same number of groups, not {groups} and {groups_b}")
    check_d(d, (groups, m, n), left.data.device, contiguous=True)
    expected_m = checked_masked(masked_m, expected_m, groups, m, left.data.device)
    masked_grouped_matmul_nt_out(d, *left, *right, masked_m, expected_m)


def checked_masked(masked_m: Tensor, expected_m: int, groups: int, m: int, device: torch.device) -> int:
    """Check that masked_m has one int32 per group, and on the CPU that its values are from 0 to m; return expected_m.

    Raises:
        TypeError, ValueError: masked_m or expected_m does not fit.
    """
    check_tensor("masked_m", masked_m)
    check_sizes("masked_m", masked_m, groups, device)
    expected_m = checked_integer("expected_m", expected_m)
    if expected_m < 0:
        raise ValueError(f"expected_m must be at least 0, not {expected_m}")
    if device.type == "cpu" and not all(0 <= rows <= m for rows in masked_m.tolist()):
        raise ValueError(f"masked_m must be from 0 to the {m} rows of a group, not {masked_m.tolist()}")
    return expected_m


def check_layout(grouped_layout: Tensor, m: int, groups: int, device: torch.device, psum: bool) -> None:
    """Check that grouped_layout has one int32 per row (or per group with psum), and on the CPU its values.

    Raises:
        TypeError, ValueError: it does not fit.
    """
    check_tensor("grouped_layout", grouped_layout)
    if grouped_layout.dtype != torch.int32:
        raise TypeError(f"grouped_layout must be int32, not {grouped_layout.dtype}")
    if tuple(grouped_layout.shape) != (groups if psum else m,):
        what = f"[{groups}], one for each group" if psum else f"[{m}], one for each row"
        raise ValueError(f"grouped_layout must be {what}, not {tuple(grouped_layout.shape)}")
    if grouped_layout.device != device:
        raise ValueError(f"grouped_layout must be on {device} as the operands are, not on {grouped_layout.device}")
    if psum:
        check_ends(grouped_layout, m)
    elif device.type == "cpu":
        _check_indices(grouped_layout.tolist(), groups)


def _check_indices(indices: list[int], groups: int) -> None:
    """Check that the groups of rows exist and ascend. A GPU takes any value below 0 for padding."""
    last = 0
    for row, group in enumerate(indices):
        if not -1 <= group < groups:
            what = f"−1 (padding) or one of the {groups} groups of b, from 0"
            raise ValueError(f"grouped_layout must hold {what}, not {group} in row {row}")
        if 0 <= group < last:
            raise ValueError(f"grouped_layout must ascend, not have {group} in row {row} after {last}")
        last = max(last, group)


def check_ends(psum: Tensor, rows: int, name: str = "grouped_layout") -> None:
    """On the CPU, check that no group ends before it begins, or past the last row.

    Raises:
        ValueError: one does.
    """
    if psum.device.type != "cpu":
        return
    begin = 0
    for end in psum.tolist():
        if not begin <= end <= rows:
            alignment = get_mk_alignment_for_contiguous_layout()
            what = f"ends of groups that begin at multiples of {alignment}, up to the {rows} rows"
            raise ValueError(f"{name} must hold {what}, not {psum.tolist()}")
        begin = align_rows(end)


def offsets(grouped_layout: Tensor, m: int, groups: int, psum: bool) -> Tensor:
    """Return int32 [G], the end of each group including the padding after it, as `grouped_matmul_nt` takes it."""
    if psum:
        return torch.cat([align_rows(grouped_layout[:-1]), grouped_layout[-1:]]).clamp(max=m)
    with_padding = grouped_layout.cummax(0).values
    in_order = ((grouped_layout == with_padding) | (grouped_layout < 0)).all() & (with_padding[-1] < groups)
    refuse_unless(in_order, f"grouped_layout must ascend, from −1 (padding) to at most {groups - 1}")
    group = torch.arange(groups, dtype=torch.int32, device=grouped_layout.device)
    ends = torch.searchsorted(with_padding, group, right=True, out_int32=True)
    row = torch.arange(1, m + 1, dtype=torch.int32, device=grouped_layout.device)
    last_end = align_rows((row * (grouped_layout >= 0)).amax())  # padding beyond the last tile is not computed
    return torch.minimum(ends, last_end)


def padding(psum: Tensor, m: int) -> Tensor:
    """Return bool [M]: which rows up to the end of the last tile are in no group."""
    row = torch.arange(m, device=psum.device, dtype=torch.int32)
    group = torch.searchsorted(psum, row, right=True).clamp(max=psum.numel() - 1)
    begins = torch.cat([psum.new_zeros(1), align_rows(psum[:-1])])
    return ((row < begins[group]) | (row >= psum[group])) & (row < align_rows(psum[-1]))


def align_rows(rows: Rows) -> Rows:
    """Round a number of rows up to a multiple of the alignment, at which groups begin."""
    alignment = get_mk_alignment_for_contiguous_layout()
    return (rows + (alignment - 1)) // alignment * alignment
