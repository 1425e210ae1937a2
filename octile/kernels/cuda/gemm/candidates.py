"""Which kernel for which product: arithmetic on the shape and the chip, no table of shapes and no trial.

A tile's time is what its steps take, plus what it takes to store it, as far as that does not lie under the products of
others; a product's, the tiles that one multiprocessor makes one after the other. A step of 128 along K takes as long as
the slowest of the following, times what a kind of kernel was found to take more where all multiprocessors are busy
(`_slower`), and a little more in a cluster

    multiplying     64 rows × n columns: 2n cycles on the tensor cores, or 64 + n to read both from shared memory
    one warpgroup   its own multiplication and then the additions on the CUDA cores, which two accumulators overlap
    loading         both tiles from the L2 cache, of what a cluster shares a block's part; and, of all, from memory
    waiting         for a stage that was asked for as many steps ago as there are others

so large tiles load least, several small ones fill the last round of multiprocessors better, and few rows are a matter
of reading the weights from all multiprocessors at once. The constants rank kernels, and are no forecast: a product of
few rows is estimated a fifth too long. They were found by choosing best among 1,637 timings of 93 products on H200s
(benchmarks/history/cost-model/sweep.json; those of more than 256 rows with bands of tiles along M, since bands along N
came
after them). By these the choice of everything but the bands costs 0.7% against the best known, at worst 8%. Which way
bands lie is not estimated: it is a rule, found by measuring some products both ways (`_bands`; benchmarks/LOG.md, 21
November). `octile bench tune` measures `candidates`, and the likeliest of each tile also with `other_rasterization`;
it keeps what it finds.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import log2, sqrt
from typing import Any

from octile.kernels.cuda.gemm import tuned
from octile.kernels.cuda.gemm.config import BLOCK_K, SHARED_BYTES, GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.problem import Chip, Problem, rounded

LAUNCH = 5400  # cycles until the first products, and after the last
L2_BYTES = 52  # a cycle, for each of the multiprocessors when all load
L2_BYTES_ONCE = 66  # where all tiles are made in one round
OWN_BYTES = 66  # that one multiprocessor takes at most
CLUSTER = 8000  # cycles more until the blocks of a cluster have all begun and ended, where they make one tile each
CLUSTERED = 1.05  # times as long is a step of blocks that wait for each other
SPLIT = 3100  # cycles until the parts of a sum have been written and counted, and read by the last
PART, PART_SUM = 570, 17.5  # cycles more for each part, and for each of a thread's sums in it
MEMORY_BYTES = 1790  # a cycle, of all, from rows that are read 128 bytes at a time
ADDED_BYTES = 655  # a cycle, of all, that the L2 cache adds to
ADDED_DIRECTLY = 280  # bytes of BF16 a cycle, of all, that threads read, add to and write, with nothing beside it
FETCH = 5000  # cycles until the first rows that are added to are there, and the last ones back
STORE_BYTES = 32  # a cycle, of one tile through shared memory to the L2 cache
LATENCY = 1000  # cycles from asking for a stage to having it
EPILOGUE = 480  # cycles of a tile's end, besides
STAGING = 2000  # cycles to fill a part of the staging, and to wait until it was emptied
LEAST = 290  # cycles of a step, however small: waiting for a stage, multiplying, waiting for the sums
WAIT = 95  # cycles between the last multiplication of a step and the first addition
BESIDE = 0.5  # of the shorter of loading and multiplying, which the longer does not hide
ALONE = 0.02  # of what a warpgroup takes by itself: of two steps that wait for the same, the shorter one
MAX_STAGES = 12
CLUSTERS = ((1, 1), (1, 2), (2, 1))  # blocks along M, which share b, and along N, which share a
IN_FLIGHT = 3.5e6  # bytes under way for all of the memory's bandwidth: what arrives during its latency
H200 = 132  # multiprocessors


def choose(problem: Problem, chip: Chip) -> GemmConfig:
    """The kernel that should be fastest; or that was, where `octile bench tune` measured."""
    return tuned.lookup(rounded(problem), chip) or _choose(rounded(problem), chip)


@lru_cache(4096)
def _choose(problem: Problem, chip: Chip) -> GemmConfig:
    return candidates(problem, chip)[0]


def candidates(problem: Problem, chip: Chip) -> list[GemmConfig]:
    """Every kernel worth trying, the most promising first."""
    return sorted(_possible(problem, chip), key=lambda config: cycles(problem, config, chip))


def _possible(problem: Problem, chip: Chip) -> Iterator[GemmConfig]:
    turns = problem.transposable and problem.m <= 256 and problem.m % 64 > 0  # rows that fill no tile of 64
    for turned in (False, True) if turns else (False,):
        p = transposed(problem) if turned else problem
        for tile_m, warpgroups, ping_pong in (
            (128, 2, False),
            (256, 2, False),
            (192, 3, False),
            (64, 1, False),
            (64, 2, True),
            (128, 2, True),
        ):
            for tile_n in _widths(p):
                if warpgroups == 3 and tile_n < 112:  # narrow tiles of many rows wait for the L2 cache
                    continue
                for cluster_m, cluster_n in CLUSTERS:
                    if not chip.clusters(cluster_m * cluster_n):
                        continue
                    for accumulators in (1, 2):
                        shape = (tile_m, tile_n, warpgroups, ping_pong, cluster_m, cluster_n, accumulators)
                        yield from _with_splits(p, turned, shape, chip)


def transposed(p: Problem) -> Problem:
    """b · aᵀ, whose result is the transposed one."""
    return replace(p, m=p.n, n=p.m, a_scales=p.b_scales, b_scales=p.a_scales, a_e5m2=p.b_e5m2, b_e5m2=p.a_e5m2)


def _widths(p: Problem) -> tuple[int, ...]:
    wide = (144, 160, 192) if p.b_scales is Scales.PER_BLOCK else (144, 160)
    return tuple(n for n in (16, 32, 48, 64, 80, 96, 112, 128, *wide) if n < 2 * p.n or n == 16)


def _with_splits(
    p: Problem, turned: bool, shape: tuple[int, int, int, bool, int, int, int], chip: Chip
) -> Iterator[GemmConfig]:
    tile_m, tile_n, warpgroups, ping_pong, cluster_m, cluster_n, accumulators = shape
    if turned and (p.store is Store.PAIRS or p.out_float or p.accumulate):
        p = replace(p, store=Store.SINGLE)
    # the copy engine adds FP32 numbers only: BF16 ones are fetched, or added to by threads
    adds = p.store is not Store.TMA or p.out_float or not p.accumulate
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
            promote=p.promote,
            transposed=turned,
            store=p.store if adds else Store.PAIRS,
            staged_boxes=1 if p.store is Store.TMA and adds else 0,
            **_bands(
                p,
                tile_m * cluster_m,
                tile_n * cluster_n,
                chip.clusters(cluster_m * cluster_n) * (2 if ping_pong else 1),
            ),
            max_groups=0 if p.schedule is Schedule.DENSE else max(32, 1 << (p.groups - 1).bit_length()),
            zero_rest=p.zero_rest,
            a_e5m2=p.a_e5m2,
            b_e5m2=p.b_e5m2,
        )
    except ValueError:
        return
    steps, tiles = -(-p.k // BLOCK_K), _tiles(p, first)
    if ping_pong and tiles < chip.multiprocessors:  # one warpgroup of each block would have none
        return
    if p.accumulate and p.store is Store.TMA:
        with suppress(ValueError):
            yield _fetching(first)
    for filled in _filled(first):
        yield filled
        if p.schedule is Schedule.DENSE and p.promote and tiles < chip.multiprocessors and not ping_pong:
            for split_k in (2, 3, 4, 6, 8, 12, 16):
                if tiles * split_k <= chip.multiprocessors and steps >= 2 * split_k:
                    with suppress(ValueError):
                        yield replace(filled, split_k=split_k)


def _filled(config: GemmConfig) -> Iterator[GemmConfig]:
    """With as many stages as there is room for, and with those that leave room to stage a wave of the result or all."""
    stage = config.pipelines * config.stage_bytes
    piece = config.warpgroups * config.store_box_bytes
    room = SHARED_BYTES - config.other_bytes
    seen = set()
    wave = config.store_boxes // config.waves
    for pieces in sorted({config.staged_boxes, wave, config.store_boxes}) if config.store is Store.TMA else (0,):
        stages = min((room - (pieces - config.staged_boxes) * piece) // stage, MAX_STAGES)
        if stages >= 2 and stages not in seen:
            seen.add(stages)
            staged = pieces
            if pieces and not config.accumulate:  # all that there is room for; what adds was slower with more
                staged = min(config.staged_boxes + (room - stages * stage) // piece, config.store_boxes)
            yield replace(config, stages=stages, staged_boxes=staged)


def _fetching(config: GemmConfig) -> GemmConfig:
    """The same, fetching what it adds to; with as many stages as there is room for beside that."""
    fetching = replace(config, store=Store.TMA, load_c=True, staged_boxes=config.store_boxes // config.waves)
    stages = (SHARED_BYTES - fetching.other_bytes) // (config.pipelines * config.stage_bytes)
    return replace(fetching, stages=min(stages, MAX_STAGES))


def _bands(p: Problem, cluster_tile_m: int, cluster_tile_n: int, at_once: int) -> dict[str, Any]:
    """Along N where a result that is stored has several bands and each several rounds, else M; see scheduler.cuh."""
    wide = sqrt(at_once * cluster_tile_m / cluster_tile_n)
    several = p.n >= 1.5 * wide * cluster_tile_n and _rows(p) >= 1.5 * at_once / wide * cluster_tile_m
    along_n = several and not p.accumulate and p.schedule in (Schedule.DENSE, Schedule.GROUPED)
    return {"raster_along_n": along_n, "raster_width": _band(along_n, cluster_tile_m, cluster_tile_n, at_once)}


def _band(along_n: bool, cluster_tile_m: int, cluster_tile_n: int, at_once: int) -> int:
    """Its square is the units at once · (cluster_tile_n / cluster_tile_m or its inverse); the nearest power of two."""
    ratio = cluster_tile_m / cluster_tile_n if along_n else cluster_tile_n / cluster_tile_m
    return 2 ** max(0, round(log2(sqrt(at_once * ratio))))


def other_rasterization(p: Problem, c: GemmConfig, chip: Chip) -> GemmConfig | None:
    """The same kernel with bands the other way; None where units lie in one row or column, whose order is the same."""
    m, n = (p.n, p.m) if c.transposed else (p.m, p.n)
    if m <= c.cluster_tile_m or n <= c.cluster_tile_n:
        return None
    band = _band(not c.raster_along_n, c.cluster_tile_m, c.cluster_tile_n, chip.clusters(c.cluster_size) * c.pipelines)
    return replace(c, raster_along_n=not c.raster_along_n, raster_width=band)


def _tiles(p: Problem, c: GemmConfig) -> int:
    """Units of a cluster's blocks, times those: what the grid has to make."""
    along_n = -(-p.n // c.cluster_tile_n)
    if p.schedule is Schedule.GROUPED:
        along_m = max(p.groups, 1) * -(-_rows(p) // c.cluster_tile_m)
    elif p.schedule is Schedule.DENSE:
        along_m = -(-p.m // c.cluster_tile_m)
    else:
        along_m = p.groups * -(-p.m // c.cluster_tile_m)
    return along_m * along_n * c.cluster_size


def _rows(p: Problem) -> int:
    """Of an ordinary group."""
    return max(-(-p.m // max(p.groups, 1)), 1)


def cycles(p: Problem, c: GemmConfig, chip: Chip) -> float:
    """An estimate of a product's time."""
    if c.transposed:
        p = transposed(p)
    tiles = _tiles(p, c) * c.split_k
    workers = chip.clusters(c.cluster_size) * c.cluster_size
    rounds = -(-tiles // (workers * c.pipelines))
    busy = min(tiles, workers)
    k = p.k / max(p.groups, 1) if p.schedule is Schedule.ALONG_K else p.k
    steps = -(-max(k, 1) // BLOCK_K) / c.split_k

    waves = c.tile_m // 64  # of the team
    multiply = waves * max(2 * c.tile_n, 64 + c.tile_n)
    operations = {Scales.PER_ROW: 2, Scales.PER_BLOCK: 1, Scales.PER_TENSOR: 1}[c.b_scales]
    add = (c.waves * c.tile_n // 2 * operations + 45) if c.promote else 20
    own = multiply * c.waves // waves  # by one warpgroup
    alone = own + (add + WAIT * c.waves) / c.accumulators
    load = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * BLOCK_K
    slow = min((L2_BYTES_ONCE if rounds == 1 else L2_BYTES) * chip.multiprocessors / busy, OWN_BYTES)
    step = max(multiply, alone, load / slow, LATENCY / (c.stages - 1), LEAST)
    if c.ping_pong:  # two tiles at once
        step = max(c.pipelines * multiply, alone, c.pipelines * load / slow, LATENCY / (c.stages - 1))
    step += ALONE * alone
    stored = c.tile_m * c.tile_n * (4 if c.split_k > 1 else c.out_bytes) / STORE_BYTES
    if c.store is Store.TMA and c.store_columns < 32:  # rows of a piece fill half a line of memory or less
        stored *= 2
    times = -(-c.store_boxes // c.staged_boxes) if c.staged_boxes else 1  # that the staging is filled and emptied
    if c.store is Store.TMA and c.out_float and c.schedule is Schedule.DENSE:  # waits for memory, not for the room
        times = 1
    parts = SPLIT + c.split_k * (PART + PART_SUM * c.waves * c.tile_n // 2) if c.split_k > 1 else 0
    epilogue = EPILOGUE + STAGING * times + stored + parts
    under_products = c.store is Store.TMA and c.promote and c.accumulators == 1 and c.split_k == 1
    hidden = 0.2 if c.ping_pong else 1 if not under_products else 0.5 if c.waves > 1 else 0.9
    slower = (_slower(c) if busy == workers else 1) * (CLUSTERED if c.cluster_size > 1 else 1)
    tile = steps * step * slower + epilogue * (hidden if rounds > 1 else 1)

    weights = p.groups if p.schedule is not Schedule.DENSE else 1
    memory = (p.m * p.k + p.n * p.k * (weights if p.schedule is not Schedule.ALONG_K else 1)) / MEMORY_BYTES
    added = c.out_bytes * p.m * p.n * weights if p.accumulate else 0
    if c.load_c:
        adding = FETCH + 2 * added / MEMORY_BYTES  # which the products wait for
    elif c.out_float:
        adding, memory = 0, memory + added / ADDED_BYTES
    else:
        adding = added / ADDED_DIRECTLY
    under_way = c.stages * c.pipelines * (min(c.tile_m, p.m) + min(c.tile_n, p.n)) * BLOCK_K * busy
    memory *= max(1.0, IN_FLIGHT / under_way)
    made = rounds * tile + (CLUSTER if c.cluster_size > 1 and rounds == 1 else 0)
    end = epilogue if rounds == 1 else 0  # when nothing is loaded any more
    made -= end
    return LAUNCH + max(made, memory) + BESIDE * min(made, memory) + end + adding


def _slower(c: GemmConfig) -> float:
    """Than the arithmetic says a step is where all multiprocessors are busy: on an H200."""
    if c.ping_pong:
        return 2.0 if c.is_1d1d else 1.75
    if c.tile_n < 128 and c.tile_m >= 192 and not c.is_1d1d:
        return 1.3
    if c.warpgroups == 3:
        return 1.65 if c.is_1d1d else 1.02
    if c.waves == 1 and c.accumulators == 1:
        return 1.5 if c.is_1d1d else 1.25
    return 1.44 if c.is_1d1d else 1.24 if c.stages == 3 else 1.1  # with three, some products wait for a stage


LARGE = (
    (4096, 2112, 7168), (4096, 576, 7168), (4096, 24576, 1536), (4096, 32768, 512),
    (4096, 7168, 16384), (4096, 4096, 7168), (4096, 7168, 2048), (8192, 8192, 8192),
)  # fmt: skip
SMALL = ((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048))
EXPERTS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
FLOAT: dict[str, Any] = {"out_float": True}
WGRAD: dict[str, Any] = {"b_scales": Scales.PER_ROW}
ONE_SCALE: dict[str, Any] = {"a_scales": Scales.PER_TENSOR, "b_scales": Scales.PER_TENSOR}


def v3_configs() -> dict[str, GemmConfig]:
    """The kernels that DeepSeek-V3's shapes take on an H200, by what they are for."""
    problems = {f"dense {m}×{n}×{k}": Problem(m, n, k) for m, n, k in LARGE}
    problems |= {
        f"dense {m}×{n}×{k}": Problem(m, n, k, transposable=True)
        for m in (1, 8, 16, 32, 64, 128, 256)
        for n, k in SMALL
    }
    for m, n, k in LARGE:
        shape = f"{m}×{n}×{k}"
        problems[f"wgrad, adding, {shape}"] = Problem(m, n, k, accumulate=True, **WGRAD, **FLOAT)
        problems[f"wgrad, float32, {shape}"] = Problem(m, n, k, **WGRAD, **FLOAT)
        problems[f"wgrad, bfloat16, {shape}"] = Problem(m, n, k, **WGRAD)
        problems[f"dense, adding to bfloat16, {shape}"] = Problem(m, n, k, accumulate=True)
        problems[f"dense, float32, {shape}"] = Problem(m, n, k, **FLOAT)
        problems[f"one scale, {shape}"] = Problem(m, n, k, **ONE_SCALE)
    for n, k in SMALL:
        problems[f"wgrad, adding, 128×{n}×{k}"] = Problem(128, n, k, accumulate=True, **WGRAD, **FLOAT)
        problems[f"wgrad, bfloat16, 128×{n}×{k}"] = Problem(128, n, k, **WGRAD)
    for n, k in EXPERTS:
        for groups, rows in ((4, 8192), (8, 4096), (256, 16)):
            name = f"grouped, {groups} of {rows}×{n}×{k}"
            problems[name] = Problem(groups * rows, n, k, groups, Schedule.GROUPED)
            problems[f"{name}, into a result"] = replace(problems[name], zero_rest=False)
        for groups, rows in ((32, 192), (6, 1024), (32, 20), (6, 20)):
            name = f"masked, {groups} of some {rows}×{n}×{k}"
            problems[name] = Problem(rows, n, k, groups, Schedule.MASKED)
    for groups, tokens in ((4, 8192), (8, 4096), (16, 2048)):
        for m, n in ((4096, 7168), (7168, 2048)):
            for accumulate in (False, True):
                name = f"grouped wgrad{', adding' if accumulate else ''}, {groups} of {m}×{n}×{tokens}"
                all_tokens = groups * tokens
                problems[name] = Problem(
                    m, n, all_tokens, groups, Schedule.ALONG_K, accumulate=accumulate, **WGRAD, **FLOAT
                )
            name = f"grouped wgrad, bfloat16, {groups} of {m}×{n}×{tokens}"
            problems[name] = Problem(m, n, groups * tokens, groups, Schedule.ALONG_K, **WGRAD)
    problems |= {
        "dense, any strides": Problem(4096, 2111, 7168, store=Store.SINGLE),
        "dense, no promotion": Problem(4096, 4096, 7168, promote=False, **ONE_SCALE),
        "dense, E5M2 times E4M3": Problem(4096, 4096, 7168, a_e5m2=True),
    }
    return {name: _choose(rounded(problem), Chip(H200)) for name, problem in problems.items()}
