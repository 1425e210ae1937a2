"""Layouts of scales under DeepGEMM's names, over `octile.ops.scale_layouts`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octile.compat.deep_gemm.dense import has_mx_tensor_cores
from octile.compat.deep_gemm.grouped import check_ends, padding
from octile.compat.deep_gemm.k_grouped import GRANULARITIES, check_blocks, check_values, checked_ks
from octile.compat.deep_gemm.operands import Block, Recipe, checked_integer, checked_recipe
from octile.ops.matmul import check_sizes
from octile.ops.operator import check_tensor
from octile.ops.scale_layouts import (
    ALIGNMENT,
    PER_INT,
    SMALLEST,
    max_packed_rows,
    mn_major,
    pack_grouped_ue8m0,
    pack_ue8m0,
    tma_aligned,
)


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """Round a number of elements up to a multiple of 16 bytes.

    Raises:
        TypeError, ValueError: x or element_size is not an integer, or element_size does not divide 16.
    """
    x, element_size = checked_integer("x", x), checked_integer("element_size", element_size)
    if element_size < 1 or ALIGNMENT % element_size:
        raise ValueError(f"element_size must divide {ALIGNMENT} bytes, not be {element_size}")
    return tma_aligned(x, element_size)


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Copy scales float32 [MN, k] or [G, MN, k] to MN-major layout, whose columns begin at multiples of 16 bytes.

    Raises:
        TypeError, ValueError: sf is not float32, or has another number of dimensions.
    """
    _check(sf)
    return mn_major(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor, psum_layout: Tensor | None = None) -> Tensor:
    """Pack scales float32 [MN, k] or [G, MN, k] to int32 [..., MN, ⌈k/4⌉], four UE8M0 values each, MN-major, aligned.

    Args:
        sf: powers of two, or 0, which is encoded as 0.
        psum_layout: int32 [G], the ends of groups; the rows between groups may hold any values then.

    Raises:
        TypeError, ValueError: sf is not float32, has another number of dimensions, or holds other values; psum_layout
            does not fit.
    """
    _check(sf)
    ignored = sf == 0
    if psum_layout is not None:
        _check_groups("psum_layout", psum_layout, sf)
        if not psum_layout.numel():
            raise ValueError("psum_layout must have the end of a group, not none")
        check_ends(psum_layout, sf.shape[-2], name="psum_layout")
        row = torch.arange(sf.shape[-2], device=sf.device)
        ignored = ignored | (padding(psum_layout, sf.shape[-2]) | (row >= psum_layout[-1]))[:, None]
    return pack_ue8m0(sf.masked_fill(ignored, SMALLEST))


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor,
    grouped_layout: Tensor,
    ks_cpu: Sequence[int] | None,
    gran_k: int,
    k_alignment: int,
    use_psum_layout: bool = False,
) -> Tensor:
    """Pack the scales of weight gradients' operands, float32 [Σ ⌈K_g/gran_k⌉, MN] to int32 [Σ ⌈⌈K_g/gran_k⌉/4⌉, MN].

    Args:
        sf: powers of two, or 0.
        grouped_layout: int32 [G]: the tokens of each group. With use_psum_layout: the end of each group; the next one
            begins at the next multiple of k_alignment.
        ks_cpu: the tokens of each group. With use_psum_layout it may be None or []; the result then has unused rows.
        gran_k: the tokens that share a scale, 128 or 32.
        k_alignment: see grouped_layout.
        use_psum_layout: whether grouped_layout holds ends.

    Raises:
        TypeError, ValueError: sf is not float32 [k, MN], or holds other values; another argument does not fit.
    """
    _check(sf)
    if sf.dim() != 2:
        raise ValueError(f"sf must be [blocks of tokens, MN], not {tuple(sf.shape)}")
    _check_groups("grouped_layout", grouped_layout, sf)
    ks = checked_ks(ks_cpu, len(grouped_layout), use_psum_layout)
    gran_k, k_alignment = checked_integer("gran_k", gran_k), checked_integer("k_alignment", k_alignment)
    if gran_k not in GRANULARITIES:
        raise ValueError(f"gran_k must be 128 or 32, not {gran_k}")
    if k_alignment < 1:
        raise ValueError(f"k_alignment must be at least 1, not {k_alignment}")
    sizes = grouped_layout
    if not use_psum_layout:
        check_values(grouped_layout, ks, sum(ks), psum=False)
    else:
        begins = (grouped_layout[:-1] + k_alignment - 1) // k_alignment * k_alignment
        sizes = grouped_layout - torch.cat([grouped_layout.new_zeros(1), begins])
        if sf.device.type == "cpu" and sizes.lt(0).any():
            what = f"ends of groups that begin at multiples of {k_alignment}"
            raise ValueError(f"grouped_layout must hold {what}, not {grouped_layout.tolist()}")
    host_sizes = sizes.tolist() if sf.device.type == "cpu" else None if use_psum_layout else ks
    if host_sizes is not None:
        check_blocks("sf", sf.shape[0], host_sizes, gran_k, "gran_k={}", may_be_more=use_psum_layout)
    blocks = (sizes + gran_k - 1) // gran_k
    rows = sum(-(-k // (gran_k * PER_INT)) for k in ks) if ks else max_packed_rows(sf.shape[0], len(grouped_layout))
    return pack_grouped_ue8m0(sf.masked_fill(sf == 0, SMALLEST), blocks, rows)


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: Recipe | Block,
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Tensor | None = None,
) -> Tensor:
    """Convert the scales of an operand [mn, k] to the layout that GEMMs read fastest. GEMMs accept any layout.

    On sm_100 that is packed UE8M0, one scale per row, unless disable_ue8m0_cast. Elsewhere it is MN-major for one scale
    per row; scales of blocks of rows are returned unchanged.

    Args:
        sf: float32 [⌈mn/gran_mn⌉, ⌈k/gran_k⌉], with num_groups [G, …]; or packed already.
        mn, k: the shape of the operand.
        recipe: (gran_mn, gran_k), or (gran_m, gran_n, gran_k) with is_sfa.
        num_groups: G, or None where there are no groups.
        is_sfa: whether gran_mn is gran_m (True) or gran_n (False) of a recipe of three.
        disable_ue8m0_cast: see above.
        psum_layout: as in `get_mn_major_tma_aligned_packed_ue8m0_tensor`.

    Raises:
        TypeError: sf is neither float32 nor int32, or mn, k or an extent is not an integer.
        ValueError: sf has another shape, recipe has another length, or is_sfa is missing.
    """
    check_tensor("sf", sf)
    if sf.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"sf must be float32, or int32 (packed UE8M0), not {sf.dtype}")
    if isinstance(recipe, tuple | list) and len(recipe) == 3:
        gran_m, gran_n, gran_k = checked_recipe("recipe", recipe, "(gran_m, gran_n, gran_k)")
        if is_sfa is None:
            raise ValueError("is_sfa must be given with a recipe of three, to name the operand")
        gran_mn = gran_m if is_sfa else gran_n
    else:
        gran_mn, gran_k = checked_recipe("recipe", recipe, "(gran_mn, gran_k)")
    mn, k = checked_integer("mn", mn), checked_integer("k", k)
    per_element = PER_INT if sf.dtype == torch.int32 else 1
    shape = (*(() if num_groups is None else (num_groups,)), -(-mn // gran_mn), -(-k // (gran_k * per_element)))
    if tuple(sf.shape) != shape:
        raise ValueError(f"sf must be {shape}, not {tuple(sf.shape)}")
    if sf.dtype == torch.int32:
        return mn_major(sf)
    if has_mx_tensor_cores(sf) and not disable_ue8m0_cast:
        if gran_mn != 1:
            sf = sf.repeat_interleave(gran_mn, dim=-2)[..., :mn, :]
        return get_mn_major_tma_aligned_packed_ue8m0_tensor(sf, psum_layout)
    return get_mn_major_tma_aligned_tensor(sf) if gran_mn == 1 else sf


def _check(sf: Tensor) -> None:
    check_tensor("sf", sf)
    if sf.dtype != torch.float32:
        raise TypeError(f"sf must be float32, not {sf.dtype}")
    if sf.dim() not in (2, 3):
        raise ValueError(f"sf must have 2 or 3 dimensions, not the shape {tuple(sf.shape)}")


def _check_groups(name: str, groups: Tensor, sf: Tensor) -> None:
    check_tensor(name, groups)
    check_sizes(name, groups, groups.numel(), sf.device)
