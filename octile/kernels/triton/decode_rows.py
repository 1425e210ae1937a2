# mypy: allow-untyped-defs
"""Few rows of tokens to their experts on other GPUs and back, with few launches, for decoding.

As in `octile.kernels.triton.peer_rows` every row has a fixed place in the buffer of each rank, but there is no barrier
before the stores: each program adds 1 to a counter of each rank when it has stored, and the programs that read wait
until those of all ranks have. Dispatch and combine alternate and have parts of the buffer of their own, so what a rank
still reads of one exchange is not overwritten by the next one of its kind: that begins when all ranks have begun the
one between them.

    experts    [W, C, K]    int32, the chosen experts of all tokens, −1 for none
    weights    [W, C, K]    float32, those of the experts, if they are sent
    rows       [W, C, D]    row t of rank w with its scales, if this rank has one of its experts
    results    [C, K, D]    what expert k of token t has computed

At its experts a row has a place in [G, M, D], or in [R, D] sorted by expert.

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
    peers: Peers, weights: Tensor | None = None, weights_at: int = 0, slots: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> int:  # fmt: skip
    """Write rows x [T, D] uint8, contiguous, their scales [T, S] of any strides and experts [T, K], contiguous.

    Args:
        local: G.
        capacity: C.
        scales_at, experts_at, weights_at: where scales, experts and weights are in a buffer, in bytes.
        weights: float32 [T, K], contiguous, which are sent, too; None: none.
        slots: int64 [E, N] and [E], contiguous: the slots of each expert, and how many it has, to which the tokens of
            all ranks go round-robin; `local` then counts slots. None: experts are slots.
        positions: int64 [T], contiguous; tokens that have a negative one go nowhere. None: all go to their experts.

    Returns:
        how much is added to the counters of all ranks.
    """
    of_expert, count = (None, None) if slots is None else slots
    with torch.cuda.device_of(x):
        send_tokens[(capacity,)](
            words(x), scale, *((0, 0) if scale is None else scale.stride()), experts, weights, of_expert, count,
            1 if of_expert is None else of_expert.shape[1], positions, len(x), peers.buffers, scales_at, experts_at,
            weights_at, peers.flags, peers.rank, local, len(peers.buffers), capacity, **_row_sizes(x, scale),
            K=experts.shape[1], CHOSEN=triton.next_power_of_2(experts.shape[1]),
        )  # fmt: skip
    return capacity


def launch_place(
    sent: int, peers: Peers, rows: Tensor, scales: Tensor, experts: Tensor, first: int, out: Tensor,
    out_scale: Tensor, entries: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Wait for the rows of all ranks, and copy them to their experts, sorted by rank and token.

    Args:
        sent: what `launch_send` has returned, here as on all ranks.
        rows, scales, experts: uint8 [M, D], float32 [M, S] and int32 [M, K], contiguous, in this rank's buffer.
        first: the first expert of this rank.
        out, out_scale: uint8 [G, M, D], contiguous, and float32 [G, M, S], which are written up to `counts`.
        entries: int32 [G, M], of which entry of experts each row is.
        counts: int32 [G], how many rows each expert has.
    """
    count = experts.numel()
    with torch.cuda.device_of(out):
        place_tokens[(len(out), DECODE_ROWS["splits"])](
            words(rows), scales, experts, None, count, first, words(out.view(-1, out.shape[2])), out_scale,
            *out_scale.stride(), None, entries, counts, out.shape[1], *_counters(peers), sent,
            **_place_sizes(rows, scales, count), K=experts.shape[1], SORTED=False,
        )  # fmt: skip


def launch_sort(
    sent: int, peers: Peers, rows: Tensor, scales: Tensor | None, experts: Tensor, weights: Tensor, first: int,
    out: Tensor, out_scale: Tensor | None, out_weights: Tensor, entries: Tensor, offs: Tensor,
) -> None:  # fmt: skip
    """Wait for the rows of all ranks, and copy them, sorted by expert, rank and token.

    Args:
        sent, rows, scales, experts, weights, first: as in `launch_place`, and float32 [M, K], contiguous; without
            scales the rows are not quantized.
        out, out_scale, out_weights: uint8 [R, D], contiguous, float32 [R, S] and [R], which are written up to the last
            of `offs`.
        entries: int32 [R], of which entry of experts each row is.
        offs: int32 [G], where the rows of each expert end.
    """
    count = experts.numel()
    with torch.cuda.device_of(out):
        place_tokens[(len(offs), DECODE_ROWS["splits"])](
            words(rows), scales, experts, weights, count, first, words(out), out_scale, 0,
            *((0, 0) if out_scale is None else out_scale.stride()), out_weights, entries, offs, count,
            *_counters(peers), sent, **_place_sizes(rows, scales, count), K=experts.shape[1], SORTED=True,
        )  # fmt: skip


def launch_return(
    y: Tensor, entries: Tensor, ends: Tensor, results: int, results_at: int, peers: Peers, is_sorted: bool = False
) -> int:
    """Write the first counts[g] rows of y [G, M, D] uint8, contiguous, to the ranks of their tokens; or of y [R, D].

    Args:
        entries: as in `launch_place`, or `launch_sort`.
        ends: the counts of `launch_place`, or the offs of `launch_sort`.
        results: C · K.
        results_at: where results are in a buffer, in bytes.
        is_sorted: whether it is y [R, D].

    Returns:
        how much is added to the counters of all ranks.
    """
    splits, rows = DECODE_ROWS["splits"], y.view(-1, y.shape[-1])
    with torch.cuda.device_of(y):
        return_results[(len(ends), splits)](
            words(rows), entries, ends, y.shape[-2], peers.buffers, results, results_at, peers.flags, peers.rank,
            len(peers.buffers), **sizes(rows, None, DECODE_ROWS), SORTED=is_sorted,
        )  # fmt: skip
    return len(ends) * splits


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


def _place_sizes(rows: Tensor, scales: Tensor | None, count: int) -> dict[str, int]:
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
    weights, counts = cases.empty(every, 8, dtype=cases.FP32), cases.empty(local, dtype=torch.int32)
    entries = cases.empty(local, 1024, dtype=torch.int32)
    received = (
        cases.empty(every, cases.K, dtype=torch.uint8), cases.empty(every, cases.K // 128, dtype=cases.FP32),
        cases.empty(every, 8, dtype=torch.int32),
    )  # fmt: skip
    sent = x.view(torch.uint8), scale, cases.empty(capacity, 8, dtype=torch.int64), local, capacity, 2**23, 2**24, peers

    def placed() -> None:
        out, out_scale, _ = cases.quantized(every, cases.K, TILE, groups=local)
        y = cases.empty(local, every, cases.K).view(torch.uint8)
        launch_send(*sent)
        launch_place(capacity, peers, *received, 0, out.view(torch.uint8), out_scale, entries, counts)
        launch_return(y, entries, counts, capacity * 8, 2**25, peers)

    def sorted_by_expert() -> None:
        out, out_scale, _ = cases.quantized(every * 8, cases.K, TILE)
        to_sort = *received, weights, 0, out.view(torch.uint8), out_scale
        y, flat = cases.empty(every * 8, cases.K).view(torch.uint8), entries.view(-1)
        launch_send(*sent, weights, 2**25)
        launch_sort(capacity, peers, *to_sort, weights.view(-1), flat, counts)
        launch_return(y, flat, counts, capacity * 8, 2**25, peers, True)

    def summed(adds_to: bool) -> None:
        results, token_rows = cases.empty(capacity * 8, cases.K), cases.empty(capacity, cases.K)
        launch_sum(64, peers, results, 8, token_rows, None, token_rows, adds_to)

    return {
        "exchange of few rows": placed,
        "exchange of few rows, sorted by expert": sorted_by_expert,
        "sums of few rows": lambda: summed(False),
        "sums of few rows, added": lambda: summed(True),
    }


@triton.jit(do_not_specialize=["T", "rank", "local", "W", "C", "N"])
def send_tokens(
    x, scale, scale_row, scale_col, experts, weights, of_expert, count, N, positions, T, buffers, scales_at, experts_at,
    weights_at, flags, rank, local, W, C,
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
    of = tl.load(experts + token * K + k, mask=is_chosen, other=-1).to(tl.int64)
    values = tl.load(x + token * WORDS + col, mask=col < tl.where(is_token, WORDS, 0))
    if TILES > 0:
        factors = tl.load(scale + token * scale_row + tile * scale_col, mask=tile < tl.where(is_token, TILES, 0))
    if weights is not None:
        shares = tl.load(weights + token * K + k, mask=is_chosen)
    if positions is not None:
        is_chosen = k < tl.where(is_token & (tl.load(positions + token, mask=is_token, other=-1) >= 0), K, 0)
        of = tl.where(is_chosen, of, -1)
    if of_expert is not None:
        turn = (token + rank) % tl.load(count + of, mask=is_chosen, other=1)
        of = tl.load(of_expert + of * N + turn, mask=is_chosen, other=-1)
    rank_of = tl.where(of < 0, -1, of // local)
    slot = rank * C + token
    for peer in range(W):
        to = tl.load(buffers + peer)
        is_sent = tl.max((rank_of == peer).to(tl.int32), axis=0) > 0
        tl.store((to + experts_at).to(tl.pointer_type(tl.int32)) + slot * K + k, of.to(tl.int32), mask=k < K)
        at = pointer(to, x.dtype, ALIGNED) + slot * WORDS + col
        tl.store(at, values, mask=col < tl.where(is_sent, WORDS, 0))
        if TILES > 0:
            scale_at = (to + scales_at).to(tl.pointer_type(tl.float32)) + slot * TILES + tile
            tl.store(scale_at, factors, mask=tile < tl.where(is_sent, TILES, 0))
        if weights is not None:
            weight_at = (to + weights_at).to(tl.pointer_type(tl.float32)) + slot * K + k
            tl.store(weight_at, shares, mask=k < tl.where(is_sent, K, 0))
    _arrive(flags, rank, W)


@triton.jit(do_not_specialize=["COUNT", "first_expert", "M", "rank", "W", "sent"])
def place_tokens(
    rows, scales, experts, weights, COUNT, first_expert, out, out_scale, out_scale_group, out_scale_row, out_scale_col,
    out_weights, entries, ends, M, flags, barriers, rank, W, sent,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr, K: tl.constexpr, ENTRIES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """A program finds the tokens of an expert, and copies a part of their rows."""
    passed = _wait(flags, barriers, rank, W, sent)
    group = tl.program_id(0).to(tl.int64)
    index, col, tile = tl.arange(0, ENTRIES), tl.arange(0, COLS), tl.arange(0, SCALES)
    of = tl.load(experts + index, mask=index < COUNT, other=-1) - first_expert
    is_ours = (of == group).to(tl.int32)
    place = tl.cumsum(is_ours, axis=0) - is_ours
    count = tl.minimum(tl.sum(is_ours, axis=0), M)
    begin = group * M
    if SORTED:
        begin = tl.sum(((of >= 0) & (of < group)).to(tl.int32), axis=0).to(tl.int64)
    is_placed = (is_ours > 0) & (place < M)
    tl.store(entries + begin + place, index, mask=is_placed)
    if SORTED:
        tl.store(ends + group, (begin + count).to(tl.int32))
        shares = tl.load(weights + index, mask=is_placed)
        tl.store(out_weights + begin + place, shares, mask=is_placed)
    else:
        tl.store(ends + group, count)
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
            scale_row = begin + row if SORTED else row
            at = group * out_scale_group + scale_row[:, None] * out_scale_row
            tl.store(out_scale + at + tile.to(tl.int64)[None, :] * out_scale_col, factors, mask=inside)
    _pass(barriers, passed)


@triton.jit(do_not_specialize=["M", "results", "rank", "W"])
def return_results(
    y, entries, ends, M, buffers, results, results_at, flags, rank, W,
    WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr,
    SCALES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """A program sends a part of the results of an expert."""
    group = tl.program_id(0).to(tl.int64)
    begin = group * M
    count = tl.minimum(tl.load(ends + group), M)
    if SORTED:
        begin = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int64)
        count = count - begin.to(tl.int32)
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
