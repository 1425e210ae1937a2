"""Weight gradients of all experts at once: d[g] = c[g] + a[rows of g]ᵀ · b[rows of g], a sum over K = tokens.

A scale covers 128 (or 32) tokens of one channel, counted from the first token of its group. octile's operator counts
from the first token of all groups. That is the same where groups begin at multiples of 128; where they begin at
multiples of 32 only, scales are repeated so that there is one per 32 tokens.

Shapes: K tokens of all groups, m channels of a, n channels of b, G groups.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from octile.compat.deep_gemm.grouped import align_rows, check_ends
from octile.compat.deep_gemm.operands import (
    ConvertedOperand,
    Pair,
    Recipe,
    check_cd,
    check_pairs,
    checked_integers,
    copy_c_to_d,
)
from octile.compat.deep_gemm.settings import get_mk_alignment_for_contiguous_layout
from octile.ops.grouped import grouped_wgrad_out
from octile.ops.matmul import check_operand, check_sizes
from octile.ops.operator import check_tensor
from octile.ops.scale_layouts import PER_INT, unpack_grouped_ue8m0

GRANULARITIES = (32, 128)  # how many tokens may share a scale
MIN_BLOCK = 32  # tokens; the tokens that a scale covers, and the beginnings of groups, are multiples of it


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
    """Compute d[g] = aᵀ · b over the tokens of group g, added to c[g]: a[K, m], b[K, n], d[G, m, n].

    Args:
        a, b: (data, scale): E4M3, scale float32 [Σ ⌈K_g/gran_k⌉, channels], or UE8M0 packed group by group.
        d: the output, bfloat16 or float32, contiguous.
        ks_cpu: the tokens of each group, multiples of 32. With use_psum_layout: None, [], or the tokens, exact or
            rounded up to the alignment.
        grouped_layout: int32 [G] on the device: the tokens of each group. With use_psum_layout: the end of each group;
            the next one begins at the next multiple of the alignment, and a and b must be zero in between. The
            alignment must be a multiple of 32 if there is more than one group.
        c: None, or added; d itself, or a tensor of d's shape and dtype.
        recipe: (1, 1, gran_k), where gran_k is 128 or 32.
        compiled_dims: no effect.

    Raises:
        TypeError, ValueError: an argument does not fit; d is unchanged then. The values of grouped_layout are checked
            on the CPU only.
    """
    check_pairs(a, b)
    ks, gran_k = _check(a, b, c, d, ks_cpu, grouped_layout, recipe, use_psum_layout)
    for name, (data, _), channels in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
        if data.dim() != 2 or data.shape[1] != channels:
            raise ValueError(f"{name} must be [K, {channels}], not {tuple(data.shape)}, for d {tuple(d.shape)}")
        if not use_psum_layout and data.shape[0] != sum(ks):
            raise ValueError(f"{name} must be [{sum(ks)}, {channels}], not {tuple(data.shape)}, for ks_cpu={ks}")
    tokens = a[0].shape[0]
    if b[0].shape[0] != tokens:
        raise ValueError(f"a and b must have the same tokens: {tuple(a[0].shape)}, {tuple(b[0].shape)}")
    check_values(grouped_layout, ks, tokens, use_psum_layout)
    for name, pair, channels in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
        _check_scale(name, pair, channels, ks, grouped_layout, gran_k, use_psum_layout)
    _gemm_tn(a, b, d, ks, grouped_layout, c, gran_k, use_psum_layout)


def _gemm_tn(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks: list[int],
    layout: Tensor,
    c: Tensor | None,
    gran_k: int,
    psum: bool,
) -> None:
    left = _operand("a", a, ks, layout, gran_k, psum)
    right = _operand("b", b, ks, layout, gran_k, psum)
    ends = _ends(layout, psum).clamp(max=a[0].shape[0]).int()
    grouped_wgrad_out(d, *left, *right, ends, copy_c_to_d(d, c))


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
    """Compute `k_grouped_fp8_gemm_tn_contiguous` of operands whose groups are transposed and stored one after another.

    The groups are concatenated first, which copies a and b.

    Args:
        a: (data, scale): data [m · K], in which each group is [m, K_g] in row-major order, or [m, K] of a single
            group; scale float32 [m, Σ ⌈K_g/gran_k⌉].
        b: the same with n instead of m.
        d, grouped_layout, c, recipe, compiled_dims: as in `k_grouped_fp8_gemm_tn_contiguous`.
        ks_cpu: the tokens of each group, which give the layout of the data.
        use_psum_layout: must be False.

    Raises:
        TypeError, ValueError: as in `k_grouped_fp8_gemm_tn_contiguous`.
    """
    if use_psum_layout or ks_cpu is None:
        raise ValueError("the nt form needs ks_cpu, which gives the layout of the data, and no psum layout")
    check_pairs(a, b)
    ks, gran_k = _check(a, b, c, d, ks_cpu, grouped_layout, recipe, use_psum_layout)
    for name, pair, channels in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
        _check_flat(name, pair[0], channels, ks)
    check_values(grouped_layout, ks, sum(ks), psum=False)
    for name, pair, channels in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
        _check_scale(name, pair, channels, ks, grouped_layout, gran_k, psum=False, transposed=True)
    left, right = _concatenate_groups(a, d.shape[1], ks), _concatenate_groups(b, d.shape[2], ks)
    _gemm_tn(left, right, d, ks, grouped_layout, c, gran_k, psum=False)


def _check_flat(name: str, data: Tensor, channels: int, ks: list[int]) -> None:
    """Check that data has the transposed groups one after another. Only a single group may be a matrix."""
    shape = tuple(data.shape)
    if shape != (channels * sum(ks),) and (len(ks) != 1 or shape != (channels, sum(ks))):
        needed = f"[{channels} · {sum(ks)}], each group [{channels}, K_g] flattened, for ks_cpu={ks}"
        raise ValueError(f"{name} must be {needed}, not {shape}")


def _concatenate_groups(pair: Pair, channels: int, ks: list[int]) -> Pair:
    """Concatenate groups [channels, K_g] to data [K, channels], contiguous along K, and transpose the scales."""
    data, scale = pair
    starts = [0]
    for k in ks:
        starts.append(starts[-1] + k * channels)
    flat = data.reshape(-1).view(torch.uint8)  # torch has no cat of float8 on every device
    groups = [flat[start:end].view(channels, -1) for start, end in pairwise(starts) if end > start]
    concatenated = torch.cat(groups, dim=1) if groups else flat.view(channels, 0)
    return concatenated.view(data.dtype).mT, scale.mT


def _check(
    a: Pair,
    b: Pair,
    c: Tensor | None,
    d: Tensor,
    ks_cpu: Sequence[int] | None,
    grouped_layout: Tensor,
    recipe: Recipe,
    psum: bool,
) -> tuple[list[int], int]:
    """Check what does not depend on the form (tn or nt) of a and b; return the sizes of `checked_ks`, and gran_k."""
    device = a[0].device
    for name, (data, _) in (("a", a), ("b", b)):
        if data.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name} must be float8_e4m3fn, not {data.dtype}")
        if data.device != device:
            raise ValueError(f"a and b must be on the same device, not on {device} and {data.device}")
    check_tensor("d", d)
    check_tensor("grouped_layout", grouped_layout)
    if d.dim() != 3:
        raise ValueError(f"d must be [G, m, n], not {tuple(d.shape)}")
    form = "(1, 1, 128) or (1, 1, 32)"
    extents = checked_integers("recipe", recipe, form)
    if extents not in ((1, 1, 32), (1, 1, 128)):
        raise ValueError(f"recipe must be {form}, not {recipe!r}")
    check_sizes("grouped_layout", grouped_layout, d.shape[0], device)
    ks = checked_ks(ks_cpu, d.shape[0], psum)
    if not psum and any(k % MIN_BLOCK for k in ks):
        raise ValueError(f"ks_cpu must be multiples of {MIN_BLOCK}, not {ks}")
    alignment = get_mk_alignment_for_contiguous_layout()
    if psum and d.shape[0] > 1 and alignment % MIN_BLOCK:
        raise ValueError(f"the alignment must be a multiple of {MIN_BLOCK} with use_psum_layout, not {alignment}")
    check_cd(c, d, tuple(d.shape), device, contiguous=True)
    return ks, extents[2]


def checked_ks(ks_cpu: Sequence[int] | None, groups: int, psum: bool = False) -> list[int]:
    """Return ks_cpu, after a check that it has one size per group; with psum it may be None or empty, which gives [].

    Raises:
        TypeError, ValueError: it does not fit.
    """
    if ks_cpu is None:
        if psum:
            return []
        raise ValueError("ks_cpu must be given unless use_psum_layout is True")
    ks = list(checked_integers("ks_cpu", ks_cpu, "a list of integers"))
    if len(ks) != groups and not (psum and not ks):
        raise ValueError(f"ks_cpu must have {groups} sizes, one for each group, not {len(ks)}")
    if any(k < 0 for k in ks):
        raise ValueError(f"ks_cpu must be at least 0 each, not {ks}")
    return ks


def check_values(grouped_layout: Tensor, ks_cpu: list[int], tokens: int, psum: bool) -> None:
    """Check that the sizes fit the tokens, and on the CPU that grouped_layout agrees with ks_cpu.

    Raises:
        ValueError: they do not.
    """
    if psum:
        check_ends(grouped_layout, tokens)
    if not ks_cpu:
        return
    ks = [align_rows(k) for k in ks_cpu] if psum else ks_cpu
    if psum and sum(ks[:-1]) + ks_cpu[-1] > tokens:
        raise ValueError(f"ks_cpu must fit the {tokens} tokens of a and b, not {ks_cpu}")
    if grouped_layout.device.type != "cpu":
        return
    sizes = _sizes(grouped_layout, psum).tolist()
    if ks != ([align_rows(size) for size in sizes] if psum else sizes):
        raise ValueError(f"grouped_layout must agree with ks_cpu={ks_cpu}, not be {grouped_layout.tolist()}")


def _check_scale(
    name: str,
    pair: Pair,
    channels: int,
    ks: list[int],
    layout: Tensor,
    gran_k: int,
    psum: bool,
    transposed: bool = False,
) -> None:
    """Check that the scale of a pair is [blocks of tokens, channels], or the transpose of that."""
    data, scale = pair
    dim = 1 if transposed else 0  # of the blocks
    if scale.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"{name}'s scale must be float32, or int32 (packed UE8M0), not {scale.dtype}")
    if scale.dim() != 2 or scale.shape[1 - dim] != channels:
        needed = f"[{channels}, blocks of tokens]" if transposed else f"[blocks of tokens, {channels}]"
        raise ValueError(f"{name}'s scale must be {needed}, not {tuple(scale.shape)}")
    if scale.device != data.device:
        raise ValueError(f"{name} and its scale must be on the same device, not on {data.device} and {scale.device}")
    sizes = _sizes(layout, psum).tolist() if layout.device.type == "cpu" else None if psum else ks
    if sizes is not None:
        is_packed = scale.dtype == torch.int32
        check_blocks(
            f"{name}'s scale", scale.shape[dim], sizes, gran_k, "recipe=(1, 1, {})",
            PER_INT if is_packed else 1, may_be_more=psum or is_packed, side=("rows", "columns")[dim],
        )  # fmt: skip


def check_blocks(
    name: str,
    blocks: int,
    sizes: list[int],
    gran_k: int,
    argument: str,
    per_element: int = 1,
    may_be_more: bool = False,
    side: str = "rows",
) -> None:
    """Check that a scale has one element for each block of gran_k tokens of each group.

    Args:
        name: name of the scale, for the message.
        blocks: the elements that it has along the tokens.
        sizes: the tokens of each group.
        gran_k: the tokens that share a scale.
        argument: argument that gives gran_k, for the message; {} stands for its value.
        per_element: the scales of an element: 4 where they are packed.
        may_be_more: whether further elements may follow.
        side: dimension of the elements, for the message.

    Raises:
        ValueError: it has fewer, or more where that is not allowed.
    """

    def needed(tokens: int) -> int:
        return sum(-(-size // (tokens * per_element)) for size in sizes)

    if blocks == needed(gran_k) or (may_be_more and blocks > needed(gran_k)):
        return
    message = f"{name} must have {needed(gran_k)} {side} for groups of {sizes} at {gran_k} tokens a scale"
    fitting = [argument.format(tokens) for tokens in GRANULARITIES if needed(tokens) == blocks]
    raise ValueError(f"{message}, not {blocks}" + (f"; {blocks} fit {fitting[0]}" if fitting else ""))


def _operand(name: str, pair: Pair, ks: list[int], layout: Tensor, gran_k: int, psum: bool) -> ConvertedOperand:
    """Convert a pair to an operand whose blocks of tokens are counted from the first token of all groups."""
    data, scale = pair
    tokens = data.shape[0]
    if scale.dtype == torch.int32:
        blocks = (_sizes(layout, psum) + gran_k - 1) // gran_k
        scale = unpack_grouped_ue8m0(scale, blocks, -(-tokens // gran_k) + len(layout))
    if psum or any(k % gran_k for k in ks):
        scale, gran_k = _repeat_scale(scale, layout, tokens, gran_k, psum), MIN_BLOCK
    else:
        scale = scale[: -(-tokens // gran_k)]
    check_operand(name, data, scale, (gran_k, 1), ndim=2)
    return ConvertedOperand(data, scale, (gran_k, 1))


def _repeat_scale(scale: Tensor, layout: Tensor, tokens: int, gran_k: int, psum: bool) -> Tensor:
    """Return [⌈K/32⌉, channels]: for every 32 tokens the scale of the block of their group that they are in."""
    sizes = _sizes(layout, psum).long()
    blocks = (sizes + gran_k - 1) // gran_k
    begins = (layout if psum else layout.cumsum(0)) - sizes
    first = MIN_BLOCK * torch.arange(-(-tokens // MIN_BLOCK), device=scale.device)
    group = (torch.searchsorted(begins, first, right=True) - 1).clamp(min=0)
    within = ((first - begins[group]) // gran_k).clamp(min=0)
    within = torch.minimum(within, (blocks[group] - 1).clamp(min=0))  # for the zeros between two groups
    return scale[((blocks.cumsum(0) - blocks)[group] + within).clamp(max=scale.shape[0] - 1)]


def _sizes(layout: Tensor, psum: bool) -> Tensor:
    """Return the tokens of each group."""
    return layout - torch.cat([layout.new_zeros(1), align_rows(layout[:-1])]) if psum else layout


def _ends(layout: Tensor, psum: bool) -> Tensor:
    """Return the end of each group, in the psum layout including the zeros after it."""
    return torch.cat([align_rows(layout[:-1]), layout[-1:]]) if psum else layout.cumsum(0)
