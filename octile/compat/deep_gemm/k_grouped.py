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

from octile.compat.deep_gemm.grouped import aligned
from octile.compat.deep_gemm.operands import Operand, Pair, Recipe, begin, check_pairs, check_tensor
from octile.ops.grouped import check_sizes, grouped_wgrad_out
from octile.ops.matmul import check_operand
from octile.ops.scale_layouts import unpack_grouped_ue8m0

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
        ks_cpu: tokens of each group, multiples of 32; None or [] with use_psum_layout.
        grouped_layout: int32 [G] on the device: the tokens of each group, or with use_psum_layout where it ends; it
            begins at the next multiple of the alignment, and what lies between must be zero.
        c: d itself, or of its shape and dtype; None: the gradients are stored.
        recipe: (1, 1, gran_k), gran_k 128 or 32.
        compiled_dims: no effect.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing has been written then.
    """
    check_pairs(a, b)
    _check(d, ks_cpu, grouped_layout, recipe, use_psum_layout)
    left = _operand("a", a, d.shape[1], ks_cpu, grouped_layout, recipe[2], use_psum_layout)
    right = _operand("b", b, d.shape[2], ks_cpu, grouped_layout, recipe[2], use_psum_layout)
    if left.data.shape[0] != right.data.shape[0]:
        raise ValueError(f"a and b must have the same tokens: {tuple(left.data.shape)}, {tuple(right.data.shape)}")
    accumulate = begin(d, c, tuple(d.shape), left.data.device, contiguous=True)
    ends = _ends(grouped_layout, use_psum_layout).clamp(max=left.data.shape[0]).int()
    grouped_wgrad_out(d, *left, *right, ends, accumulate)


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
    if use_psum_layout or not ks_cpu:
        raise ValueError("the nt form needs ks_cpu, since it says how the data lies, and no psum layout")
    check_pairs(a, b)
    _check(d, ks_cpu, grouped_layout, recipe, use_psum_layout)
    left, right = _in_rows("a", a, d.shape[1], ks_cpu), _in_rows("b", b, d.shape[2], ks_cpu)
    k_grouped_fp8_gemm_tn_contiguous(left, right, d, ks_cpu, grouped_layout, c, recipe, compiled_dims)


def _in_rows(name: str, pair: Pair, channels: int, ks: Sequence[int]) -> Pair:
    """(data [K, channels], scale) of groups [channels, K_g] that lie one after the other; K is next to K in memory."""
    data, scale = pair
    if data.numel() != channels * sum(ks):
        needed = f"{channels} · {sum(ks)} values for {channels} channels and ks_cpu={list(ks)}"
        raise ValueError(f"{name} must have {needed}, not {data.numel()}")
    starts = [0]
    for k in ks:
        starts.append(starts[-1] + k * channels)
    flat = data.reshape(-1).view(torch.uint8)  # torch has no cat of float8 on every device
    groups = [flat[start:end].view(channels, -1) for start, end in pairwise(starts) if end > start]
    together = torch.cat(groups, dim=1) if groups else flat.view(channels, 0)
    return together.view(data.dtype).mT, scale.mT


def _check(d: Tensor, ks_cpu: Sequence[int] | None, grouped_layout: Tensor, recipe: Recipe, psum: bool) -> None:
    check_tensor("d", d)
    check_tensor("grouped_layout", grouped_layout)
    if d.dim() != 3:
        raise ValueError(f"d must be [G, m, n], not {tuple(d.shape)}")
    if recipe is None or tuple(recipe) not in ((1, 1, 32), (1, 1, 128)):
        raise ValueError(f"recipe must be (1, 1, 128) or (1, 1, 32), not {recipe}")
    check_sizes("grouped_layout", grouped_layout, d.shape[0], d.device)
    if not ks_cpu:
        if not psum and d.shape[0]:
            raise ValueError("ks_cpu must be given unless use_psum_layout is")
        return
    if len(ks_cpu) != d.shape[0]:
        raise ValueError(f"ks_cpu must have {d.shape[0]} sizes, one for each group, not {len(ks_cpu)}")
    if not psum and any(k < 0 or k % STEP for k in ks_cpu):
        raise ValueError(f"ks_cpu must be multiples of {STEP}, not {list(ks_cpu)}")


def _operand(
    name: str, pair: Pair, channels: int, ks: Sequence[int] | None, layout: Tensor, gran_k: int, psum: bool
) -> Operand:
    """One operand in blocks of tokens that are counted from the first token of all."""
    data, scale = pair
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name} must be float8_e4m3fn, not {data.dtype}")
    tokens = data.shape[0]
    if tuple(data.shape) != (tokens, channels) or (not psum and ks is not None and sum(ks) != tokens):
        raise ValueError(f"{name} must be [{'K' if ks is None else sum(ks)}, {channels}], not {tuple(data.shape)}")
    if scale.dim() != 2 or scale.shape[1] != channels:
        raise ValueError(f"{name}'s scale must be [blocks of tokens, {channels}], not {tuple(scale.shape)}")
    if scale.dtype == torch.int32:
        blocks = (_sizes(layout, psum) + gran_k - 1) // gran_k
        scale = unpack_grouped_ue8m0(scale, blocks, -(-tokens // gran_k) + len(layout))
    elif not psum and ks is not None and scale.shape[0] < sum(-(-k // gran_k) for k in ks):
        needed = sum(-(-k // gran_k) for k in ks)
        raise ValueError(f"{name}'s scale must have {needed} rows for ks_cpu={list(ks)}, not {scale.shape[0]}")
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
