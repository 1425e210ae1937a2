"""Cost model of the GEMM kernels: an estimate in cycles by which kernel configurations are ranked.

A tile takes the time of its k-blocks and of its epilogue, as far as that is not hidden by the main loops of other
tiles. A GEMM takes the time of the tiles that one SM computes one after the other. A k-block takes as long as the
slowest of the following, times what a kind of kernel was measured to take more where all SMs are busy
(`_slowdown`), and a little longer in a cluster:

    tensor cores    64 rows × n columns: 2n cycles, or 64 + n to read both operands from shared memory
    one warpgroup   its own MMAs and then the promotion on the CUDA cores, which two accumulators overlap
    loads           both tiles from the L2 cache, of what a cluster shares a block's part; and of all SMs, from memory

So large tiles load least, several small ones fill the last round of SMs better, and few rows are a matter of reading
the weights from all SMs at once. Rates of memory are proportional to the GPU's bandwidth: it decides how C is added to.
The constants rank kernels and are no forecast: a GEMM of few rows is estimated a fifth too long. They were chosen on
935 sets of timings of GEMMs on H200s and H100s, each with up to 36 kernels (benchmarks/history/cost-model and
gemm-drawn). The kernels that they choose are 1.2% slower than the best measured ones, at worst 28%. The order of tiles
is not estimated, but follows a rule (`candidates`).
"""

import math
from dataclasses import dataclass, replace

from octile.kernels.cuda.gemm.config import BLOCK_K, GemmConfig, Scales, Schedule, Store

MASKED_ROWS = 256  # rows assumed of a masked group where the caller gives no expectation
LAUNCH_CYCLES = 5400  # until the first MMA, and after the last
L2_BYTES_PER_CYCLE = 48  # of each SM when all load
MAX_L2_BYTES_PER_CYCLE = 66  # that one SM takes, and each where all tiles are computed in one round
CLUSTER_CYCLES = 8000  # more until the blocks of a cluster have all begun and ended, where they compute one tile each
CLUSTER_SLOWDOWN = 1.05  # of a k-block of blocks that wait for each other, in kernels that hide it less
SPLIT_CYCLES = 3100  # until the split-K partials are written and counted, and read by the last block
PARTIAL_CYCLES, PARTIAL_REGISTER_CYCLES = 570, 17.5  # more for each partial, and for each accumulator register in it
MEMORY_BYTES_PER_CYCLE = 1790  # of all SMs, from rows that are read 128 bytes at a time
RED_BYTES_PER_CYCLE = 655  # of all SMs, that the L2 cache adds to (red.global.add)
THREAD_ADD_BYTES_PER_CYCLE = 280  # of all SMs, BF16 that threads load, add to and store, which nothing hides
LOAD_C_CYCLES = 5000  # until the first rows of C are there, and the last ones stored
LOAD_BF16_C_CYCLES = 1000  # the same of BF16, whose reading, but not its storing, adds to the time of a stored result
STORE_BYTES_PER_CYCLE = 32  # of one tile through shared memory to the L2 cache
EPILOGUE_CYCLES = 480  # of a tile, besides its stores
STAGING_CYCLES = 1500  # to fill the staging buffer once, and to wait until it is stored
MIN_CYCLES_PER_K_BLOCK = 290  # however small: waiting for a stage, multiplying, waiting for the accumulator
PROMOTION_WAIT_CYCLES = 95  # between the last MMA of a k-block and the first addition of its promotion
UNHIDDEN_SHARE = 0.5  # of the shorter of loading and multiplying, which the longer does not hide
PREFETCHED_SHARE = 0.4  # the same where C is loaded to the L2 cache before the epilogue adds to it
WARPGROUP_SHARE = 0.02  # of the time of one warpgroup alone: prefers the shorter of two k-blocks with the same bound
# assumed of groups of any sizes, relative to their mean: ±20% (benchmarks/history/any-groups)
GROUP_SIZES = tuple(0.8 + 0.4 * (i + 0.5) / 13 for i in range(13))
ROWS_BEFORE_GROUP = 1.5  # mean number of rows of the previous group in a group's first tile (scheduler.cuh)
H200_BANDWIDTH = 4.814304e12  # bytes/s, as its driver has it: the rates of memory above were measured at it


@dataclass(frozen=True)
class Chip:
    """A GPU, and the number of its SMs that a GEMM may use. The default is an H200.

    Attributes:
        gpu_multiprocessors: the number of all its SMs, by which K is split, so that fewer SMs give the same bits;
            0: as many.
        memory_bandwidth: the peak, in bytes/s.
        name: as the driver has it, by which measured kernels are stored.
    """

    multiprocessors: int
    gpu_multiprocessors: int = 0
    memory_bandwidth: float = H200_BANDWIDTH
    name: str = "NVIDIA H200"

    @property
    def whole(self) -> "Chip":
        """The GPU with all its SMs."""
        return replace(self, multiprocessors=max(self.gpu_multiprocessors, self.multiprocessors), gpu_multiprocessors=0)

    def clusters(self, size: int) -> int:
        """Return how many clusters of this many blocks run at the same time."""
        return self.multiprocessors // size


@dataclass(frozen=True)
class Problem:
    """A GEMM a[m, k] · b[n, k]ᵀ with scales, or one for each group: what decides on a kernel configuration.

    Attributes:
        m: rows of a; of all groups together in a grouped GEMM, the expected rows of one group in a masked one.
        k: the contracted dimension; of all groups together where groups are along K.
        transposable: the result may be computed as b · aᵀ.
        row_invariant: K is not split, and a result is rounded before it is added (`GemmRequest`).
        alignment: number that the sizes of groups are multiples of, in a grouped GEMM.

    All other attributes are as in `GemmConfig`.
    """

    m: int
    n: int
    k: int
    groups: int = 1
    schedule: Schedule = Schedule.DENSE
    a_scales: Scales = Scales.PER_ROW
    b_scales: Scales = Scales.PER_BLOCK
    out_float: bool = False
    accumulate: bool = False
    promote: bool = True
    store: Store = Store.TMA
    transposable: bool = False
    zero_rest: bool = True
    a_e5m2: bool = False
    b_e5m2: bool = False
    row_invariant: bool = False
    alignment: int = 1

    @property
    def is_1d1d(self) -> bool:
        """Both operands have 1×128 scales."""
        return self.a_scales is self.b_scales is Scales.PER_ROW

    @property
    def k_of_a_sum(self) -> float:
        """The contracted dimension of one product: on average of a group's where groups are along K."""
        return self.k / max(self.groups, 1) if self.schedule is Schedule.ALONG_K else self.k


def rounded(p: Problem) -> Problem:
    """Round m up to a 32nd of a power of two: m changes from call to call, and similar sizes share a kernel."""
    if p.m <= 16:
        return replace(p, m=16 if p.m > 8 else 8)
    step = max((1 << (p.m - 1).bit_length()) // 64, 16)
    return replace(p, m=-(-p.m // step) * step)


def transposed(p: Problem) -> Problem:
    """Return the problem of the transposed result, b · aᵀ."""
    return replace(p, m=p.n, n=p.m, a_scales=p.b_scales, b_scales=p.a_scales, a_e5m2=p.b_e5m2, b_e5m2=p.a_e5m2)


def cycles(p: Problem, c: GemmConfig, chip: Chip) -> float:
    """Estimate the cycles that a GEMM takes with a kernel configuration."""
    if c.transposed:
        p = transposed(p)
    tiles = num_tiles(p, c) * c.split_k
    workers = chip.clusters(c.cluster_size) * c.cluster_size
    rounds = -(-tiles // (workers * c.pipelines))
    busy = min(tiles, workers)
    k_blocks = -(-max(p.k_of_a_sum, 1) // BLOCK_K) / c.split_k

    rows_of_64 = c.tile_m // 64
    mma = rows_of_64 * max(2 * c.tile_n, 64 + c.tile_n)
    operations = {Scales.PER_ROW: 2, Scales.PER_BLOCK: 1, Scales.PER_TENSOR: 1}[c.b_scales]
    promotion = (c.waves * c.tile_n // 2 * operations + 45) if c.promote else 20
    warpgroup_mma = mma * c.waves // rows_of_64
    warpgroup = warpgroup_mma + (promotion + PROMOTION_WAIT_CYCLES * c.waves) / c.accumulators
    loaded = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * BLOCK_K
    l2_bytes = MAX_L2_BYTES_PER_CYCLE if rounds == 1 else L2_BYTES_PER_CYCLE
    load_bytes = min(l2_bytes * chip.multiprocessors / busy, MAX_L2_BYTES_PER_CYCLE)
    k_block = max(mma, warpgroup, loaded / load_bytes, MIN_CYCLES_PER_K_BLOCK)
    if c.ping_pong:  # two tiles at once
        k_block = max(c.pipelines * mma, warpgroup, c.pipelines * loaded / load_bytes)
    k_block += WARPGROUP_SHARE * warpgroup
    store = c.tile_m * c.tile_n * (4 if c.split_k > 1 else c.out_bytes) / STORE_BYTES_PER_CYCLE
    if c.store is Store.TMA and c.store_columns < 32:  # rows of a store box fill half a line of memory or less
        store *= 2
    stagings = -(-c.store_boxes // c.staged_boxes) if c.staged_boxes else 1  # times that the buffer is filled
    if c.store is Store.TMA and c.out_float and c.schedule is Schedule.DENSE:  # waits for memory, not for the buffer
        stagings = 1
    partials = 0.0
    if c.split_k > 1:
        partials = SPLIT_CYCLES + c.split_k * (PARTIAL_CYCLES + PARTIAL_REGISTER_CYCLES * c.waves * c.tile_n // 2)
    epilogue = EPILOGUE_CYCLES + STAGING_CYCLES * stagings + store + partials
    overlaps_mma = c.store is Store.TMA and c.promote and c.accumulators <= c.waves and c.split_k == 1
    exposed = 0.2 if c.ping_pong else 0.5 if overlaps_mma and c.waves > 1 else 1
    slowdown = _slowdown(c, rounds) if busy == workers else 1
    if c.cluster_m > 1 or (c.cluster_size > 1 and (c.is_1d1d or c.accumulators > 1 or c.ping_pong)):
        slowdown *= CLUSTER_SLOWDOWN
    if c.cluster_size > 1 and c.tile_m == 64:  # they wait for memory, to which the blocks' loads are the same
        slowdown *= CLUSTER_SLOWDOWN
    tile = k_blocks * k_block * slowdown + epilogue * (exposed if rounds > 1 else 1)

    weights = p.groups if p.schedule is not Schedule.DENSE else 1
    operand_bytes = p.m * p.k + p.n * p.k * (weights if p.schedule is not Schedule.ALONG_K else 1)
    bandwidth = chip.memory_bandwidth / H200_BANDWIDTH
    memory = operand_bytes / (MEMORY_BYTES_PER_CYCLE * bandwidth)
    c_bytes = c.out_bytes * p.m * p.n * weights if p.accumulate else 0
    if c.load_c and c.out_float:
        accumulate = LOAD_C_CYCLES + 2 * c_bytes / (MEMORY_BYTES_PER_CYCLE * bandwidth)  # which the MMAs wait for
    elif c.load_c:
        accumulate = LOAD_BF16_C_CYCLES + c_bytes / (MEMORY_BYTES_PER_CYCLE * bandwidth)
    elif c.out_float:
        accumulate, memory = 0, memory + c_bytes / (RED_BYTES_PER_CYCLE * bandwidth)
    else:
        accumulate = c_bytes / THREAD_ADD_BYTES_PER_CYCLE
    compute = rounds * tile + (CLUSTER_CYCLES if c.cluster_size > 1 and rounds == 1 else 0)
    last_epilogue = epilogue if rounds == 1 else 0  # when nothing is loaded any more
    compute -= last_epilogue
    unhidden = (PREFETCHED_SHARE if c.prefetch_c else UNHIDDEN_SHARE) * min(compute, memory)
    return LAUNCH_CYCLES + max(compute, memory) + unhidden + last_epilogue + accumulate


def num_tiles(p: Problem, c: GemmConfig) -> int:
    """Return the number of output tiles, in whole clusters; of groups of unknown sizes, the number to be expected.

    Groups of any sizes are near their mean; of those that are multiples of `alignment` the last tile is half empty.
    """
    along_n = -(-p.n // c.cluster_tile_n)
    if p.schedule is Schedule.GROUPED:
        groups = max(p.groups, 1)
        if p.alignment == 1:
            rows = p.m / groups
            tiles = sum(math.ceil((size * rows + ROWS_BEFORE_GROUP) / c.cluster_tile_m) for size in GROUP_SIZES)
            along_m = math.ceil(groups * tiles / len(GROUP_SIZES))
        else:
            unused_rows = (c.cluster_tile_m - math.gcd(c.cluster_tile_m, p.alignment)) / 2  # of a group's last tile
            along_m = max(math.ceil((p.m + groups * unused_rows) / c.cluster_tile_m), groups)
    elif p.schedule is Schedule.DENSE:
        along_m = -(-p.m // c.cluster_tile_m)
    else:
        along_m = p.groups * -(-p.m // c.cluster_tile_m)
    return along_m * along_n * c.cluster_size


def _slowdown(c: GemmConfig, rounds: int) -> float:
    """Return how much longer a k-block was measured to take than estimated, where all SMs are busy."""
    if c.ping_pong:
        return 1.85
    if c.schedule is Schedule.ALONG_K:
        return 1.15
    if c.accumulators > 1 and c.waves > 1:
        return 1.2
    if c.is_1d1d and c.warpgroups == 3 and rounds == 1:
        return 1
    if c.is_1d1d and c.warpgroups == 3 and c.tile_n == 128 and not c.out_float:
        return 1.2
    if c.is_1d1d:
        return 1.52 if c.out_float and c.waves == 1 else 1.44
    if c.tile_n < 128 and c.tile_m >= 192:
        return 1.3
    if c.warpgroups == 3:
        return 0.94 if c.schedule is Schedule.MASKED else 1.02
    if c.waves == 1:
        return 1.25 if c.accumulators == c.warpgroups == 1 else 1.1
    # the L2 cache seems to serve SMs unequally (benchmarks/history/gemm-masked)
    without_cluster = 1.05 if c.schedule is Schedule.MASKED and c.cluster_size == 1 else 1
    return without_cluster * (1.2 if c.stages == 3 else 1.08)
