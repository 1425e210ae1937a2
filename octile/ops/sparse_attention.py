"""Attention of latent attention's absorbed form over top-k positions alone, as sparse attention computes it.

    s = scale · q · [latent; rotary key]      of the top-k positions of the query
    p = softmax(s)
    o = p · latent                            C channels a head: the caller multiplies them by the values' weight

All heads of a query attend to the same positions. With all positions of a causal mask, this is dense attention.
`sparse_attention` reads rows that lie one after the other, as in prefill; `paged_sparse_attention` reads the paged
cache. Training also needs the logarithm of the softmax's denominator, for `octile.ops.sparse_attention_backward`:
`sparse_attention_with_lse`.

On Hopper, kernels read latents of 512 + 64 channels in BF16 or FP8, 64 heads at a time; torch computes the rest. Where
there are few queries, their lists are divided among thread blocks (split-KV), whose partial results are merged in the
order of the lists; shapes alone decide how. With lse lists are not divided: training has many queries. The order of
sums is unspecified otherwise. The softmax's weights, and latents in FP8, are rounded to BF16 before they are
multiplied.

Source: DeepSeek-V3.2-Exp §2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp); FlashMLA's sparse attention
(https://github.com/deepseek-ai/FlashMLA).
Shapes: S queries, H heads, C channels of a latent, W = C + those of the rotary key, T rows, K top-k positions,
P pages, M pages of a text at most.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from octile.kernels.cuda.attention import sparse_mla as kernel
from octile.ops.latent_cache import PAGE, check_cache, check_row, rope_dim_of, rows_in_float32
from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import INPUT_DTYPES, check_device, check_input_dtype
from octile.ops.top_keys import ABSENT

MAX_ELEMENTS = 2**26  # of latents that are gathered at the same time
MAX_SPLITS = kernel.MAX_SPLITS


@operator()
def sparse_attention(
    q: Tensor, latents: Tensor, positions: Tensor, latent_dim: int, scale: float, n_splits: int = 0
) -> Tensor:
    """Attend from each query to its top-k rows of the latents.

    Args:
        q: [S, H, W], float32, bfloat16 or float16: queries times the keys' weight, then rotary queries.
        latents: [T, W], float32, bfloat16 or float16: latents, then rotary keys; or FP8 rows, [T, bytes] uint8, as in
            `octile.ops.latent_cache.write_latents`.
        positions: [S, K] int32, as `octile.ops.top_keys.top_keys` returns them: rows of latents, each at most once (of
            one that is there twice, gradients are undefined); −1 stands for none. Their order does not matter.
        latent_dim: C.
        scale: the factor of the scores.
        n_splits: parts into which Hopper's kernel divides a list, at most 128; 0: chosen by shapes. With a given
            number, the result of a query does not depend on how many there are.

    Returns:
        o [S, H, C] in q's dtype; zeros for a query without a position.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, or n_splits is not from 0 to 128; on a CPU, a position is not
            from −1 to below T. A GPU attends to none of those.
    """
    check_operands(q, latents, positions, latent_dim, n_splits)
    check_positions(positions, len(latents))
    return _attend(q, latents, positions, latent_dim, scale)


@operator()
def sparse_attention_with_lse(
    q: Tensor, latents: Tensor, positions: Tensor, latent_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend as `sparse_attention`, and return what the backward pass needs.

    Args:
        q, latents, positions, latent_dim, scale: as in `sparse_attention`.

    Returns:
        o [S, H, C] in q's dtype, zeros for a query without a position; and lse [S, H] float32, the natural logarithm of
        Σ exp(s) over the top-k positions, −inf where there is none.

    Raises:
        TypeError, ValueError: as in `sparse_attention`.
    """
    check_operands(q, latents, positions, latent_dim)
    check_positions(positions, len(latents))
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    return _attend(q, latents, positions, latent_dim, scale, lse), lse


@operator()
def paged_sparse_attention(
    q: Tensor, cache: Tensor, pages: Tensor, positions: Tensor, latent_dim: int, scale: float, n_splits: int = 0
) -> Tensor:
    """Attend from each query to top-k positions of its text in the paged cache.

    Args:
        q, latent_dim, scale, n_splits: as in `sparse_attention`.
        cache: [P, 64, W] or FP8 rows, as in `octile.ops.latent_cache.write_latents`.
        pages: int32 [S, M], the pages of each query's text in their order; only those of top-k positions are read.
        positions: [S, K] int32, positions of the text, each at most once; −1 stands for none.

    Returns:
        o [S, H, C] in q's dtype; zeros for a query without a position.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, or n_splits is not from 0 to 128; on a CPU, a position is not
            from −1 to below 64·M, or its page is not in the cache. A GPU attends to none of those.
    """
    _check_paged(q, cache, pages, positions, latent_dim, n_splits)
    check_positions(positions, PAGE * pages.shape[1])
    return _attend(q, cache.flatten(0, 1), _slots(pages, positions, len(cache)), latent_dim, scale)


def _slots(pages: Tensor, positions: Tensor, n_pages: int) -> Tensor:
    """Return the rows of a cache at positions, −1 where there is none.

    Raises:
        ValueError: on a CPU, a page that is read is not in the cache.
    """
    is_position = (positions >= 0) & (positions < PAGE * pages.shape[1])
    if not pages.shape[1]:
        return torch.full_like(positions, ABSENT)
    position = positions.where(is_position, 0).long()
    page = pages.gather(1, position // PAGE)
    is_page = (page >= 0) & (page < n_pages)
    if page.device.type == "cpu" and not bool((is_page | ~is_position).all()):
        raise ValueError(f"pages must be from 0 to below {n_pages}, not {sorted(set(page[is_position].tolist()))}")
    return (page * PAGE + position % PAGE).where(is_position & is_page, ABSENT).int()


def _attend(
    q: Tensor, latents: Tensor, positions: Tensor, latent_dim: int, scale: float, lse_SH: Tensor | None = None
) -> Tensor:
    """Compute o [S, H, C] in q's dtype, and write to lse [S, H] float32, where it is −inf before."""
    s, h, _ = q.shape
    o_SHC = q.new_zeros(s, h, latent_dim)
    with without_autocast(q.device):
        for part in query_blocks(q, latents, positions):
            keys_SKW, is_absent_SK = gathered_keys(latents, positions[part], latent_dim)
            scores_SHK = torch.bmm(q[part].float() * scale, keys_SKW.mT).masked_fill_(is_absent_SK[:, None], -torch.inf)
            if lse_SH is not None:
                lse_SH[part] = scores_SHK.logsumexp(-1)
            p_SHK = scores_SHK.softmax(-1).masked_fill_(is_absent_SK.all(1)[:, None, None], 0.0)
            o_SHC[part] = torch.bmm(p_SHK, keys_SKW[..., :latent_dim]).to(q.dtype)
    return o_SHC


def query_blocks(q: Tensor, latents: Tensor, positions: Tensor) -> Iterator[slice]:
    """Divide the queries into blocks, whose gathered rows and scores have at most MAX_ELEMENTS each, or of one query.

    There is no block where no query has a position.
    """
    s, h, width = q.shape
    k = positions.shape[1]
    if not k or not len(latents):
        return
    rows = max(MAX_ELEMENTS // (k * max(h, width)), 1)
    for first in range(0, s, rows):
        yield slice(first, first + rows)


def gathered_keys(latents: Tensor, positions: Tensor, latent_dim: int) -> tuple[Tensor, Tensor]:
    """Return the rows at positions [S, K], float32 [S, K, W], zeros where there is none; and where, bool [S, K]."""
    is_absent_SK = (positions < 0) | (positions >= len(latents))
    keys_SKW = rows_in_float32(latents[positions.masked_fill(is_absent_SK, 0).long()], latent_dim)
    return keys_SKW.masked_fill_(is_absent_SK[..., None], 0.0), is_absent_SK  # a NaN there is not read


@sparse_attention.register_fake
def _(q, latents, positions, latent_dim, scale, n_splits=0):
    return q.new_empty(*q.shape[:2], latent_dim)


@sparse_attention_with_lse.register_fake
def _(q, latents, positions, latent_dim, scale):
    return q.new_empty(*q.shape[:2], latent_dim), q.new_empty(q.shape[:2], dtype=torch.float32)


@paged_sparse_attention.register_fake
def _(q, cache, pages, positions, latent_dim, scale, n_splits=0):
    return q.new_empty(*q.shape[:2], latent_dim)


@sparse_attention.register_kernel("cuda")
def _(q, latents, positions, latent_dim, scale, n_splits=0):
    check_operands(q, latents, positions, latent_dim, n_splits)
    if kernel.why_unsupported(q, latents, positions, latent_dim):
        return _attend(q, latents, positions, latent_dim, scale)
    return kernel.launch(q, latents, positions, None, scale, n_splits)


@sparse_attention_with_lse.register_kernel("cuda")
def _(q, latents, positions, latent_dim, scale):
    check_operands(q, latents, positions, latent_dim)
    q, latents = q.contiguous(), latents.contiguous()
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if kernel.why_unsupported(q, latents, positions, latent_dim):
        return _attend(q, latents, positions, latent_dim, scale, lse), lse
    return kernel.launch(q, latents, positions, None, scale, 1, lse), lse


@paged_sparse_attention.register_kernel("cuda")
def _(q, cache, pages, positions, latent_dim, scale, n_splits=0):
    _check_paged(q, cache, pages, positions, latent_dim, n_splits)
    if not pages.shape[1] or kernel.why_unsupported(q, cache, positions, latent_dim):
        return _attend(q, cache.flatten(0, 1), _slots(pages, positions, len(cache)), latent_dim, scale)
    return kernel.launch(q, cache, positions, pages, scale, n_splits)


def check_operands(q: Tensor, latents: Tensor, positions: Tensor, latent_dim: int, n_splits: int = 0) -> None:
    """Raise TypeError or ValueError if arguments of these names do not fit together; see `sparse_attention`."""
    _check_queries(q, positions, latent_dim, n_splits)
    if latents.dtype not in (*INPUT_DTYPES, torch.uint8):
        raise TypeError(f"latents must be float32, bfloat16, float16 or, for FP8 rows, uint8, not {latents.dtype}")
    if latents.dim() != 2:
        unit = "bytes" if latents.dtype == torch.uint8 else "W"
        raise ValueError(f"latents must be [T, {unit}], not {tuple(latents.shape)}")
    check_row(latents, latent_dim)
    width = latent_dim + rope_dim_of(latents, latent_dim)
    if q.shape[2] != width:
        raise ValueError(f"q must have the {width} channels of latents, not {q.shape[2]}")
    check_device("q", q, "latents", latents)


def _check_paged(q: Tensor, cache: Tensor, pages: Tensor, positions: Tensor, latent_dim: int, n_splits: int) -> None:
    _check_queries(q, positions, latent_dim, n_splits)
    check_cache(cache, latent_dim)
    width = latent_dim + rope_dim_of(cache, latent_dim)
    if q.shape[2] != width:
        raise ValueError(f"q must have the {width} channels of the cache, not {q.shape[2]}")
    check_device("q", q, "cache", cache)
    _check_lists("pages", pages, q, "M")


def _check_queries(q: Tensor, positions: Tensor, latent_dim: int, n_splits: int) -> None:
    check_input_dtype("q", q)
    if q.dim() != 3:
        raise ValueError(f"q must be [S, H, W], not {tuple(q.shape)}")
    if not 1 <= latent_dim <= q.shape[2]:
        raise ValueError(f"latent_dim must be from 1 to the {q.shape[2]} channels, not {latent_dim}")
    _check_lists("positions", positions, q, "K")
    if not 0 <= n_splits <= MAX_SPLITS:
        raise ValueError(f"n_splits must be from 0 to {MAX_SPLITS}, not {n_splits}")


def _check_lists(name: str, lists: Tensor, q: Tensor, size: str) -> None:
    """Check a list of numbers for each query: int32 [S, size]."""
    if lists.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, not {lists.dtype}")
    if lists.dim() != 2 or len(lists) != len(q):
        raise ValueError(f"{name} must be ({len(q)}, {size}), a row for each query, not {tuple(lists.shape)}")
    check_device("q", q, name, lists)


def check_lse(lse: Tensor, q: Tensor) -> None:
    """Raise TypeError or ValueError if lse is not float32 [S, H] for q [S, H, W]."""
    if lse.dtype != torch.float32:
        raise TypeError(f"lse must be float32, not {lse.dtype}")
    if lse.shape != q.shape[:2]:
        raise ValueError(f"lse must be {tuple(q.shape[:2])}, not {tuple(lse.shape)}")
    check_device("q", q, "lse", lse)


def check_positions(positions: Tensor, n: int) -> None:
    """Check on a CPU that positions are from −1 to below n; on a GPU the values are not on the host.

    Raises:
        ValueError: one is not.
    """
    if positions.device.type == "cpu" and positions.numel():
        least, most = int(positions.min()), int(positions.max())
        if least < ABSENT or most >= n:
            raise ValueError(f"positions must be from -1 to below {n}, not from {least} to {most}")
