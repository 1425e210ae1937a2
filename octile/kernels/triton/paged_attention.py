# mypy: allow-untyped-defs
"""Absorbed attention over a paged latent cache, as `octile.ops.paged_attention` specifies: split-KV and its merge.

    attend_pages     a program takes a row, a block of its heads and one split of its positions; a page at a time, or
                     half of it, it multiplies queries and keys, and the softmax's weights and latents, with a running
                     maximum
    merge_splits     a program takes a row and a head, and adds the splits' results in the order of the positions

The splits of a row follow from its own length: equally many pages each, the last ones fewer or none. With parts each
split is a part, which is merged where the row has positions in more than the first one, so that bits do not depend on
the pages of the other rows. Consecutive rows of a text are then one row with the heads of all of them. Its blocks are
full, and each reads its pages once: the keys behind a row's length have weights of zero, and leave its maximum and its
sums as they are. Blocks of later rows, which have more keys, begin first.

A split without positions has the logarithm -inf and no result. A split whose scores are NaN has NaN for both, and so
has its row. Grids follow from shapes, so both can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import DeviceProperties, device_properties
from octile.kernels.triton.fp8_bits import as_encoded, to_float
from octile.kernels.triton.launch_config import MERGE_SPLITS, PAGED_ATTENTION

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.402823466e38)  # the maximum of no scores, of which -inf can be subtracted
MAX_LATENT_OF_ROWS = 256  # channels of a latent to which rows of a text attend in blocks of more heads
RESERVED_BYTES = 1024  # of shared memory, for page numbers and sums of warps
MAX_PARTIALS = 2**20  # of a launch with parts, of one head each: with 512 channels 2 GiB


def launch(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    part: int = 0,
    rows_per_text: int = 1,
    n_splits: int = 0,
) -> Tensor:
    """Attend from q [R, H, W] to the first lengths [R] positions of pages [R, M] → o [R, H, C] in q's dtype.

    Without parts pages are read for each row, also where several rows have the same. n_splits: of each row, if it has
    no parts; 0: chosen by shapes.
    """
    if part:
        return launch_with_lse(q, cache, pages, lengths, latent_dim, scale, part, rows_per_text)[0]
    o = q.new_empty(*q.shape[:2], latent_dim)
    if not o.numel():
        return o
    if not pages.shape[1]:
        return o.zero_()
    attend(q, cache, pages, lengths, o, None, scale, 0, n_splits)
    return o


def launch_with_lse(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    part: int,
    rows_per_text: int,
) -> tuple[Tensor, Tensor]:
    """Attend as `launch` with parts; also return the logarithm of each softmax's denominator, float32 [R, H]."""
    rows, heads, _ = q.shape
    o = q.new_empty(rows, heads, latent_dim)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if not o.numel() or not pages.shape[1]:
        return o.zero_(), lse.fill_(float("-inf"))
    n_parts = -(-pages.shape[1] * cache.shape[1] // part)
    together = rows_together(heads * n_parts, rows_per_text)
    at_once = max(MAX_PARTIALS // (n_parts * together * heads), 1) * together
    for q_R, pages_R, lengths_R, o_R, lse_R in zip(
        *(t.split(at_once) for t in (q, pages, lengths, o, lse)), strict=True
    ):
        texts = q_R.view(-1, together * heads, q.shape[2]), cache, pages_R[::together], lengths_R
        results = o_R.view(-1, together * heads, latent_dim), lse_R.view(-1, together * heads)
        attend(*texts, *results, scale, part, n_parts)
    return o, lse


def rows_together(partials: int, rows_per_text: int) -> int:
    """Return how many of a text's consecutive rows are one row with the heads of all of them.

    All of them, if a launch can have so many partial results, of which a row has `partials`.
    """
    most = min(max(MAX_PARTIALS // partials, 1), rows_per_text)
    return next(n for n in range(most, 0, -1) if rows_per_text % n == 0)


def choose_heads(q: Tensor, latent_dim: int, part: int) -> int:
    """Return the heads of a program: with parts the same for any rows, since few may be added up in another order.

    Rows of a text attend together in as many as Hopper's tensor cores multiply at once, if they fit into registers.
    """
    has_room = q.dtype != torch.float32 and latent_dim <= MAX_LATENT_OF_ROWS
    if part and has_room and device_properties(q.device).shared_bytes >= SHARED_BYTES:
        return PAGED_ATTENTION["MAX_HEADS_OF_ROWS"]
    return min(max(triton.next_power_of_2(q.shape[1]), 16), PAGED_ATTENTION["MAX_HEADS"])


def attend(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    o: Tensor,
    lse: Tensor | None,
    scale: float,
    part: int,
    n_splits: int,
) -> None:
    """Attend from some rows at once, into o and with parts lse, in so many splits; 0: chosen by shapes.

    Of a row that is several rows of a text, lengths has one for each.
    """
    rows, heads, width = q.shape
    latent_dim = o.shape[2]
    block_h = choose_heads(q, latent_dim, part)
    head_blocks = triton.cdiv(heads, block_h)
    gpu, is_fp8 = device_properties(q.device), cache.dtype == torch.uint8
    n_splits = n_splits or choose_splits(rows * head_blocks, gpu.num_sms)  # not by M: bits would depend on other rows
    # conversions of FP8 need registers, those in integer arithmetic more
    takes_rows = block_h > PAGED_ATTENTION["MAX_HEADS"]
    keys = PAGED_ATTENTION["KEYS_OF_ROWS" if takes_rows else "KEYS"] // (2 if is_fp8 and not gpu.fp8 else 1)
    num_warps = 8 if is_fp8 or takes_rows else 4
    data = scales = ropes = cache
    if is_fp8:  # the same bytes in three dtypes
        data, scales, ropes = (cache.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16))
        data = as_encoded(data)
    is_merged, queries, partial, lse_of_splits = n_splits == 1, len(lengths) // rows, o, o if lse is None else lse
    if not is_merged:
        partial = q.new_empty(rows, heads, n_splits, latent_dim, dtype=torch.float32)
        lse_of_splits = q.new_empty(rows, heads, n_splits, dtype=torch.float32)
    cs, rs = max(triton.next_power_of_2(latent_dim), 128), max(triton.next_power_of_2(width - latent_dim), 16)
    with torch.cuda.device_of(q):
        attend_pages[(rows * head_blocks, n_splits)](
            q, data, scales, ropes, pages, lengths, o, partial, lse_of_splits,
            scale, heads, queries, cache.shape[2], pages.stride(0), lengths.stride(0), n_splits, part // cache.shape[1],
            PAGE=cache.shape[1], KEYS=keys, C=latent_dim, CS=cs, R=width - latent_dim, RS=rs,
            HEADS=block_h, FP8=is_fp8, MERGED=is_merged, PARTS=part > 0,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=num_warps, num_stages=choose_stages(block_h, keys, cs + rs, is_fp8, gpu),
        )  # fmt: skip
        if not is_merged:
            merge_splits[(rows * heads,)](
                partial, lse_of_splits, lengths, o, lse_of_splits if lse is None else lse, heads // queries,
                lengths.stride(0), n_splits, part, PARTS=part > 0, C=latent_dim,
                CS=triton.next_power_of_2(latent_dim), **MERGE_SPLITS,
            )  # fmt: skip


def choose_splits(programs: int, num_sms: int) -> int:
    """Return into how many splits a row's positions are divided: several programs an SM, as texts differ in length."""
    splits = triton.next_power_of_2(PAGED_ATTENTION["PROGRAMS"] * num_sms // max(programs, 1))
    return min(max(splits, 1), PAGED_ATTENTION["MAX_SPLITS"])


def choose_stages(block_h: int, keys: int, columns: int, is_fp8: bool, gpu: DeviceProperties) -> int:
    """Return the stages of a program's loop: for rows of a text as many as it takes to load two blocks of keys ahead.

    With fewer a block is loaded while the one before is multiplied with the softmax's weights, which takes less time.
    Queries and blocks of keys have `columns` BF16 channels. Rows in FP8 would spill.
    """
    takes_rows = block_h > PAGED_ATTENTION["MAX_HEADS"] and not is_fp8
    if takes_rows and (block_h + 3 * keys) * columns * 2 < gpu.shared_bytes - RESERVED_BYTES:
        return PAGED_ATTENTION["STAGES_OF_ROWS"]
    return PAGED_ATTENTION["num_stages"]


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    pages, lengths = cases.empty(256, 64, dtype=torch.int32), cases.empty(256, dtype=torch.int32)

    def paged(heads: int, cached: torch.dtype, part: int = 0) -> None:
        launch(cases.empty(256, heads, 576), cases.latent_cache(cached), pages, lengths, 512, 0.1, part, 4)

    def of_small() -> None:
        launch(cases.empty(256, 6, 320), cases.empty(4096, 64, 320), pages[:, :32], lengths, 256, 0.1, 2048, 256)

    return {
        "paged attention": lambda: paged(16, cases.BF16),
        "paged attention of V3, FP8": lambda: paged(128, torch.uint8),
        "paged attention, parts": lambda: paged(16, cases.BF16, 512),
        "paged attention of V3, FP8, parts": lambda: paged(128, torch.uint8, 512),
        "paged attention of small, one part": of_small,
    }


@triton.jit(do_not_specialize=["heads", "queries", "page_row", "n_splits", "part_pages"])  # of the step's rows
def attend_pages(
    q, data, scales, ropes, pages, lengths, o, partial, lse, scale, heads, queries, row_size, page_row, length_step,
    n_splits, part_pages,
    PAGE: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RS: tl.constexpr,
    HEADS: tl.constexpr, FP8: tl.constexpr, MERGED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the split's normalized result and the logarithm, to base 2, of its softmax's denominator.

    With MERGED, of a single split, the result is final, and with PARTS lse is the natural logarithm. The result of a
    first part is final, too, where the row has no positions in others.
    """
    blocks = tl.cdiv(heads, HEADS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    split = tl.program_id(1)
    h = (blocks - 1 - tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    query = row * queries + h // (heads // queries)
    own = tl.load(lengths + query * length_step, mask=h < heads, other=0)
    length = tl.max(own, axis=0)
    n_pages = tl.cdiv(length, PAGE)
    per_split = tl.where(part_pages > 0, part_pages, tl.cdiv(n_pages, n_splits))
    first = split * per_split
    last = tl.minimum(first + per_split, n_pages)
    c = tl.arange(0, CS)
    r = tl.arange(0, RS)
    out = row * heads + h
    at = (row * heads + h)[:, None] * (C + R)
    q_c = tl.load(q + at + c[None, :], mask=(h < heads)[:, None] & (c < C)[None, :], other=0.0)
    q_r = tl.load(q + at + C + r[None, :], mask=(h < heads)[:, None] & (r < R)[None, :], other=0.0)
    highest = tl.full([HEADS], LOWEST, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, CS], tl.float32)
    key = tl.arange(0, KEYS)
    for position in range(first * PAGE, tl.minimum(last * PAGE, length), KEYS):
        page = tl.load(pages + row * page_row + position // PAGE).to(tl.int64)
        start = (page * PAGE + position % PAGE + key) * row_size  # in elements of data
        inside = position + key < length
        here = inside[:, None] & (c < C)[None, :]
        latent = tl.load(data + start[:, None] + c[None, :], mask=here, other=0.0)
        if FP8:
            tile = tl.arange(0, CS // 128)
            mask = inside[:, None] & (tile * 128 < C)[None, :]
            tile_scale = tl.load(scales + ((start + C) // 4)[:, None] + tile[None, :], mask=mask, other=0.0)
            tiles = tl.reshape(to_float(latent, 3), [KEYS, CS // 128, 128]) * tile_scale[:, :, None]
            latent = tl.reshape(tiles, [KEYS, CS]).to(q_c.dtype)
            start_r = (start + C + (C + 127) // 128 * 4) // 2
        else:
            latent = latent.to(q_c.dtype)
            start_r = start + C
        rotary = tl.load(ropes + start_r[:, None] + r[None, :], mask=inside[:, None] & (r < R)[None, :], other=0.0)
        score = tl.dot(q_c, tl.trans(latent), input_precision=PRECISION)
        score += tl.dot(q_r, tl.trans(rotary.to(q_r.dtype)), input_precision=PRECISION)
        is_own = (position + key)[None, :] < own[:, None]
        score = tl.where(is_own, score * (scale * LOG2E), float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        weight = tl.exp2(score - new_highest[:, None])
        correction = tl.exp2(highest - new_highest)
        total = total * correction + tl.sum(weight, axis=1)
        sums = sums * correction[:, None] + tl.dot(weight.to(latent.dtype), latent, input_precision=PRECISION)
        highest = new_highest

    result = sums / tl.where(total > 0, total, 1.0)[:, None]  # no position: zeros
    result += 0.0  # never −0, which a weight of zero may have made 0
    mask = (h < heads)[:, None] & (c < C)[None, :]
    at = out[:, None] * C + c[None, :]
    if MERGED:
        tl.store(o + at, result.to(o.dtype.element_ty), mask=mask)
        if PARTS:
            tl.store(lse + out, (highest + tl.log2(total)) * LN2, mask=h < heads)
    else:
        is_partial = total != 0
        if PARTS:
            has_others = own > part_pages * PAGE
            is_partial = is_partial & has_others
            if split == 0:
                tl.store(o + at, result.to(o.dtype.element_ty), mask=mask & (has_others == 0)[:, None])
        split_at = ((out * n_splits + split) * C)[:, None] + c[None, :]
        tl.store(partial + split_at, result, mask=mask & is_partial[:, None])
        tl.store(lse + out * n_splits + split, highest + tl.log2(total), mask=h < heads)


@triton.jit(do_not_specialize=["n_splits", "part"])
def merge_splits(
    partial, lse_of_splits, lengths, o, lse, heads, length_step, n_splits, part,
    PARTS: tl.constexpr, C: tl.constexpr, CS: tl.constexpr,
):  # fmt: skip
    """Add the splits of one of the heads of a query, weighted by their shares of the softmax's denominator, in order.

    With parts it also writes lse, the natural logarithm of that denominator.
    """
    out = tl.program_id(0).to(tl.int64)
    count = n_splits
    if PARTS:
        count = tl.cdiv(tl.load(lengths + out // heads * length_step), part)
        if count <= 1:
            tl.store(lse + out, tl.load(lse_of_splits + out * n_splits) * LN2)
            return
    c = tl.arange(0, CS)
    highest = tl.load(lse_of_splits + out * n_splits)  # only the first splits may have positions
    for split in range(1, count):
        highest = tl.maximum(highest, tl.load(lse_of_splits + out * n_splits + split))
    total = 0.0
    sums = tl.zeros([CS], tl.float32)
    for split in range(count):
        split_lse = tl.load(lse_of_splits + out * n_splits + split)
        if split_lse != float("-inf"):  # NaN is not skipped
            share = tl.exp2(split_lse - highest)
            total += share
            sums += share * tl.load(partial + (out * n_splits + split) * C + c, mask=c < C, other=0.0)
    result = sums / tl.where(total > 0, total, 1.0)
    tl.store(o + out * C + c, result.to(o.dtype.element_ty), mask=c < C)
    if PARTS:
        tl.store(lse + out, (highest + tl.log2(total)) * LN2)
