"""Products of a mixture of experts, in which every group of rows has its own b. Shapes: a[M, K], b[G, N, K].

Which rows belong to a group is said in one of three ways, on the device:

    m_indices      int32 [M], the group of each row, −1 for padding; groups in rising order
    psum           int32 [G], where each group ends; the next one begins at the next multiple of the alignment
    masked_m       int32 [G], how many of the first rows of a[G, M, K] are in use

octile's operator wants the ends of groups that follow one another without gaps, so padding is counted to the group
before it: its rows are computed, which nobody reads, and up to a tile's end cost nothing.
"""

import torch
from torch import Tensor

from octile.compat.deep_gemm.operands import Block, Pair, Recipe, both_transposed, check_d, operands
from octile.compat.deep_gemm.settings import get_mk_alignment_for_contiguous_layout
from octile.ops.grouped import check_sizes, grouped_matmul_nt_out, masked_grouped_matmul_nt_out
from octile.ops.operator import check_tensor
from octile.ops.scale_layouts import refuse_unless


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
    """d[rows of g] = a[rows of g] · b[g]ᵀ: a[M, K], b[G, N, K], d[M, N] bfloat16 or float32, contiguous.

    Args:
        grouped_layout: m_indices, or with use_psum_layout the ends of the groups; see above.
        ensure_zero_padding: with use_psum_layout, also write zeros into the rows between groups; one more pass over d.
        compiled_dims, disable_ue8m0_cast, expected_m_for_psum_layout: no effect.

    Raises:
        TypeError, ValueError: an argument does not fit. Numbers of grouped_layout are seen on the CPU only: on a GPU
            the device stops with an assertion where indices fall or are no group, and ends are taken as they are.
    """
    left, right = operands(a, b, recipe, recipe_a, recipe_b, dims=(2, 3))
    (m, _), (groups, n, _) = left.data.shape, right.data.shape
    check_d(d, (m, n), left.data.device, contiguous=True)
    check_layout(grouped_layout, m, groups, left.data.device, use_psum_layout)
    if m == 0 or groups == 0:
        return
    offs = offsets(grouped_layout, m, groups, use_psum_layout)
    grouped_matmul_nt_out(d, *left, *right, offs)
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
    """`m_grouped_fp8_gemm_nt_contiguous` with b, and its scales, given as [G, K, N]."""
    m_grouped_fp8_gemm_nt_contiguous(
        *both_transposed(a, b, "b"),
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
    """d[g] = a[g] · b[g]ᵀ for the first masked_m[g] rows: a[G, M, K], b[G, N, K], d[G, M, N], contiguous.

    The other rows of d may hold anything afterwards. expected_m decides on the speed; compiled_dims and
    disable_ue8m0_cast have no effect.

    Raises:
        TypeError, ValueError: an argument does not fit; the numbers of masked_m are seen on the CPU only.
    """
    left, right = operands(a, b, recipe, recipe_a, recipe_b, dims=(3, 3))
    (groups, m, _), (of_b, n, _) = left.data.shape, right.data.shape
    if groups != of_b:
        raise ValueError(f"a and b must have the same number of groups, not {groups} and {of_b}")
    check_d(d, (groups, m, n), left.data.device, contiguous=True)
    check_masked(masked_m, expected_m, groups, m, left.data.device)
    masked_grouped_matmul_nt_out(d, *left, *right, masked_m, expected_m)


def check_masked(masked_m: Tensor, expected_m: int, groups: int, m: int, device: torch.device) -> None:
    """Refuses a masked_m that is not one int32 a group, on the CPU also one that is not from 0 to m."""
    check_tensor("masked_m", masked_m)
    check_sizes("masked_m", masked_m, groups, device)
    if not isinstance(expected_m, int):
        raise TypeError(f"expected_m must be an integer, not {expected_m!r}")
    if expected_m < 0:
        raise ValueError(f"expected_m must be at least 0, not {expected_m}")
    if device.type == "cpu" and not all(0 <= rows <= m for rows in masked_m.tolist()):
        raise ValueError(f"masked_m must be from 0 to the {m} rows of a group, not {masked_m.tolist()}")


def check_layout(grouped_layout: Tensor, m: int, groups: int, device: torch.device, psum: bool) -> None:
    """Refuses a grouped_layout that is not one int32 a row, or a group; on the CPU also ends that are none."""
    check_tensor("grouped_layout", grouped_layout)
    if grouped_layout.dtype != torch.int32:
        raise TypeError(f"grouped_layout must be int32, not {grouped_layout.dtype}")
    if tuple(grouped_layout.shape) != (groups if psum else m,):
        what = f"[{groups}], one for each group" if psum else f"[{m}], one for each row"
        raise ValueError(f"grouped_layout must be {what}, not {tuple(grouped_layout.shape)}")
    if grouped_layout.device != device:
        raise ValueError(f"grouped_layout lies on {grouped_layout.device}, but the operands on {device}")
    if psum:
        check_ends(grouped_layout, m)
    elif device.type == "cpu" and grouped_layout.lt(-1).any():  # a GPU takes any number below 0 for padding
        raise ValueError(f"grouped_layout must be at least −1, which is padding, not {int(grouped_layout.min())}")


def check_ends(psum: Tensor, rows: int, name: str = "grouped_layout") -> None:
    """On the CPU, refuses groups that end before they begin, or past the rows there are."""
    if psum.device.type != "cpu":
        return
    begin = 0
    for end in psum.tolist():
        if not begin <= end <= rows:
            alignment = get_mk_alignment_for_contiguous_layout()
            what = f"ends of groups that begin at multiples of {alignment}, up to the {rows} rows there are"
            raise ValueError(f"{name} must hold {what}, not {psum.tolist()}")
        begin = rounded_up(end)


def offsets(grouped_layout: Tensor, m: int, groups: int, psum: bool) -> Tensor:
    """int32 [G]: where each group ends, padding after it included, as `grouped_matmul_nt` takes it."""
    if psum:
        return torch.cat([aligned(grouped_layout[:-1]), grouped_layout[-1:]]).clamp(max=m)
    with_padding = grouped_layout.cummax(0).values
    in_order = ((grouped_layout == with_padding) | (grouped_layout < 0)).all() & (with_padding[-1] < groups)
    refuse_unless(in_order, f"grouped_layout must rise, from −1 (padding) to at most {groups - 1}")
    group = torch.arange(groups, dtype=torch.int32, device=grouped_layout.device)
    ends = torch.searchsorted(with_padding, group, right=True, out_int32=True)
    row = torch.arange(1, m + 1, dtype=torch.int32, device=grouped_layout.device)
    end_of_all = aligned((row * (grouped_layout >= 0)).amax())  # padding in whole tiles behind it costs nothing
    return torch.minimum(ends, end_of_all)


def padding(psum: Tensor, m: int) -> Tensor:
    """bool [M]: which rows up to the end of the last tile lie in no group."""
    row = torch.arange(m, device=psum.device, dtype=torch.int32)
    group = torch.searchsorted(psum, row, right=True).clamp(max=psum.numel() - 1)
    begins = torch.cat([psum.new_zeros(1), aligned(psum[:-1])])
    return ((row < begins[group]) | (row >= psum[group])) & (row < aligned(psum[-1]))


def aligned(rows: Tensor) -> Tensor:
    """Rows rounded up to where the next group begins."""
    alignment = get_mk_alignment_for_contiguous_layout()
    return (rows + (alignment - 1)) // alignment * alignment


def rounded_up(rows: int) -> int:
    """`aligned` of a number on the host."""
    alignment = get_mk_alignment_for_contiguous_layout()
    return -(-rows // alignment) * alignment
