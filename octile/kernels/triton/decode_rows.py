# mypy: allow-untyped-defs
"""Few rows of tokens to their experts on other GPUs and back, with few launches, for decoding.

As in `octile.kernels.triton.peer_rows` every row has a fixed place in the buffer of each rank, but there is no barrier
before the stores: each program adds 1 to a counter of each rank when it has stored, and the ranks wait for that.
Dispatch and combine alternate and have parts of the buffer of their own, so what a rank still reads of one exchange is
not overwritten by the next one of its kind: that begins when all ranks have begun the one between them.

    experts    [W, C, K]    int32, the chosen experts of all tokens
    rows       [W, C, D]    row t of rank w with its scales, if this rank has one of its experts
    results    [C, K, D]    what expert k of token t has computed

Shapes: W ranks, T tokens of this rank, C the most tokens of a rank, M = W · C, K experts per token, G experts of a
rank, D bytes of a row, S scales of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton.launch_config import DECODE_ROWS
from octile.kernels.triton.peer_rows import Peers, pointer, sizes, words


def launch_send(
    x: Tensor, scale: Tensor, experts: Tensor, local: int, capacity: int, scales_at: int, experts_at: int, peers: Peers
) -> int:
    """Write rows x [T, D] uint8, contiguous, their scales [T, S] of any strides and experts [T, K], contiguous.

    Args:
        local: G.
        capacity: C.
        scales_at, experts_at: where scales and experts are in a buffer, in bytes.

    Returns:
        how much is added to the counters of all ranks.
    """
    with torch.cuda.device_of(x):
        send_tokens[(capacity,)](
            words(x), scale, *scale.stride(), experts, len(x), peers.buffers, scales_at, experts_at, peers.flags,
            peers.rank, local, len(peers.buffers), capacity, **_row_sizes(x, scale), K=experts.shape[1],
            CHOSEN=triton.next_power_of_2(experts.shape[1]),
        )  # fmt: skip
    return capacity


def launch_place(
    rows: Tensor, scales: Tensor, experts: Tensor, first: int, out: Tensor, out_scale: Tensor, entries: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """Copy the rows that have come to their experts, sorted by rank and token.

    Args:
        rows, scales, experts: uint8 [M, D], float32 [M, S] and int32 [M, K], contiguous, in this rank's buffer.
        first: the first expert of this rank.
        out, out_scale: uint8 [G, M, D], contiguous, and float32 [G, M, S], which are written up to `counts`.
        entries: int32 [G, M], of which entry of experts each row is.
        counts: int32 [G], how many rows each expert has.
    """
    count = experts.numel()
    with torch.cuda.device_of(out):
        place_tokens[(len(out), DECODE_ROWS["splits"])](
            words(rows), scales, experts, count, first, words(out.view(-1, out.shape[2])), out_scale,
            *out_scale.stride(), entries, counts, out.shape[1], **sizes(rows, scales), K=experts.shape[1],
            ENTRIES=triton.next_power_of_2(count),
        )  # fmt: skip


def launch_return(y: Tensor, entries: Tensor, counts: Tensor, results: int, results_at: int, peers: Peers) -> int:
    """Write the first counts[g] rows of y [G, M, D] uint8, contiguous, to the ranks of their tokens.

    Args:
        entries, counts: as in `launch_place`.
        results: C · K.
        results_at: where results are in a buffer, in bytes.

    Returns:
        how much is added to the counters of all ranks.
    """
    splits = DECODE_ROWS["splits"]
    with torch.cuda.device_of(y):
        return_results[(len(y), splits)](
            words(y.view(-1, y.shape[2])), entries, counts, y.shape[1], peers.buffers, results, results_at, peers.flags,
            peers.rank, len(peers.buffers), **sizes(y.view(-1, y.shape[2]), None),
        )  # fmt: skip
    return len(y) * splits


def _row_sizes(x: Tensor, scale: Tensor) -> dict[str, int]:
    """Return what programs that have one row each have in common."""
    found = sizes(x, scale) | {"num_warps": DECODE_ROWS["num_warps"]}
    del found["ROWS"]
    return found


@triton.jit(do_not_specialize=["T", "rank", "local", "W", "C"])
def send_tokens(
    x, scale, scale_row, scale_col, experts, T, buffers, scales_at, experts_at, flags, rank, local, W, C,
    WORDS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr, SCALES: tl.constexpr,
    K: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """A program sends a token, or says that there is none."""
    token = tl.program_id(0).to(tl.int64)
    k, col, tile = tl.arange(0, CHOSEN), tl.arange(0, COLS), tl.arange(0, SCALES)
    is_token = token < T
    of = tl.load(experts + token * K + k, mask=k < tl.where(is_token, K, 0), other=-1)
    values = tl.load(x + token * WORDS + col, mask=col < tl.where(is_token, WORDS, 0))
    factors = tl.load(scale + token * scale_row + tile * scale_col, mask=tile < tl.where(is_token, TILES, 0))
    rank_of = tl.where(of < 0, -1, of // local)
    slot = rank * C + token
    for peer in range(W):
        to = tl.load(buffers + peer)
        is_sent = tl.max((rank_of == peer).to(tl.int32), axis=0) > 0
        tl.store((to + experts_at).to(tl.pointer_type(tl.int32)) + slot * K + k, of.to(tl.int32), mask=k < K)
        at = pointer(to, x.dtype, ALIGNED) + slot * WORDS + col
        tl.store(at, values, mask=col < tl.where(is_sent, WORDS, 0))
        scale_at = (to + scales_at).to(tl.pointer_type(tl.float32)) + slot * TILES + tile
        tl.store(scale_at, factors, mask=tile < tl.where(is_sent, TILES, 0))
    _arrive(flags, rank, W)


@triton.jit(do_not_specialize=["COUNT", "first_expert", "M"])
def place_tokens(
    rows, scales, experts, COUNT, first_expert, out, out_scale, out_scale_group, out_scale_row, out_scale_col, entries,
    counts, M,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr, K: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """A program finds the tokens of an expert, and copies a part of their rows."""
    group = tl.program_id(0).to(tl.int64)
    index, col, tile = tl.arange(0, ENTRIES), tl.arange(0, COLS), tl.arange(0, SCALES)
    is_ours = (tl.load(experts + index, mask=index < COUNT, other=-1) - first_expert == group).to(tl.int32)
    place = tl.cumsum(is_ours, axis=0) - is_ours
    count = tl.minimum(tl.sum(is_ours, axis=0), M)
    tl.store(entries + group * M + place, index, mask=(is_ours > 0) & (place < M))
    tl.store(counts + group, count)
    tl.debug_barrier()  # other threads read the entries
    for first in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        token = (tl.load(entries + group * M + row, mask=row < count, other=0) // K).to(tl.int64)
        inside = (row < count)[:, None] & (col < WORDS)[None, :]
        values = tl.load(rows + token[:, None] * WORDS + col[None, :], mask=inside)
        tl.store(out + (group * M + row)[:, None] * WORDS + col[None, :], values, mask=inside)
        inside = (row < count)[:, None] & (tile < TILES)[None, :]
        factors = tl.load(scales + token[:, None] * TILES + tile[None, :], mask=inside)
        at = group * out_scale_group + row[:, None] * out_scale_row + tile.to(tl.int64)[None, :] * out_scale_col
        tl.store(out_scale + at, factors, mask=inside)


@triton.jit(do_not_specialize=["M", "results", "rank", "W"])
def return_results(
    y, entries, counts, M, buffers, results, results_at, flags, rank, W,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """A program sends a part of the results of an expert."""
    group = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts + group), M)
    col = tl.arange(0, COLS)
    for first in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        index = tl.load(entries + group * M + row, mask=row < count, other=0)
        to_rank = index // results
        to = tl.load(buffers + to_rank, mask=row < count, other=0) + results_at
        to += (index - to_rank * results).to(tl.int64) * (WORDS * (y.dtype.element_ty.primitive_bitwidth // 8))
        inside = (row < count)[:, None] & (col < WORDS)[None, :]
        values = tl.load(y + (group * M + row)[:, None] * WORDS + col[None, :], mask=inside)
        tl.store(pointer(to, y.dtype, ALIGNED)[:, None] + col[None, :], values, mask=inside)
    _arrive(flags, rank, W)


@triton.jit
def _arrive(flags, rank, W):
    """Add 1 to this rank's counter on all ranks: what this program has stored is there."""
    tl.debug_barrier()  # all threads have stored
    for peer in range(W):
        flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_add(flag + rank, 1, sem="release", scope="sys")
