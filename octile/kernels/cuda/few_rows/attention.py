"""Launcher of Hopper's kernels of latent attention for at most 8 decode rows, as `octile.ops.few_rows` specifies them.

    latent_queries   queries times W_UK, rotations, and the rows' latents, normalized, to the cache
    mla_few_rows     attention to a split of a row's positions, by halves of pages
    merge_values     merges the splits of a row, and multiplies by W_UV

With the bits of the operators in batch-invariant mode:

    latent_queries   as above
    mla_one_row      attention to a part of one row's positions, by a cluster of thread blocks
    values_one_row   merges the parts, and multiplies by W_UV

See `octile.kernels.cuda.few_rows.launcher` for how they are launched.
"""

import torch
from torch import Tensor

from octile.kernels.cuda.attention.mla_decode import LATENT, MERGE_THREADS, PAGE, ROTARY, WIDTH
from octile.kernels.cuda.few_rows.launcher import MAX_KEYS, MAX_ROWS, SUMS_BYTES, TILE_ROWS, WARPS, prepare
from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel
from octile.kernels.cuda.quantize.launcher import DTYPES, norm_parts
from octile.kernels.memory_layout import VECTOR
from octile.kernels.row_invariant import CHUNK

HEADS, KEYS, STAGES = 16, 32, 4  # of a thread block of mla_few_rows.cu
CLUSTER = 8  # of merge_values.cu
MAX_SPLITS = 64  # of a row
# Of mla_one_row.cu, whose clusters have CLUSTER thread blocks and take as many pages at a time. An H100 has room for
# about 16 of them at a time.
PART_PAGES, ONE_ROW_HEADS, MAX_CLUSTERS = 32, 8, 16

_prepared: BoundedCache[PreparedKernel] = BoundedCache(MAX_KEYS)


def why_no_queries(
    q: Tensor, kv: Tensor, w_k: Tensor, norm_weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor
) -> str | None:
    """Return why `latent_queries` does not support a call; None: it does."""
    if (why := _why_not_rows(q, w_k)) is not None:
        return why
    (_, latent, nope), rotary = w_k.shape, kv.shape[1] - w_k.shape[1]
    if (latent, rotary) != (LATENT, ROTARY) or nope % 16:
        return (
            f"heads have {nope} + {rotary} channels and latents {latent}, not a multiple of 16 + {ROTARY} and {LATENT}"
        )
    if cache.dtype not in (torch.bfloat16, torch.uint8) or cache.data_ptr() % VECTOR:
        return f"the cache is {cache.dtype}, not bfloat16 or FP8 rows, or begins at no multiple of {VECTOR} bytes"
    if norm_weight.dtype not in (torch.float32, torch.bfloat16) or not norm_weight.is_contiguous():
        return "the norm's weight is neither float32 nor bfloat16, or not contiguous"
    rows = (q, kv)
    if any(t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % VECTOR for t in rows):
        return f"the rows of q or kv are not contiguous, or do not begin at multiples of {VECTOR} bytes"
    if cos.shape != (len(q), rotary // 2) or not (
        cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous()
    ):
        return "the cosines, sines or slots are not contiguous"
    return request.why_not_on(q.device)


def why_no_row_invariant_queries(w_k: Tensor, norm_weight: Tensor) -> str | None:
    """Return why `latent_queries` may not have the bits of the operators in batch-invariant mode; None: it has them."""
    if norm_weight.data_ptr() % VECTOR:
        return f"the norm's weight does not begin at a multiple of {VECTOR} bytes: another kernel normalizes many rows"
    if w_k.shape[2] > CHUNK:
        return f"heads have {w_k.shape[2]} channels, more than the {CHUNK} that are summed without a break"
    return None


def why_no_values(q: Tensor, cache: Tensor, pages: Tensor, w_v: Tensor, row_invariant: bool = False) -> str | None:
    """Return why `attention_values`, or `row_invariant_values`, does not support a call; None: it does."""
    if (why := _why_not_rows(q, w_v)) is not None:
        return why
    if cache.dtype != torch.bfloat16 or (w_v.shape[2], q.shape[2]) != (LATENT, WIDTH):
        return f"the cache is {cache.dtype}, or rows do not have {LATENT} + {ROTARY} channels"
    tile_rows = TILE_ROWS if row_invariant else CLUSTER * TILE_ROWS
    if w_v.shape[1] % tile_rows:
        return f"values have {w_v.shape[1]} channels, not a multiple of {tile_rows}"
    if row_invariant and len(q) > 1:
        return f"there are {len(q)} rows, not 1"
    if not pages.shape[1] or not cache.shape[0] or pages.stride(1) != 1:
        return "there are no pages, or their rows are not contiguous"
    if q.data_ptr() % VECTOR or cache.data_ptr() % VECTOR or not q.is_contiguous():
        return f"q is not contiguous, or q or the cache does not begin at a multiple of {VECTOR} bytes"
    return request.why_not_on(q.device)


def _why_not_rows(q: Tensor, weight: Tensor) -> str | None:
    if not 0 < len(q) <= MAX_ROWS:
        return f"there are {len(q)} rows, not 1 to {MAX_ROWS}"
    if q.dtype != torch.bfloat16:
        return f"q is {q.dtype}, not bfloat16"
    if not weight.is_contiguous() or weight.data_ptr() % VECTOR or not weight.numel():
        return "the weight is empty, or not contiguous"
    return None


def latent_queries(
    q: Tensor, kv: Tensor, w_k: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, slots: Tensor,
    cache: Tensor,
) -> Tensor:  # fmt: skip
    """Compute the absorbed queries [M, H, C + R] of q [M, H·(N + R)], and write the latents of kv [M, C + R]."""
    m, (n_heads, latent, nope) = len(q), w_k.shape
    is_fp8 = cache.dtype == torch.uint8
    key = "latent_queries", m, n_heads, latent, nope, is_fp8, norm_weight.dtype, q.device
    prepared = _prepared[key]
    if prepared is None:
        constants = plan_queries(m, latent, nope, kv.shape[1] - latent, is_fp8, norm_weight.dtype)
        prepared = _prepared[key] = prepare("latent_queries", constants, n_heads * (latent // 128) + m, q.device)
    out = q.new_empty(m, n_heads, kv.shape[1])
    prepared.launch_at(
        (q.data_ptr(), q.stride(0), kv.data_ptr(), kv.stride(0), w_k.data_ptr(), norm_weight.data_ptr(), eps,
         cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), cache.data_ptr(), cache.shape[0] * cache.shape[1],
         out.data_ptr(), n_heads)
    )()  # fmt: skip
    return out


def attention_values(q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, w_v: Tensor, scale: float) -> Tensor:
    """Attend from q [M, H, 576] to the first lengths [M] positions of pages, times w_v [H, V, 512] → [M, H·V]."""
    (m, n_heads, _), values = q.shape, w_v.shape[1]
    splits = splits_of(m)
    key = "mla_few_rows", m, n_heads, values, q.device
    attend, merge = _prepared[key], _prepared[("merge_values", *key[1:])]
    if attend is None or merge is None:
        grid = m * splits * -(-n_heads // HEADS)
        attend = _prepared[key] = prepare("mla_few_rows", plan_attention(), grid, q.device)
        merge = _prepared[("merge_values", *key[1:])] = prepare(
            "merge_values", plan_merge(m, values), n_heads * CLUSTER, q.device, cluster=CLUSTER
        )
    partial = q.new_empty(m, splits, n_heads, LATENT, dtype=torch.float32)
    lse = q.new_empty(m, splits, n_heads, dtype=torch.float32)
    out = q.new_empty(m, n_heads * values)
    length_arguments = lengths.data_ptr(), lengths.stride(0)
    attend.launch_at(
        (q.data_ptr(), cache.data_ptr(), pages.data_ptr(), pages.stride(0), *length_arguments, partial.data_ptr(),
         lse.data_ptr(), scale, n_heads, splits)
    )()  # fmt: skip
    merge.launch_at(
        (partial.data_ptr(), lse.data_ptr(), *length_arguments, w_v.data_ptr(), out.data_ptr(), n_heads, splits)
    )()
    return out


def row_invariant_values(q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, w_v: Tensor, scale: float) -> Tensor:
    """Compute `attention_values` of one row with the bits of the operators in batch-invariant mode."""
    (m, n_heads, _), values, max_parts = q.shape, w_v.shape[1], -(-pages.shape[1] // PART_PAGES)
    clusters = clusters_of(n_heads, max_parts)
    key = "mla_one_row", n_heads, clusters, values, q.device
    attend, merge = _prepared[key], _prepared[("values_one_row", *key[1:])]
    if attend is None or merge is None:
        attend = _prepared[key] = prepare("mla_one_row", plan_one_row(), clusters * CLUSTER, q.device, cluster=CLUSTER)
        merge = _prepared[("values_one_row", *key[1:])] = prepare(
            "values_one_row", plan_values(values), n_heads * values // TILE_ROWS, q.device, threads=MERGE_THREADS
        )
    partial = q.new_empty(max_parts, n_heads, LATENT, dtype=torch.float32)
    lse = q.new_empty(max_parts, n_heads, dtype=torch.float32)
    out = q.new_empty(m, n_heads * values)
    pointers = partial.data_ptr(), lse.data_ptr()
    attend.launch_at(
        (q.data_ptr(), cache.data_ptr(), pages.data_ptr(), lengths.data_ptr(), *pointers, scale, n_heads)
    )()
    merge.launch_at((*pointers, lengths.data_ptr(), w_v.data_ptr(), out.data_ptr(), n_heads))()
    return out


def clusters_of(n_heads: int, max_parts: int) -> int:
    """Return how many clusters of mla_one_row.cu share the heads and the parts of a row."""
    head_blocks = -(-n_heads // ONE_ROW_HEADS)
    return head_blocks * max(min(max_parts, MAX_CLUSTERS // head_blocks), 1)


def splits_of(m: int) -> int:
    """Return into how many parts the positions of each of m rows are divided."""
    return MAX_SPLITS if m <= 2 else MAX_SPLITS // 2 if m <= 4 else MAX_SPLITS // 4


def plan_queries(
    m: int, latent: int, nope: int, rotary: int, is_fp8: bool, norm_dtype: torch.dtype
) -> dict[str, int | bool]:
    """Return the constants of latent_queries.cu."""
    units, warps = norm_parts(latent)
    return {
        "rows": m, "latent": latent, "nope": nope, "rotary": rotary, "fp8": is_fp8, "norm_units": units,
        "norm_warps": warps, "weight_dtype": DTYPES[norm_dtype], "shared_bytes": 4 * WARPS,
    }  # fmt: skip


def plan_attention() -> dict[str, int | bool]:
    """Return the constants of mla_few_rows.cu."""
    rows = (STAGES * KEYS + HEADS) * (2 * WIDTH + VECTOR)
    scores, weights = 4 * HEADS * (KEYS + 8) * 4, HEADS * (2 * KEYS + VECTOR)
    return {"stages": STAGES, "shared_bytes": rows + scores + weights + 2 * HEADS * 4 + STAGES * 8}


def plan_merge(m: int, values: int) -> dict[str, int | bool]:
    """Return the constants of merge_values.cu."""
    merged, parts = MAX_ROWS * (2 * LATENT + VECTOR), 16 * LATENT // CLUSTER * 4
    return {
        "rows": m,
        "values": values,
        "splits": splits_of(m),
        "shared_bytes": merged + parts + MAX_ROWS * 4 + SUMS_BYTES,
    }


def plan_one_row() -> dict[str, int | bool]:
    """Return the constants of mla_one_row.cu."""
    keys = CLUSTER * PAGE
    rows = (PAGE + ONE_ROW_HEADS) * (2 * WIDTH + VECTOR) + keys * (2 * LATENT // CLUSTER + VECTOR)
    scores = 2 * ONE_ROW_HEADS * (keys + 4) * 4
    weights = ONE_ROW_HEADS * (2 * keys + VECTOR)
    head_values = ONE_ROW_HEADS * (CLUSTER // 2 * 8 + 4 + 4)
    return {"part_pages": PART_PAGES, "shared_bytes": rows + scores + weights + head_values + 2 * 8}


def plan_values(values: int) -> dict[str, int | bool]:
    """Return the constants of values_one_row.cu."""
    return {"values": values, "part_pages": PART_PAGES, "shared_bytes": 2 * LATENT}
