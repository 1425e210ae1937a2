"""The weight gradients of all experts at once: d[g] = c[g] + a[rows of g]ᵀ · b[rows of g], summed over K = tokens.

Scales stand for 128 (or 32) tokens of one channel and are counted from the first token of each group. octile's operator
counts them from the first token of all, which is the same where groups begin at multiples of 128; where they begin at
multiples of 32 only, every scale is written once for each 32 tokens.

Shapes: K tokens of all groups, m channels of a, n of b, G groups.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from octile.compat.deep_gemm.grouped import aligned, check_ends, rounded_up
from octile.compat.deep_gemm.operands import Operand, Pair, Recipe, begin, check_cd, check_pairs
from octile.ops.grouped import check_sizes, grouped_wgrad_out
from octile.ops.matmul import check_operand
from octile.ops.operator import check_tensor
from octile.ops.scale_layouts import PER_INT, unpack_grouped_ue8m0

STEP = 32  # tokens; what a scale covers, and where groups begin, are multiples of it


def k_grouped_fp8_gemm_tn_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks_cpu: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """d[g] = aᵀ · b over the tokens of group g, added to c[g]: a[K, m], b[K, n], d[G, m, n].

    Args:
        a, b: (data, scale): E4M3, scale float32 [Σ ⌈K_g/gran_k⌉, channels], or packed UE8M0, each group by itself.
        d: bfloat16 or float32, contiguous.
        ks_cpu: tokens of each group, multiples of 32; with use_psum_layout None or [], or tokens as they are or rounded
            up to the alignment.
        grouped_layout: int32 [G] on the device: the tokens of each group, or with use_psum_layout where it ends; it
            begins at the next multiple of the alignment, and what lies between must be zero.
        c: d itself, or of its shape and dtype; None: the gradients are stored.
        recipe: (1, 1, gran_k), gran_k 128 or 32.
        compiled_dims: no effect.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing has been written then. The numbers of grouped_layout
            are seen on the CPU only.
    """
    check_pairs(a, b)
    _check(a, b, c, d, ks_cpu, grouped_layout, recipe, use_psum_layout)
    for name, (data, _), channels in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
        if data.dim() != 2 or data.shape[1] != channels:
            raise ValueError(f"{name} must be [K, {channels}], not {tuple(data.shape)}, for d {tuple(d.shape)}")
        if not use_psum_layout and ks_cpu is not None and data.shape[0] != sum(ks_cpu):
            raise ValueError(f"{name} must be [{sum(ks_cpu)}, {channels}], not {tuple(data.shape)}, for {ks_cpu=}")
    tokens = a[0].shape[0]
    if b[0].shape[0] != tokens:
        raise ValueError(f"a and b must have the same tokens: {tuple(a[0].shape)}, {tuple(b[0].shape)}")
    check_values(grouped_layout, ks_cpu, tokens, use_psum_layout)
    for name, pair in (("a", a), ("b", b)):
        _check_scale(name, pair, ks_cpu, grouped_layout, recipe[2], use_psum_layout)
    left = _operand("a", a, ks_cpu, grouped_layout, recipe[2], use_psum_layout)
    right = _operand("b", b, ks_cpu, grouped_layout, recipe[2], use_psum_layout)
    ends = _ends(grouped_layout, use_psum_layout).clamp(max=tokens).int()
    grouped_wgrad_out(d, *left, *right, ends, begin(d, c))


def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks_cpu: Sequence[int],
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """`k_grouped_fp8_gemm_tn_contiguous` of operands whose groups have been transposed, one after the other.

    Args:
        a: (data, scale): data of m · K values, for every group [m, K_g] row by row; scale float32 [m, Σ K_g/128].
        b: likewise with n.
        ks_cpu: the tokens of each group; needed, for they say how the data lies.

    The other arguments are as there, without psum. The groups are put side by side first: one copy of a and b.
    """
    if use_psum_layout or ks_cpu is None:
        raise ValueError("the nt form needs ks_cpu, since it says how the data lies, and no psum layout")
    check_pairs(a, b)
    _check(a, b, c, d, ks_cpu, grouped_layout, recipe, use_psum_layout)
    left, right = _in_rows("a", a, d.shape[1], ks_cpu), _in_rows("b", b, d.shape[2], ks_cpu)
    k_grouped_fp8_gemm_tn_contiguous(left, right, d, ks_cpu, grouped_layout, c, recipe, compiled_dims)


def _in_rows(name: str, pair: Pair, channels: int, ks: Sequence[int]) -> Pair:
    """(data [K, channels], scale) of groups [channels, K_g] that lie one after the other; K is next to K in memory."""
    data, scale = pair
    if data.numel() != channels * sum(ks):
        needed = f"{channels} · {sum(ks)} values for {channels} channels of d and ks_cpu={list(ks)}"
        raise ValueError(f"{name} must have {needed}, not {data.numel()}")
    if scale.dim() != 2 or scale.shape[0] != channels:
        raise ValueError(f"{name}'s scale must be [{channels}, blocks of tokens], not {tuple(scale.shape)}")
    starts = [0]
    for k in ks:
        starts.append(starts[-1] + k * channels)
    flat = data.reshape(-1).view(torch.uint8)  # torch has no cat of float8 on every device
    groups = [flat[start:end].view(channels, -1) for start, end in pairwise(starts) if end > start]
    together = torch.cat(groups, dim=1) if groups else flat.view(channels, 0)
    return together.view(data.dtype).mT, scale.mT


def _check(
    a: Pair,
    b: Pair,
    c: Tensor | None,
    d: Tensor,
    ks_cpu: Sequence[int] | None,
    grouped_layout: Tensor,
    recipe: Recipe,
    psum: bool,
) -> None:
    """Refuses what can be seen whatever the form of a and b."""
    device = a[0].device
    for name, (data, _) in (("a", a), ("b", b)):
        if data.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name} must be float8_e4m3fn, not {data.dtype}")
        if data.device != device:
            raise ValueError(f"a lies on {device} but {name} on {data.device}")
    check_tensor("d", d)
    check_tensor("grouped_layout", grouped_layout)
    if d.dim() != 3:
        raise ValueError(f"d must be [G, m, n], not {tuple(d.shape)}")
    if not isinstance(recipe, tuple | list) or tuple(recipe) not in ((1, 1, 32), (1, 1, 128)):
        raise ValueError(f"recipe must be (1, 1, 128) or (1, 1, 32), not {recipe!r}")
    check_sizes("grouped_layout", grouped_layout, d.shape[0], device)
    check_ks(ks_cpu, d.shape[0], psum)
    if not psum and ks_cpu is not None and any(k % STEP for k in ks_cpu):
        raise ValueError(f"ks_cpu must be multiples of {STEP}, not {list(ks_cpu)}")
    check_cd(c, d, tuple(d.shape), device, contiguous=True)


def check_ks(ks_cpu: Sequence[int] | None, groups: int, psum: bool = False) -> None:
    """Refuses sizes that are not one a group; with psum there may be none."""
    if psum and (ks_cpu is None or (isinstance(ks_cpu, tuple | list) and not ks_cpu)):
        return
    if ks_cpu is None:
        raise ValueError("ks_cpu must be given unless use_psum_layout is")
    if not isinstance(ks_cpu, tuple | list) or not all(isinstance(k, int) for k in ks_cpu):
        raise TypeError(f"ks_cpu must be a list of integers, not {ks_cpu!r}")
    if len(ks_cpu) != groups:
        raise ValueError(f"ks_cpu must have {groups} sizes, one for each group, not {len(ks_cpu)}")
    if any(k < 0 for k in ks_cpu):
        raise ValueError(f"ks_cpu must be at least 0 each, not {list(ks_cpu)}")


def check_values(grouped_layout: Tensor, ks_cpu: Sequence[int] | None, tokens: int, psum: bool) -> None:
    """Refuses sizes that do not fit the tokens; on the CPU also a grouped_layout that contradicts ks_cpu."""
    if psum:
        check_ends(grouped_layout, tokens)
    if not ks_cpu:
        return
    ks = [rounded_up(k) for k in ks_cpu] if psum else list(ks_cpu)
    if psum and sum(ks[:-1]) + ks_cpu[-1] > tokens:
        raise ValueError(f"ks_cpu must fit the {tokens} tokens there are, not {list(ks_cpu)}")
    if grouped_layout.device.type != "cpu":
        return
    sizes = _sizes(grouped_layout, psum).tolist()
    if ks != ([rounded_up(size) for size in sizes] if psum else sizes):
        raise ValueError(f"grouped_layout must say the same as ks_cpu={list(ks_cpu)}, not {grouped_layout.tolist()}")


def _check_scale(name: str, pair: Pair, ks: Sequence[int] | None, layout: Tensor, gran_k: int, psum: bool) -> None:
    data, scale = pair
    channels = data.shape[1]
    if scale.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"{name}'s scale must be float32, or int32 (packed UE8M0), not {scale.dtype}")
    if scale.dim() != 2 or scale.shape[1] != channels:
        raise ValueError(f"{name}'s scale must be [blocks of tokens, {channels}], not {tuple(scale.shape)}")
    if scale.device != data.device:
        raise ValueError(f"{name} lies on {data.device} but its scale on {scale.device}")
    sizes = _sizes(layout, psum).tolist() if layout.device.type == "cpu" else None if psum else ks
    if sizes is not None:
        per_row = gran_k * (PER_INT if scale.dtype == torch.int32 else 1)
        needed = sum(-(-k // per_row) for k in sizes)
        if scale.shape[0] < needed:
            raise ValueError(
                f"{name}'s scale must have {needed} rows for groups of {list(sizes)}, not {scale.shape[0]}"
            )


def _operand(name: str, pair: Pair, ks: Sequence[int] | None, layout: Tensor, gran_k: int, psum: bool) -> Operand:
    """One operand in blocks of tokens that are counted from the first token of all."""
    data, scale = pair
    tokens = data.shape[0]
    if scale.dtype == torch.int32:
        blocks = (_sizes(layout, psum) + gran_k - 1) // gran_k
        scale = unpack_grouped_ue8m0(scale, blocks, -(-tokens // gran_k) + len(layout))
    if psum or (ks is not None and any(k % gran_k for k in ks)):
        scale, gran_k = _every_step(scale, layout, tokens, gran_k, psum), STEP
    else:
        scale = scale[: -(-tokens // gran_k)]
    check_operand(name, data, scale, (gran_k, 1), ndim=2)
    return Operand(data, scale, (gran_k, 1))


def _every_step(scale: Tensor, layout: Tensor, tokens: int, gran_k: int, psum: bool) -> Tensor:
    """[⌈K/32⌉, channels]: the scale of the group's block that every 32 tokens lie in."""
    sizes = _sizes(layout, psum).long()
    blocks = (sizes + gran_k - 1) // gran_k
    begins = (layout if psum else layout.cumsum(0)) - sizes
    step = STEP * torch.arange(-(-tokens // STEP), device=scale.device)
    group = (torch.searchsorted(begins, step, right=True) - 1).clamp(min=0)
    within = ((step - begins[group]) // gran_k).clamp(min=0)
    within = torch.minimum(within, (blocks[group] - 1).clamp(min=0))  # of the zeros between two groups
    return scale[((blocks.cumsum(0) - blocks)[group] + within).clamp(max=scale.shape[0] - 1)]


def _sizes(layout: Tensor, psum: bool) -> Tensor:
    """The tokens of each group."""
    return layout - torch.cat([layout.new_zeros(1), aligned(layout[:-1])]) if psum else layout


def _ends(layout: Tensor, psum: bool) -> Tensor:
    """Where each group ends; in the psum layout with the zeros behind it, which add nothing."""
    return torch.cat([aligned(layout[:-1]), layout[-1:]]) if psum else layout.cumsum(0)
