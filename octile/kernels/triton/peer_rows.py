# mypy: allow-untyped-defs
"""Rows of tokens to the memory of other GPUs and back, by stores over NVLink.

Every rank has a buffer that all ranks of the group can write to (`octile.parallel.symmetric_memory`). Each row has a
fixed slot there, so no rank needs to know how many rows another one sends:

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
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import TILE
from octile.kernels.memory_layout import padded
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import PEER_BLOCK, PEER_CHUNK, PEER_ROWS

MAX_CHUNKS = 256  # of rows from a rank
WORDS_PER_WARP = 512  # of a row at most, so that they fit into registers
CACHE_LINE = 128  # bytes; stores of whole lines cross a link in the fewest packets
WORDS = {16: torch.int32, 8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by the bytes that divide C


class Peers(NamedTuple):
    """The buffers of all ranks.

    Attributes:
        rank: this rank.
        buffers: int64 [W], the address of each rank's buffer, a multiple of CACHE_LINE.
        flags: int64 [W], the address of each rank's `num_flags` flags, int32: how many barriers each rank has come to,
            and, for each chunk of rows from each rank, in which exchange it was sent last.
        barriers: int32 [2], how many barriers this rank has passed, and how many programs of a launch are done.
        num_sms: how many SMs launches use.
    """

    rank: int
    buffers: Tensor
    flags: Tensor
    barriers: Tensor
    num_sms: int


def num_flags(ranks: int) -> int:
    """How many flags each rank needs; they fill whole cache lines, since the buffer begins after them."""
    return -(-ranks * (1 + MAX_CHUNKS) * 4 // CACHE_LINE) * (CACHE_LINE // 4)


def scales_at(rows: int, row_bytes: int) -> int:
    """Where the scales of this many rows are in a buffer, in bytes, which is also where the rows end."""
    return padded(rows * row_bytes)


def launch_barrier(peers: Peers, signal: bool = True, wait: bool = True) -> None:
    """Tell all ranks that this one has come here, and wait until all of them have.

    Args:
        signal, wait: do both, or one of them.
    """
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
    senders, size = max(peers.num_sms // 2, 1), sizes(out, out_scale)
    chunk_rows = max(triton.cdiv(max_tokens, MAX_CHUNKS), PEER_CHUNK)
    with torch.cuda.device_of(x):
        exchange_rows[(senders + max(peers.num_sms - senders, 1),)](
            words(x), scale, *_strides(scale), experts, len(x), peers.buffers, scales_at(rows, row_bytes),
            words(buffer[: rows * row_bytes].view(rows, row_bytes)), scales, local_experts, words(out), out_scale,
            *_strides(out_scale), max_tokens, peers.rank, local, ranks, senders, peers.flags, peers.barriers,
            **size, BLOCKS=triton.cdiv(chunk_rows, size["ROWS"]), K=experts.shape[1],
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
                words(y), order, offs, len(offs), len(y), peers.buffers, results, **sizes(y, None)
            )


def words(x: Tensor) -> Tensor:
    """View rows of bytes as the widest integers that divide them."""
    return x.view(WORDS[math.gcd(x.shape[1], 16)])


def _strides(scale: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if scale is None else scale.stride()


def sizes(x: Tensor, scale: Tensor | None, rows: Mapping[str, int] = PEER_ROWS) -> dict[str, int]:
    """Return what the programs of a launch for rows of x [·, C] have in common."""
    width = math.gcd(x.shape[1], 16)
    words_of_row = x.shape[1] // WORDS[width].itemsize
    cols = triton.next_power_of_2(words_of_row)
    tiles = 0 if scale is None else scale.shape[1]
    return {
        "WORDS": words_of_row, "COLS": cols, "ROWS": min(max(rows["words"] // cols, 1), 64),
        "ALIGNED": width == 16, "TILES": tiles, "SCALES": triton.next_power_of_2(max(tiles, 1)),
        "num_warps": max(rows["num_warps"], cols // WORDS_PER_WARP),
    }  # fmt: skip


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    offs, experts = cases.empty(cases.GROUPS, dtype=torch.int32), cases.empty(cases.T, 8, dtype=torch.int64)
    (data, scale, _), peers = cases.quantized(8 * cases.T + 1, cases.K, TILE), compiled_peers()
    sent, results = data.view(torch.uint8), cases.empty(64 * cases.T, cases.K).view(torch.uint8)
    numbers, buffer = cases.empty(8 * cases.T, 8, dtype=torch.int32), cases.empty(2**34, dtype=torch.uint8)

    def exchange() -> None:
        launch_barrier(peers)
        launch_send_experts(experts, cases.T, peers)
        launch_local_experts(numbers, 0, 32)
        launch_exchange(
            sent[: cases.T], scale[: cases.T], experts, numbers, 32, buffer, sent, scale, cases.T, peers
        )  # fmt: skip
        launch_send_back(results, numbers.view(-1), offs, 8 * cases.T, peers)

    return {"exchange with other ranks": exchange}


def compiled_peers() -> Peers:
    """Eight ranks, for compile cases."""
    buffers, barriers = cases.empty(8, dtype=torch.int64), cases.empty(8, dtype=torch.int64)
    return Peers(0, buffers, barriers, cases.empty(2, dtype=torch.int32), 32)


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
    SCALES: tl.constexpr, BLOCKS: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
):  # fmt: skip
    """The first `senders` programs send chunks of BLOCKS · ROWS rows; the others copy own rows, and chunks that come.

    The senders of all ranks wait for each other, as in `peer_barrier`, unless ranks are simulated one after the other.
    A sender loads the next rows before it stores the last ones.
    """
    chunks = tl.cdiv(M, BLOCKS * ROWS)
    passed = tl.load(barriers)
    if SEND and RECEIVE:
        passed += 1
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    program = tl.program_id(0)
    if program < senders:
        if SEND and RECEIVE:
            if program == 0:
                for peer in range(W):
                    flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
                    tl.atomic_add(flag + rank, 1, sem="release", scope="sys")
            for peer in range(W):
                while tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") - passed < 0:
                    pass
        if SEND:
            rank_of, values, factors = _load_rows(
                x, scale, scale_row, scale_col, experts, T, program * BLOCKS * ROWS, local,
                WORDS, COLS, ROWS, TILES, SCALES, K, CHOSEN,
            )  # fmt: skip
            for block in range(tl.cdiv(tl.maximum(chunks - program, 0), senders) * BLOCKS):
                chunk = program + block // BLOCKS * senders
                next_chunk = program + (block + 1) // BLOCKS * senders
                next_rank_of, next_values, next_factors = _load_rows(
                    x, scale, scale_row, scale_col, experts, T, (next_chunk * BLOCKS + (block + 1) % BLOCKS) * ROWS,
                    local, WORDS, COLS, ROWS, TILES, SCALES, K, CHOSEN,
                )  # fmt: skip
                slot = (rank * M + (chunk * BLOCKS + block % BLOCKS) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
                col, tile = tl.arange(0, COLS), tl.arange(0, SCALES)
                for distance in range(1, W):
                    peer = (rank + distance) % W
                    is_sent = tl.max((rank_of == peer).to(tl.int32), axis=1) > 0
                    to = tl.load(buffers + peer)
                    at = pointer(to, x.dtype, ALIGNED) + slot[:, None] * WORDS + col[None, :]
                    tl.store(at, values, mask=is_sent[:, None] & (col < WORDS)[None, :])
                    if TILES > 0:
                        scale_at = (to + scales_at).to(tl.pointer_type(tl.float32)) + slot[:, None] * TILES
                        tl.store(scale_at + tile[None, :], factors, mask=is_sent[:, None] & (tile < TILES)[None, :])
                if block % BLOCKS == BLOCKS - 1:
                    tl.debug_barrier()  # all threads have stored
                    for distance in range(1, W):
                        flag = tl.load(flags + (rank + distance) % W).to(tl.pointer_type(tl.int32))
                        tl.atomic_xchg(flag + W + rank * chunks + chunk, passed, sem="release", scope="sys")
                rank_of, values, factors = next_rank_of, next_values, next_factors
    elif RECEIVE:
        receiver = program - senders
        receivers = tl.num_programs(0) - senders
        for first in range(rank * M + receiver * ROWS, rank * M + T, receivers * ROWS):
            _copy_rows(
                x, scale, scale_row, scale_col, rank * M, local_experts, rank * M + T, W * M, out, out_scale,
                out_scale_row, out_scale_col, first, local, WORDS, COLS, ROWS, TILES, SCALES, K, CHOSEN,
            )  # fmt: skip
        for index in range(receiver, (W - 1) * chunks, receivers):
            chunk = index // (W - 1)
            source = (rank + 1 + index % (W - 1)) % W
            while tl.atomic_add(own + W + source * chunks + chunk, 0, sem="acquire", scope="sys") - passed < 0:
                pass
            end = source * M + tl.minimum((chunk + 1) * BLOCKS * ROWS, M)
            for first in range(source * M + chunk * BLOCKS * ROWS, end, ROWS):
                _copy_rows(
                    buffer, scales, TILES, 1, 0, local_experts, end, W * M, out, out_scale, out_scale_row,
                    out_scale_col, first, local, WORDS, COLS, ROWS, TILES, SCALES, K, CHOSEN,
                )  # fmt: skip
        if receiver == 0:
            _copy_rows(
                buffer, scales, TILES, 1, 0, local_experts, W * M + 1, W * M, out, out_scale, out_scale_row,
                out_scale_col, W * M, local, WORDS, COLS, ROWS, TILES, SCALES, K, CHOSEN,
            )  # fmt: skip
    if SEND and RECEIVE:
        tl.debug_barrier()  # all threads have loaded `passed`
        if tl.atomic_add(barriers + 1, 1) == tl.num_programs(0) - 1:  # all programs have
            tl.store(barriers + 1, 0)
            tl.store(barriers, passed)


@triton.jit
def _load_rows(
    x, scale, scale_row, scale_col, experts, T, first, local,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, SCALES: tl.constexpr,
    K: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows: the ranks of their experts, their words and their scales."""
    k, col, tile = tl.arange(0, CHOSEN), tl.arange(0, COLS), tl.arange(0, SCALES)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    values = tl.load(x + row[:, None] * WORDS + col[None, :], mask=(row < T)[:, None] & (col < WORDS)[None, :])
    factors = tl.zeros([ROWS, SCALES], tl.float32)
    if TILES > 0:
        at = scale + row[:, None] * scale_row + tile[None, :] * scale_col
        factors = tl.load(at, mask=(row < T)[:, None] & (tile < TILES)[None, :])
    expert = tl.load(experts + row[:, None] * K + k[None, :], mask=(row < T)[:, None] & (k < K)[None, :], other=-1)
    return tl.where(expert < 0, -1, expert // local), values, factors


@triton.jit
def _copy_rows(
    x, scale, scale_row, scale_col, first_x, experts, end, N, out, out_scale, out_scale_row, out_scale_col, first,
    local,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, SCALES: tl.constexpr,
    K: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows, the first x[first − first_x], if this rank has one of their experts; row N is one of zeros."""
    k, col, tile = tl.arange(0, CHOSEN), tl.arange(0, COLS), tl.arange(0, SCALES)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    is_row = (row < N) & (row < end)
    at = (row - first_x)[:, None] * WORDS + col[None, :]  # all loads before the first store, whether needed or not
    values = tl.load(x + at, mask=is_row[:, None] & (col < WORDS)[None, :], other=0)
    factors = tl.zeros([ROWS, SCALES], tl.float32)
    if TILES > 0:
        at = (row - first_x)[:, None] * scale_row + tile.to(tl.int64)[None, :] * scale_col
        factors = tl.load(scale + at, mask=is_row[:, None] & (tile < TILES)[None, :], other=1.0)
    expert = tl.load(experts + row[:, None] * K + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=local)
    is_written = (tl.min(expert, axis=1) < local) | ((row == N) & (row < end))
    tl.store(out + row[:, None] * WORDS + col[None, :], values, mask=is_written[:, None] & (col < WORDS)[None, :])
    if TILES > 0:
        at = row[:, None] * out_scale_row + tile.to(tl.int64)[None, :] * out_scale_col
        tl.store(out_scale + at, factors, mask=is_written[:, None] & (tile < TILES)[None, :])


@triton.jit(do_not_specialize=["E", "R", "results"])
def send_results(
    y, order, offs, E, R, buffers, results,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """A program sends ROWS rows at a time, far from each other: some of them stay here, others cross the link.

    The number of rows is clamped: the host cannot check it.
    """
    count = tl.minimum(tl.load(offs + E - 1), R)
    distance = tl.cdiv(count, ROWS)
    col = tl.arange(0, COLS)
    for first in range(tl.program_id(0), distance, tl.num_programs(0)):
        row = first + tl.arange(0, ROWS).to(tl.int64) * distance
        inside = (row < count)[:, None] & (col < WORDS)[None, :]
        values = tl.load(y + row[:, None] * WORDS + col[None, :], mask=inside)
        index = tl.load(order + row, mask=row < count, other=0)
        rank = index // results
        to = tl.load(buffers + rank, mask=row < count, other=0)
        to += (index - rank * results).to(tl.int64) * (WORDS * (y.dtype.element_ty.primitive_bitwidth // 8))
        tl.store(pointer(to, y.dtype, ALIGNED)[:, None] + col[None, :], values, mask=inside)


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Make pointers of addresses, one or several."""
    pointer = address.to(DTYPE)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer
