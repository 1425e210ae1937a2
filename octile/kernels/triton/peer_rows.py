# mypy: allow-untyped-defs
"""Rows of tokens to the memory of other GPUs and back, by stores over NVLink.

Every rank has a buffer that all ranks of the group can write to (`octile.parallel.symmetric_memory`). Each row has a
fixed place there, so no rank needs to know how many rows another one sends:

    experts    [W, M, K]    the chosen experts of all tokens
    rows       [W, M, C]    row t of rank w, if this rank has one of its experts
    results    [M, K, C]    what expert k of token t has computed

A barrier before the stores says that nobody reads the buffer any more. Another one after them says that they have
arrived; of `rows` each chunk has a flag instead, so that chunks are copied from the buffer while others are sent. Flags
are on the device: the host waits for nothing, and the launches can be captured in a CUDA graph. A launch has `num_sms`
programs, one on each SM. NVLink multicast is not used.

Shapes: W ranks, T tokens of this rank, M the most tokens of a rank, N = W·M, K experts per token, R rows of experts,
C bytes of a row; a row of N + 1 is one of zeros.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.memory_layout import padded
from octile.kernels.triton.launch_config import PEER_BLOCK, PEER_CHUNK, PEER_ROWS

MAX_CHUNKS = 256  # of rows from a rank
WORDS = {16: torch.int32, 8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by the bytes that divide C


class Peers(NamedTuple):
    """The buffers of all ranks.

    Attributes:
        rank: this rank.
        buffers: int64 [W], the address of each rank's buffer, a multiple of 16.
        flags: int64 [W], the address of each rank's `num_flags` flags, int32: how many barriers each rank has come to,
            and, for each chunk of rows from each rank, in which exchange it was sent last.
        barriers: int32 [1], how many barriers this rank has passed.
        num_sms: how many SMs launches use.
    """

    rank: int
    buffers: Tensor
    flags: Tensor
    barriers: Tensor
    num_sms: int


def chunk_rows(max_tokens: int) -> int:
    """How many rows are sent before a flag of the receiving rank is set."""
    return max(triton.cdiv(max_tokens, MAX_CHUNKS), PEER_CHUNK)


def num_flags(ranks: int) -> int:
    """How many flags each rank needs."""
    return ranks * (1 + MAX_CHUNKS)


def scales_at(rows: int, row_bytes: int) -> int:
    """Where the scales of this many rows are in a buffer, in bytes, which is also where the rows end."""
    return padded(rows * row_bytes)


def launch_barrier(peers: Peers, signal: bool = True, wait: bool = True) -> None:
    """Tell all ranks that this one has come here, and wait until all of them have."""
    ranks = len(peers.buffers)
    with torch.cuda.device_of(peers.buffers):
        peer_barrier[(1,)](
            peers.flags, peers.barriers, peers.rank, W=ranks, RANKS=triton.next_power_of_2(ranks),
            SIGNAL=signal, WAIT=wait, num_warps=1,
        )  # fmt: skip


def launch_send_experts(experts: Tensor, max_tokens: int, peers: Peers) -> None:
    """Write experts [T, K], contiguous, to all ranks, as int32 [M, K]; −1 for tokens that this rank does not have."""
    count = max_tokens * experts.shape[1]
    if count:
        with torch.cuda.device_of(experts):
            send_experts[(len(peers.buffers), triton.cdiv(count, PEER_BLOCK))](
                experts, experts.numel(), count, peers.buffers, peers.rank, BLOCK=PEER_BLOCK
            )


def launch_local_experts(gathered: Tensor, first: int, local: int) -> Tensor:
    """Number the experts int32 [N, K] of all ranks from the first of this rank; those of other ranks become `local`."""
    found = torch.empty_like(gathered)
    if found.numel():
        with torch.cuda.device_of(gathered):
            local_experts[(triton.cdiv(found.numel(), PEER_BLOCK),)](
                gathered, found, found.numel(), first, local, BLOCK=PEER_BLOCK
            )
    return found


def launch_exchange(
    x: Tensor, scale: Tensor | None, experts: Tensor, local_experts: Tensor, local: int, buffer: Tensor, out: Tensor,
    out_scale: Tensor | None, max_tokens: int, peers: Peers, send: bool = True, receive: bool = True,
) -> None:  # fmt: skip
    """Write rows x [T, C] uint8, contiguous, once to each rank that has one of experts [T, K], contiguous.

    Args:
        scale: float32 [T, S] of any strides, which are sent, too; None: none.
        local_experts: int32 [N, K], as `launch_local_experts` returns them.
        local: experts of a rank.
        buffer: uint8, this rank's.
        out, out_scale: [N + 1, C] and [N + 1, S], the rows that all ranks send to this one, and one of zeros.
        send, receive: do both, or one of them.
    """
    if not out.numel():
        return
    ranks, rows, row_bytes = len(peers.buffers), local_experts.shape[0], out.shape[1]
    scales = None if out_scale is None else buffer[scales_at(rows, row_bytes) :].view(torch.float32)
    senders = max(peers.num_sms // 2, 1)
    with torch.cuda.device_of(x):
        exchange_rows[(senders + max(peers.num_sms - senders, 1),)](
            _words(x), scale, *_strides(scale), experts, len(x), peers.buffers, scales_at(rows, row_bytes),
            _words(buffer[: rows * row_bytes].view(rows, row_bytes)), scales, local_experts, _words(out), out_scale,
            *_strides(out_scale), max_tokens, peers.rank, local, ranks, senders, peers.flags, peers.barriers,
            **_sizes(out, out_scale), CHUNK=chunk_rows(max_tokens), K=experts.shape[1],
            CHOSEN=triton.next_power_of_2(experts.shape[1]), SEND=send, RECEIVE=receive,
        )  # fmt: skip


def launch_send_back(y: Tensor, order: Tensor, offs: Tensor, results: int, peers: Peers) -> None:
    """Write row r of y [R, C] uint8, contiguous, for all r below the last of offs [E], to the rank of its token.

    Args:
        order: int32 [R], w · results + the index of the result on rank w.
        results: M · K.
    """
    if y.numel():
        with torch.cuda.device_of(y):
            send_results[(peers.num_sms,)](
                _words(y), order, offs, len(offs), len(y), peers.buffers, results, **_sizes(y, None)
            )


def _words(x: Tensor) -> Tensor:
    return x.view(WORDS[math.gcd(x.shape[1], 16)])


def _strides(scale: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if scale is None else scale.stride()


def _sizes(x: Tensor, scale: Tensor | None) -> dict[str, object]:
    """Return what the programs of a launch for rows of x [·, C] have in common."""
    width = math.gcd(x.shape[1], 16)
    words = x.shape[1] // WORDS[width].itemsize
    cols = min(triton.next_power_of_2(words), PEER_ROWS["words"])
    rows = max(PEER_ROWS["words"] * PEER_ROWS["rows"] // cols, 1)
    tiles = 0 if scale is None else scale.shape[1]
    return {
        "WORDS": words, "COLS": cols, "ROWS": min(rows, 64), "ALIGNED": width == 16, "TILES": tiles,
        "SCALES": triton.next_power_of_2(max(tiles, 1)), "num_warps": PEER_ROWS["num_warps"],
    }  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def peer_barrier(
    flags, barriers, rank, W: tl.constexpr, RANKS: tl.constexpr, SIGNAL: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    """One program. The kernels before it have written what the ranks then read."""
    if SIGNAL:
        peer = tl.arange(0, RANKS)
        pad = tl.load(flags + peer, mask=peer < W, other=0).to(tl.pointer_type(tl.int32))
        tl.atomic_add(pad + rank, 1, mask=peer < W, sem="release", scope="sys")
    if WAIT:
        passed = tl.load(barriers) + 1
        own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
        for peer in range(W):
            while tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") - passed < 0:
                pass
        tl.store(barriers, passed)


@triton.jit(do_not_specialize=["COUNT", "rank"])
def send_experts(experts, count, COUNT, buffers, rank, BLOCK: tl.constexpr):
    """A program writes BLOCK entries to one rank."""
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + index, mask=index < count, other=-1).to(tl.int32)
    to = tl.load(buffers + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    tl.store(to + rank.to(tl.int64) * COUNT + index, expert, mask=index < COUNT)


@triton.jit(do_not_specialize=["COUNT", "first", "local"])
def local_experts(gathered, found, COUNT, first, local, BLOCK: tl.constexpr):
    """A program numbers BLOCK entries."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(gathered + index, mask=index < COUNT, other=-1) - first
    tl.store(found + index, tl.where((expert >= 0) & (expert < local), expert, local), mask=index < COUNT)


@triton.jit(do_not_specialize=["T", "M", "rank", "local", "W", "senders"])
def exchange_rows(
    x, scale, scale_row, scale_col, experts, T, buffers, scales_at, buffer, scales, local_experts, out, out_scale,
    out_scale_row, out_scale_col, M, rank, local, W, senders, flags, barriers,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
):  # fmt: skip
    """The first `senders` programs send chunks of rows, ROWS at a time; the others wait for chunks and copy them."""
    chunks = tl.cdiv(M, CHUNK)
    passed = tl.load(barriers)  # which exchange this is, the same number on all ranks
    if tl.program_id(0) < senders:
        if SEND:
            for chunk in range(tl.program_id(0), chunks, senders):
                for first in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, T), ROWS):
                    _send_rows(
                        x, scale, scale_row, scale_col, experts, T, buffers, scales_at, out, out_scale, out_scale_row,
                        out_scale_col, first, rank * M, rank, local, W, WORDS, COLS, ROWS, ALIGNED, TILES, SCALES, K,
                        CHOSEN,
                    )  # fmt: skip
                tl.debug_barrier()  # all threads have stored
                for distance in range(1, W):
                    flag = tl.load(flags + (rank + distance) % W).to(tl.pointer_type(tl.int32))
                    tl.atomic_xchg(flag + W + rank * chunks + chunk, passed, sem="release", scope="sys")
    elif RECEIVE:
        receiver = tl.program_id(0) - senders
        own = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + W
        for index in range(receiver, (W - 1) * chunks, tl.num_programs(0) - senders):
            chunk = index // (W - 1)
            source = (rank + 1 + index % (W - 1)) % W
            while tl.atomic_add(own + source * chunks + chunk, 0, sem="acquire", scope="sys") - passed < 0:
                pass
            end = source * M + tl.minimum((chunk + 1) * CHUNK, M)
            for first in range(source * M + chunk * CHUNK, end, ROWS):
                _receive_rows(
                    buffer, scales, local_experts, end, W * M, out, out_scale, out_scale_row, out_scale_col, first,
                    local, WORDS, COLS, ROWS, TILES, SCALES, K, CHOSEN,
                )  # fmt: skip
        if receiver == 0:
            _receive_rows(
                buffer, scales, local_experts, W * M + 1, W * M, out, out_scale, out_scale_row, out_scale_col, W * M,
                local, WORDS, COLS, ROWS, TILES, SCALES, K, CHOSEN,
            )  # fmt: skip


@triton.jit
def _send_rows(
    x, scale, scale_row, scale_col, experts, T, buffers, scales_at, out, out_scale, out_scale_row, out_scale_col,
    first, first_row, rank, local, W,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Store ROWS rows to the buffers of the ranks that have one of their experts, and this rank's own to `out`."""
    k = tl.arange(0, CHOSEN)
    tile = tl.arange(0, SCALES)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    of = tl.load(experts + row[:, None] * K + k[None, :], mask=(row < T)[:, None] & (k < K)[None, :], other=-1)
    rank_of = tl.where(of < 0, -1, of // local)
    for first_col in tl.static_range(0, WORDS, COLS):
        col = first_col + tl.arange(0, COLS)
        values = tl.load(x + row[:, None] * WORDS + col[None, :], mask=(row < T)[:, None] & (col < WORDS)[None, :])
        for peer in range(W):
            is_sent = tl.max((rank_of == peer).to(tl.int32), axis=1) > 0
            to = tl.where(peer == rank, out.to(tl.int64), tl.load(buffers + peer))
            at = _pointer(to, x.dtype, ALIGNED) + (first_row + row)[:, None] * WORDS + col[None, :]
            tl.store(at, values, mask=is_sent[:, None] & (col < WORDS)[None, :])
    if TILES > 0:
        source = scale + row[:, None] * scale_row + tile[None, :] * scale_col
        factors = tl.load(source, mask=(row < T)[:, None] & (tile < TILES)[None, :])
        for peer in range(W):
            is_sent = tl.max((rank_of == peer).to(tl.int32), axis=1) > 0
            is_own = peer == rank
            to = tl.where(is_own, out_scale.to(tl.int64), tl.load(buffers + peer) + scales_at)
            row_step = tl.where(is_own, out_scale_row, TILES).to(tl.int64)
            col_step = tl.where(is_own, out_scale_col, 1).to(tl.int64)
            at = (first_row + row)[:, None] * row_step + tile[None, :] * col_step
            tl.store(to.to(tl.pointer_type(tl.float32)) + at, factors, mask=is_sent[:, None] & (tile < TILES)[None, :])


@triton.jit
def _receive_rows(
    buffer, scales, experts, end, N, out, out_scale, out_scale_row, out_scale_col, first, local,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, SCALES: tl.constexpr,
    K: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows that another rank has sent, if this one has one of their experts; row N is one of zeros."""
    k = tl.arange(0, CHOSEN)
    tile = tl.arange(0, SCALES)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    is_row = (row < N) & (row < end)
    of = tl.load(experts + row[:, None] * K + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=local)
    is_sent = tl.min(of, axis=1) < local
    is_written = is_sent | ((row == N) & (row < end))
    for first_col in tl.static_range(0, WORDS, COLS):
        col = first_col + tl.arange(0, COLS)
        at = row[:, None] * WORDS + col[None, :]
        values = tl.load(buffer + at, mask=is_sent[:, None] & (col < WORDS)[None, :], other=0)
        tl.store(out + at, values, mask=is_written[:, None] & (col < WORDS)[None, :])
    if TILES > 0:
        sent = scales + row[:, None] * TILES + tile[None, :]
        factors = tl.load(sent, mask=is_sent[:, None] & (tile < TILES)[None, :], other=1.0)
        at = out_scale + row[:, None] * out_scale_row + tile.to(tl.int64)[None, :] * out_scale_col
        tl.store(at, factors, mask=is_written[:, None] & (tile < TILES)[None, :])


@triton.jit(do_not_specialize=["E", "R", "results"])
def send_results(
    y, order, offs, E, R, buffers, results,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """A program sends ROWS rows at a time. The number of rows is clamped: the host cannot check it."""
    count = tl.minimum(tl.load(offs + E - 1), R)
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        index = tl.load(order + row, mask=row < count, other=0)
        rank = index // results
        to = tl.load(buffers + rank, mask=row < count, other=0) + (index - rank * results).to(tl.int64) * (
            WORDS * (y.dtype.element_ty.primitive_bitwidth // 8)
        )
        for first_col in tl.static_range(0, WORDS, COLS):
            col = first_col + tl.arange(0, COLS)
            inside = (row < count)[:, None] & (col < WORDS)[None, :]
            values = tl.load(y + row[:, None] * WORDS + col[None, :], mask=inside)
            at = _pointer(to, y.dtype, ALIGNED)[:, None] + col[None, :]
            tl.store(at, values, mask=inside)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Make pointers of addresses, one or several."""
    pointer = address.to(DTYPE)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer
