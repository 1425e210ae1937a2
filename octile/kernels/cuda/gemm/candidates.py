"""Candidate configurations for a GEMM, and the choice among them.

The candidates follow from the problem and the chip; the cost model ranks them (`cost_model.cycles`). There is no table
of shapes, and nothing is tried out when a GEMM is called. `octile bench tune` measures candidates on a GPU and stores
the fastest, which is then chosen (`tuned`).

The rasterization order is not estimated. It is a rule, found by measuring GEMMs both ways (`_rasterization`;
benchmarks/history/gemm-drawn); `octile bench tune` also measures the likeliest configuration of each tile with
`other_rasterization`.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from octile.kernels.cuda.gemm import tuned
from octile.kernels.cuda.gemm.config import BLOCK_K, GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.cost_model import Chip, Problem, cycles, num_tiles, rounded, transposed
from octile.kernels.hopper import SHARED_BYTES

MAX_STAGES = 12
MAX_PREFETCH_K = 6144  # of a sum to C that is loaded to the L2 cache: longer ones were up to 4% slower
STRIP = 8  # cluster tiles across a strip
CLUSTERS = ((1, 1), (1, 2), (2, 1))  # blocks along M, which share b, and along N, which share a


def choose(problem: Problem, chip: Chip) -> GemmConfig:
    """Return the configuration that should be fastest, or the one that `octile bench tune` measured to be.

    Among those for some of a GPU's SMs it splits K as the one for all of them does.
    """
    problem = rounded(problem)
    if chip.multiprocessors == chip.whole.multiprocessors:
        return _measured(problem, chip.whole) or best(problem, chip.whole)
    split_k = choose(problem, chip.whole).split_k
    measured = _measured(problem, chip)
    return measured if measured is not None and measured.split_k == split_k else best(problem, chip, split_k)


def _measured(problem: Problem, chip: Chip) -> GemmConfig | None:
    """Return what `octile bench tune` measured for a rounded problem; of row-invariant ones it measures none itself."""
    found = tuned.lookup(problem, chip)
    if found is None or (problem.row_invariant and found.split_k > 1):
        return None
    return replace(found, zero_rest=problem.zero_rest, adds_rounded=_adds_rounded(problem))


def _adds_rounded(p: Problem) -> bool:
    return p.row_invariant and p.accumulate and not p.out_float


@lru_cache(4096)
def best(problem: Problem, chip: Chip, split_k: int | None = None) -> GemmConfig:
    """Return the configuration of the lowest estimate for a rounded problem, without what was measured.

    Args:
        split_k: that of a candidate for the whole GPU; None: any.
    """
    return next(c for c in candidates(problem, chip) if split_k in (None, c.split_k))


def candidates(problem: Problem, chip: Chip) -> list[GemmConfig]:
    """Return every configuration worth trying for a problem, that of the lowest estimate first."""
    sms = Chip(chip.multiprocessors, chip.whole.multiprocessors)
    return sorted(_possible(problem, sms), key=lambda config: cycles(problem, config, chip))


@lru_cache(1)  # of a problem that is asked for on several GPUs, one after the other
def _possible(problem: Problem, sms: Chip) -> tuple[GemmConfig, ...]:
    return tuple(_generate(problem, sms))


def _generate(problem: Problem, chip: Chip) -> Iterator[GemmConfig]:
    # rows that fill no tile of 64 become columns
    may_transpose = problem.transposable and problem.m <= 256 and problem.m % 64 > 0
    for is_transposed in (False, True) if may_transpose else (False,):
        p = transposed(problem) if is_transposed else problem
        for tile_m, warpgroups, ping_pong in (
            (128, 2, False),
            (256, 2, False),
            (192, 3, False),
            (64, 1, False),
            (64, 2, True),
            (128, 2, True),
        ):
            for tile_n in _widths(p, is_transposed):
                if warpgroups == 3 and tile_n < (96 if p.is_1d1d else 112):  # narrow ones are bound by the L2 cache
                    continue
                for cluster_m, cluster_n in CLUSTERS:
                    if not chip.clusters(cluster_m * cluster_n):
                        continue
                    if (cluster_m > 1 and p.m <= tile_m) or (cluster_n > 1 and p.n <= tile_n):  # a block without a tile
                        continue
                    for accumulators in (1, 2):
                        shape = (tile_m, tile_n, warpgroups, ping_pong, cluster_m, cluster_n, accumulators)
                        yield from _with_splits(p, is_transposed, shape, chip)


def _widths(p: Problem, is_transposed: bool) -> tuple[int, ...]:
    """Return the columns of tiles. Tiles of 16 rows of a weight were 1.24 to 1.82 times as slow as others."""
    wide = (144, 160, 192) if p.b_scales is Scales.PER_BLOCK else (144, 160)
    narrow = (16,) if is_transposed or p.n <= 16 else ()
    return (*narrow, *(n for n in (32, 48, 64, 80, 96, 112, 128, *wide) if n < 2 * p.n))


def _with_splits(
    p: Problem, is_transposed: bool, shape: tuple[int, int, int, bool, int, int, int], chip: Chip
) -> Iterator[GemmConfig]:
    tile_m, tile_n, warpgroups, ping_pong, cluster_m, cluster_n, accumulators = shape
    if is_transposed and (p.store is Store.PAIRS or p.out_float or p.accumulate):
        p = replace(p, store=Store.SINGLE)
    # TMA adds FP32 only: threads load BF16 and add to it, or C is loaded to shared memory first (`_loading_c`)
    tma_can_store = p.store is not Store.TMA or p.out_float or not p.accumulate
    try:
        first = GemmConfig(
            tile_m,
            tile_n,
            stages=2,
            warpgroups=warpgroups,
            ping_pong=ping_pong,
            accumulators=accumulators,
            cluster_m=cluster_m,
            cluster_n=cluster_n,
            a_scales=p.a_scales,
            b_scales=p.b_scales,
            schedule=p.schedule,
            out_float=p.out_float,
            accumulate=p.accumulate,
            adds_rounded=_adds_rounded(p),
            promote=p.promote,
            transposed=is_transposed,
            store=p.store if tma_can_store else Store.PAIRS,
            staged_boxes=1 if p.store is Store.TMA and tma_can_store else 0,
            **_rasterization(p, tile_m * cluster_m),
            max_groups=0 if p.schedule is Schedule.DENSE else max(32, 1 << (p.groups - 1).bit_length()),
            zero_rest=p.zero_rest,
            a_e5m2=p.a_e5m2,
            b_e5m2=p.b_e5m2,
        )
    except ValueError:
        return
    if first.accumulators == first.waves == 2 and not _can_overlap_waves(first):
        return
    k_blocks, tiles, all_sms = -(-p.k // BLOCK_K), num_tiles(p, first), chip.whole.multiprocessors
    if ping_pong and tiles < chip.multiprocessors:  # one warpgroup of each block would have no tile
        return
    if p.accumulate and p.store is Store.TMA:
        with suppress(ValueError):
            yield _loading_c(first)
        first = replace(first, prefetch_c=p.out_float and _prefetches_c(p, tiles, chip))
    for filled in _with_stages(first):
        yield filled
        if p.schedule is Schedule.DENSE and p.promote and not p.row_invariant and tiles < all_sms and not ping_pong:
            for split_k in (2, 3, 4, 6, 8, 12, 16):
                if tiles * split_k <= all_sms and k_blocks >= 2 * split_k:
                    with suppress(ValueError):
                        yield replace(filled, split_k=split_k, prefetch_c=False)


def _can_overlap_waves(config: GemmConfig) -> bool:
    """Return whether a kernel with an accumulator for each of two waves is worth trying: what was measured to be fast.

    For 1D1D 256×96 is the largest tile whose accumulators and column scales fit into registers. Stored in FP32 it was
    20% slower than 256×128.
    """
    is_fast = config.is_1d1d and config.schedule is Schedule.DENSE and not config.accumulate and not config.out_float
    return is_fast and (config.tile_m, config.tile_n) == (256, 96) and config.cluster_size == 1


def _with_stages(config: GemmConfig) -> Iterator[GemmConfig]:
    """Yield a configuration with as many stages as fit, and with those that leave room to stage a wave or the tile."""
    stage = config.pipelines * config.stage_bytes
    box = config.warpgroups * config.store_box_bytes
    available = SHARED_BYTES - config.other_bytes
    seen = set()
    wave = config.store_boxes // config.waves
    for boxes in sorted({config.staged_boxes, wave, config.store_boxes}) if config.store is Store.TMA else (0,):
        stages = min((available - (boxes - config.staged_boxes) * box) // stage, MAX_STAGES)
        if stages >= 2 and stages not in seen:
            seen.add(stages)
            staged = boxes
            if boxes and not config.accumulate:  # all that fit; an accumulate epilogue was slower with more
                staged = min(config.staged_boxes + (available - stages * stage) // box, config.store_boxes)
            yield replace(config, stages=stages, staged_boxes=staged)


def _prefetches_c(p: Problem, tiles: int, chip: Chip) -> bool:
    """Return whether FP32 numbers that TMA adds to are loaded to the L2 cache before: where that was measured to pay.

    It was timed for 1D1D alone. In GEMMs of few rows it delays the operands. Of long sums only the end of a GEMM waits
    for C, which counts where SMs compute one tile each.
    """
    many_rows = min(p.m, p.n) > 256
    return p.is_1d1d and many_rows and (p.k_of_a_sum <= MAX_PREFETCH_K or tiles <= chip.multiprocessors)


def _loading_c(config: GemmConfig) -> GemmConfig:
    """Return the configuration with an epilogue that loads C, and with as many stages as then fit."""
    loading = replace(config, store=Store.TMA, load_c=True, staged_boxes=config.store_boxes // config.waves)
    stages = (SHARED_BYTES - loading.other_bytes) // (config.pipelines * config.stage_bytes)
    return replace(loading, stages=min(stages, MAX_STAGES))


def _rasterization(p: Problem, cluster_tile_m: int) -> dict[str, Any]:
    """Return the rasterization order; see scheduler.cuh.

    Strips are 8 cluster tiles wide. They lie along N where the result is stored without an addition, unless a dense one
    has no more rows than a strip along M.
    """
    has_strips = p.schedule is not Schedule.DENSE or p.m > STRIP * cluster_tile_m
    return {"raster_along_n": has_strips and not p.accumulate, "raster_width": STRIP}


def other_rasterization(p: Problem, c: GemmConfig) -> GemmConfig | None:
    """Return the configuration with the other rasterization order; None where there is one row or column of tiles."""
    m, n = (p.n, p.m) if c.transposed else (p.m, p.n)
    if m <= c.cluster_tile_m or n <= c.cluster_tile_n:
        return None
    return replace(c, raster_along_n=not c.raster_along_n)
