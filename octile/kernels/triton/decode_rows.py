# mypy: allow-untyped-defs
"""Few rows of tokens to their experts on other GPUs and back, with few launches, for decoding.

As in `octile.kernels.triton.peer_rows` every row has a fixed slot in the buffer of each rank, but there is no barrier
before the stores. Each program adds 1 to a counter of each rank when it has stored, and the programs that read wait
until those of all ranks have. Dispatch and combine alternate and have parts of the buffer of their own. So what a rank
still reads of one exchange is not overwritten by the next one of its kind, which begins when all ranks have begun the
one between them.

    experts    [W, C, K]    int32, the chosen experts of all tokens, −1 for none
    weights    [W, C, K]    float32, those of the experts
    rows       [W, C, D]    row t of rank w with its scales, if this rank has one of its experts
    results    [C, K, D]    what expert k of token t has computed

At its experts the rows are sorted by expert, [R, D].

Shapes: W ranks, T tokens of this rank, C the most tokens of a rank, M = W · C, K experts per token, R = M · K,
G experts of a rank, D bytes of a row, S scales of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import TILE
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import DECODE_ROWS, EXACT, UNPERMUTE
from octile.kernels.triton.peer_rows import Peers, compiled_peers, pointer, sizes, words

ENTRIES_PER_WARP = 512  # at most, so that they fit into registers


def launch_send(
    x: Tensor, scale: Tensor | None, experts: Tensor, local: int, capacity: int, scales_at: int, experts_at: int,
    peers: Peers, weights: Tensor, weights_at: int, slots: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> int:  # fmt: skip
    """Write rows x [T, D] uint8, contiguous, their scales [T, S] of any strides and experts [T, K], contiguous.

    Args:
        local: G.
        capacity: C.
        scales_at, experts_at, weights_at: where scales, experts and weights are in a buffer, in bytes.
        weights: float32 [T, K], contiguous, which are sent, too.
        slots: int64 [E, N] and [E], contiguous: the slots of each expert, and how many it has, to which the tokens of
            all ranks go round-robin; `local` then counts slots. None: experts are slots.
        positions: int64 [T], contiguous; tokens that have a negative one go nowhere. None: all go to their experts.

    Returns:
        how much is added to the counters of all ranks.
    """
    expert_slots, count = (None, None) if slots is None else slots
    with torch.cuda.device_of(x):
        send_tokens[(capacity,)](
            words(x), scale, *((0, 0) if scale is None else scale.stride()), experts, weights, expert_slots, count,
            1 if expert_slots is None else expert_slots.shape[1], positions, len(x), peers.buffers, scales_at,
            experts_at, weights_at, peers.flags, peers.rank, local, len(peers.buffers), capacity,
            **_row_sizes(x, scale), K=experts.shape[1], CHOSEN=triton.next_power_of_2(experts.shape[1]),
        )  # fmt: skip
    return capacity


def launch_sort(
    sent: int, peers: Peers, rows: Tensor, scales: Tensor | None, experts: Tensor, weights: Tensor, first: int,
    out: Tensor, out_scale: Tensor | None, out_weights: Tensor, entries: Tensor, offs: Tensor,
) -> None:  # fmt: skip
    """Wait for the rows of all ranks, and copy them, sorted by expert, rank and token.

    Args:
        sent: what `launch_send` has returned, here as on all ranks.
        rows, experts, weights: uint8 [M, D], int32 [M, K] and float32 [M, K], contiguous, in this rank's buffer.
        scales: float32 [M, S], contiguous, in this rank's buffer; None: the rows are not quantized.
        first: the first expert of this rank.
        out, out_scale, out_weights: uint8 [R, D], contiguous, float32 [R, S] and [R], which are written up to the last
            of `offs`.
        entries: int32 [R], of which entry of experts each row is.
        offs: int32 [G], where the rows of each expert end.
    """
    count = experts.numel()
    with torch.cuda.device_of(out):
        sort_tokens[(len(offs), DECODE_ROWS["splits"])](
            words(rows), scales, experts, weights, count, first, words(out), out_scale, 0,
            *((0, 0) if out_scale is None else out_scale.stride()), out_weights, entries, offs, count,
            *_counters(peers), sent, **_sort_sizes(rows, scales, count), K=experts.shape[1],
        )  # fmt: skip


def launch_return(y: Tensor, entries: Tensor, offs: Tensor, results: int, results_at: int, peers: Peers) -> int:
    """Write the rows of y [R, D] uint8, contiguous, up to the last of offs, to the ranks of their tokens.

    Args:
        entries, offs: what `launch_sort` has written.
        results: C · K.
        results_at: where results are in a buffer, in bytes.

    Returns:
        how much is added to the counters of all ranks.
    """
    splits = DECODE_ROWS["splits"]
    with torch.cuda.device_of(y):
        return_results[(len(offs), splits)](
            words(y), entries, offs, len(y), peers.buffers, results, results_at, peers.flags, peers.rank,
            len(peers.buffers), **sizes(y, None, DECODE_ROWS),
        )  # fmt: skip
    return len(offs) * splits


def launch_sum(
    returned: int, peers: Peers, results: Tensor, n_chosen: int, add: Tensor | None, weights: Tensor | None, to: Tensor,
    adds_to: bool,
) -> None:  # fmt: skip
    """Wait for the results of all ranks, and sum those of each token, as `octile.ops.permute.unpermute` does.

    Args:
        returned: what `launch_return` has returned, here as on all ranks.
        results: [T · K, D], contiguous, in this rank's buffer.
        n_chosen: K.
        add: [T, D], any strides; None: zeros.
        weights: float32 [T, K], contiguous; None: ones.
        to: [T, D], contiguous, to which the sums are written, or added after they are rounded.
        adds_to: whether they are added.
    """
    tokens, d = to.shape
    cols = min(max(triton.next_power_of_2(d), 128), UNPERMUTE["cols"])
    with torch.cuda.device_of(to):
        sum_results[(max(tokens, 1), triton.cdiv(d, cols))](  # also a rank without tokens counts what has come
            results, add, *((0, 0) if add is None else add.stride()), weights, to, tokens, d, *_counters(peers),
            returned, K=n_chosen, ADDS_TO=adds_to, COLS=cols,
            num_warps=cols // UNPERMUTE["cols_per_warp"], **EXACT,
        )  # fmt: skip


def _counters(peers: Peers) -> tuple[Tensor, Tensor, int, int]:
    """Return what programs that wait for all ranks read."""
    return peers.flags, peers.barriers, peers.rank, len(peers.flags)


def _sort_sizes(rows: Tensor, scales: Tensor | None, count: int) -> dict[str, int]:
    """Return what programs have in common that find an expert's among `count` entries."""
    found, entries = sizes(rows, scales, DECODE_ROWS), triton.next_power_of_2(count)
    return found | {"ENTRIES": entries, "num_warps": max(found["num_warps"], entries // ENTRIES_PER_WARP)}


def _row_sizes(x: Tensor, scale: Tensor | None) -> dict[str, int]:
    """Return what programs that have one row each have in common."""
    found = sizes(x, scale, DECODE_ROWS)
    del found["ROWS"]
    return found


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    ranks, capacity, local = 8, 128, 32
    every, peers = ranks * capacity, compiled_peers()
    x, scale, _ = cases.quantized(capacity, cases.K, TILE)
    weights, offs = cases.empty(every, 8, dtype=cases.FP32), cases.empty(local, dtype=torch.int32)
    entries = cases.empty(every * 8, dtype=torch.int32)
    received = (
        cases.empty(every, cases.K, dtype=torch.uint8), cases.empty(every, cases.K // 128, dtype=cases.FP32),
        cases.empty(every, 8, dtype=torch.int32),
    )  # fmt: skip
    sent = x.view(torch.uint8), scale, cases.empty(capacity, 8, dtype=torch.int64), local, capacity, 2**23, 2**24, peers

    def exchanged() -> None:
        out, out_scale, _ = cases.quantized(every * 8, cases.K, TILE)
        to_sort = *received, weights, 0, out.view(torch.uint8), out_scale
        y = cases.empty(every * 8, cases.K).view(torch.uint8)
        launch_send(*sent, weights, 2**25)
        launch_sort(capacity, peers, *to_sort, weights.view(-1), entries, offs)
        launch_return(y, entries, offs, capacity * 8, 2**25, peers)

    def summed(adds_to: bool) -> None:
        results, token_rows = cases.empty(capacity * 8, cases.K), cases.empty(capacity, cases.K)
        launch_sum(64, peers, results, 8, token_rows, None, token_rows, adds_to)

    return {
        "exchange of few rows": exchanged,
        "sums of few rows": lambda: summed(False),
        "sums of few rows, added": lambda: summed(True),
    }


@triton.jit(do_not_specialize=["T", "rank", "local", "W", "C", "N"])
def send_tokens(
    x, scale, scale_row, scale_col, experts, weights, expert_slots, count, N, positions, T, buffers, scales_at,
    experts_at, weights_at, flags, rank, local, W, C,
    WORDS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr, SCALES: tl.constexpr,
    K: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """A program sends a token, or says that there is none.

    It loads whatever no other load decides on before it uses the first value: it waits for memory most of its time.
    """
    token = tl.program_id(0).to(tl.int64)
    k, col, tile = tl.arange(0, CHOSEN), tl.arange(0, COLS), tl.arange(0, SCALES)
    is_token = token < T
    is_chosen = k < tl.where(is_token, K, 0)
    expert = tl.load(experts + token * K + k, mask=is_chosen, other=-1).to(tl.int64)
    values = tl.load(x + token * WORDS + col, mask=col < tl.where(is_token, WORDS, 0))
    if TILES > 0:
        factors = tl.load(scale + token * scale_row + tile * scale_col, mask=tile < tl.where(is_token, TILES, 0))
    shares = tl.load(weights + token * K + k, mask=is_chosen)
    if positions is not None:
        is_chosen = k < tl.where(is_token & (tl.load(positions + token, mask=is_token, other=-1) >= 0), K, 0)
        expert = tl.where(is_chosen, expert, -1)
    if expert_slots is not None:
        turn = (token + rank) % tl.load(count + expert, mask=is_chosen, other=1)
        expert = tl.load(expert_slots + expert * N + turn, mask=is_chosen, other=-1)
    rank_of = tl.where(expert < 0, -1, expert // local)
    slot = rank * C + token
    for peer in range(W):
        to = tl.load(buffers + peer)
        is_sent = tl.max((rank_of == peer).to(tl.int32), axis=0) > 0
        tl.store((to + experts_at).to(tl.pointer_type(tl.int32)) + slot * K + k, expert.to(tl.int32), mask=k < K)
        at = pointer(to, x.dtype, ALIGNED) + slot * WORDS + col
        tl.store(at, values, mask=col < tl.where(is_sent, WORDS, 0))
        if TILES > 0:
            scale_at = (to + scales_at).to(tl.pointer_type(tl.float32)) + slot * TILES + tile
            tl.store(scale_at, factors, mask=tile < tl.where(is_sent, TILES, 0))
        weight_at = (to + weights_at).to(tl.pointer_type(tl.float32)) + slot * K + k
        tl.store(weight_at, shares, mask=k < tl.where(is_sent, K, 0))
    _arrive(flags, rank, W)


@triton.jit(do_not_specialize=["COUNT", "first_expert", "M", "rank", "W", "sent"])
def sort_tokens(
    rows, scales, experts, weights, COUNT, first_expert, out, out_scale, out_scale_group, out_scale_row, out_scale_col,
    out_weights, entries, offs, M, flags, barriers, rank, W, sent,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr, K: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """A program finds the tokens of an expert, and copies a part of their rows."""
    passed = _wait(flags, barriers, rank, W, sent)
    group = tl.program_id(0).to(tl.int64)
    index, col, tile = tl.arange(0, ENTRIES), tl.arange(0, COLS), tl.arange(0, SCALES)
    expert = tl.load(experts + index, mask=index < COUNT, other=-1) - first_expert
    is_ours = (expert == group).to(tl.int32)
    position = tl.cumsum(is_ours, axis=0) - is_ours
    count = tl.minimum(tl.sum(is_ours, axis=0), M)
    begin = tl.sum(((expert >= 0) & (expert < group)).to(tl.int32), axis=0).to(tl.int64)
    is_stored = (is_ours > 0) & (position < M)
    tl.store(entries + begin + position, index, mask=is_stored)
    tl.store(offs + group, (begin + count).to(tl.int32))
    shares = tl.load(weights + index, mask=is_stored)
    tl.store(out_weights + begin + position, shares, mask=is_stored)
    tl.debug_barrier()  # other threads read the entries
    for first in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        token = (tl.load(entries + begin + row, mask=row < count, other=0) // K).to(tl.int64)
        inside = (row < count)[:, None] & (col < WORDS)[None, :]
        values = tl.load(rows + token[:, None] * WORDS + col[None, :], mask=inside)
        tl.store(out + (begin + row)[:, None] * WORDS + col[None, :], values, mask=inside)
        if TILES > 0:
            inside = (row < count)[:, None] & (tile < TILES)[None, :]
            factors = tl.load(scales + token[:, None] * TILES + tile[None, :], mask=inside)
            at = group * out_scale_group + (begin + row)[:, None] * out_scale_row
            tl.store(out_scale + at + tile.to(tl.int64)[None, :] * out_scale_col, factors, mask=inside)
    _pass(barriers, passed)


@triton.jit(do_not_specialize=["M", "results", "rank", "W"])
def return_results(
    y, entries, offs, M, buffers, results, results_at, flags, rank, W,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """A program sends a part of the results of an expert."""
    group = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(offs + group), M)
    begin = tl.load(offs + group - 1, mask=group > 0, other=0).to(tl.int64)
    count = end - begin.to(tl.int32)
    col = tl.arange(0, COLS)
    for first in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < count)[:, None] & (col < WORDS)[None, :]
        index = tl.load(entries + begin + row, mask=row < count, other=0)
        values = tl.load(y + (begin + row)[:, None] * WORDS + col[None, :], mask=inside)
        to_rank = index // results
        to = tl.load(buffers + to_rank, mask=row < count, other=0) + results_at
        to += (index - to_rank * results).to(tl.int64) * (WORDS * (y.dtype.element_ty.primitive_bitwidth // 8))
        tl.store(pointer(to, y.dtype, ALIGNED)[:, None] + col[None, :], values, mask=inside)
    _arrive(flags, rank, W)


@triton.jit(do_not_specialize=["T", "rank", "W", "returned"])
def sum_results(
    results, add, add_row, add_col, weights, to, T, D, flags, barriers, rank, W, returned,
    K: tl.constexpr, ADDS_TO: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program sums COLS columns of a token."""
    passed = _wait(flags, barriers, rank, W, returned)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS).to(tl.int64)
    inside = column < tl.where(token < T, D, 0)
    total = tl.zeros([COLS], tl.float32)
    if add is not None:
        total = tl.load(add + token * add_row + column * add_col, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        value = tl.load(results + (token * K + k) * D + column, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            value = value * tl.load(weights + token * K + k, mask=token < T, other=0.0)
        total += value
    total = total.to(to.dtype.element_ty)
    at = to + token * D + column
    if ADDS_TO:
        total = (tl.load(at, mask=inside).to(tl.float32) + total.to(tl.float32)).to(to.dtype.element_ty)
    tl.store(at, total, mask=inside)
    _pass(barriers, passed)


@triton.jit
def _wait(flags, barriers, rank, W, count):
    """Wait until all ranks' programs have added `count` to their counters here; return what those then are at least."""
    passed = tl.load(barriers) + count
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for peer in range(W):
        while tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") - passed < 0:
            pass
    return passed


@triton.jit
def _pass(barriers, passed):
    """Write what the next launch adds to, when all programs of this one have read it."""
    tl.debug_barrier()  # all threads have
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(barriers + 1, 1) == programs - 1:
        tl.store(barriers + 1, 0)
        tl.store(barriers, passed)


@triton.jit
def _arrive(flags, rank, W):
    """Add 1 to this rank's counter on all ranks: what this program has stored is there."""
    tl.debug_barrier()  # all threads have stored
    for distance in range(W):  # own rank first: each release waits for the store before it
        flag = tl.load(flags + (rank + distance) % W).to(tl.pointer_type(tl.int32))
        tl.atomic_add(flag + rank, 1, sem="release", scope="sys")
