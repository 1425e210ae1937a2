"""Configuration of a GEMM kernel: the constants of gemm.cu, and the rules that make them fit an SM.

A thread block has one producer warpgroup, which loads tiles with TMA, and one to three consumer warpgroups, which
multiply them. The consumers are cooperative (all work on one tile) or ping-pong (each has its own tile and pipeline).
"""

from dataclasses import dataclass, fields
from enum import IntEnum
from math import gcd

from octile.kernels.cuda.jit import wgmma
from octile.kernels.hopper import SHARED_BYTES

BLOCK_K = 128  # extent of a k-block: one 128-byte row of a tile, and the extent of a scale's block


class Scales(IntEnum):
    """The block of an operand that one scale belongs to."""

    PER_TENSOR = 0  # the whole tensor
    PER_BLOCK = 1  # 128×128
    PER_ROW = 2  # 1×128


class Schedule(IntEnum):
    """The kind of GEMM, which decides how the tile scheduler finds tiles; see scheduler.cuh."""

    DENSE = 0
    GROUPED = 1
    MASKED = 2
    ALONG_K = 3


class Store(IntEnum):
    """How the epilogue stores the result; see store.cuh."""

    SINGLE = 0
    PAIRS = 1
    TMA = 2


@dataclass(frozen=True)
class GemmConfig:
    """One kernel. The attributes are constants of the CUDA source, with the same names.

    Attributes:
        tile_m, tile_n: rows and columns of an output tile.
        stages: stages of a pipeline.
        warpgroups: consumer warpgroups, 1 to 3. The producer warpgroup is one more.
        ping_pong: each consumer warpgroup has its own tile and pipeline; otherwise all share one.
        accumulators: accumulators of a consumer warpgroup. With 2 it multiplies the next wave while it promotes the
            last one: the second wave of a k-block, or with one wave the next k-block.
        cluster_m, cluster_n: thread blocks of a cluster along M, which share tiles of b, and along N, which share tiles
            of a.
        split_k: number of splits of K; 1 is no split-K.
        a_scales, b_scales: the block of a scale of each operand.
        schedule: the kind of GEMM.
        out_float: the result is float32; otherwise bfloat16.
        accumulate: the result is added to the output tensor C.
        load_c: the epilogue loads C to shared memory and adds there; otherwise it adds in the L2 cache.
        prefetch_c: the producer loads C's part of a tile to the L2 cache before the epilogue adds to it there.
        adds_rounded: the result is rounded to BF16 before it is added to C.
        promote: every k-block is added in FP32 on the CUDA cores; otherwise the tensor cores sum over all of K.
        transposed: the result is stored as [N, M].
        store: how the result is stored.
        staged_boxes: store boxes that a warpgroup has shared memory for, where TMA stores the result.
        raster_along_n: the scheduler visits tiles in strips along N, row by row; otherwise along M, column by column.
        raster_width: cluster tiles across a strip.
        max_groups: number of groups that there is shared memory for.
        zero_rest: rows after the last group are set to zero; otherwise they are not written.
        a_e5m2, b_e5m2: the operand is E5M2; otherwise E4M3.
        bf16: both operands are BF16, and K counts their bytes.
        programmatic: the kernel may start before the previous one of the stream has ended (`octile.kernels.cuda.jit.
            launch.overlapping_launches`). A dense one loads the first tiles of a weight, the operand with 128×128
            scales, before it waits.
        early_groups: a programmatic grouped one does so, too: the previous kernel does not write the offsets.

    Raises:
        ValueError: there is no such kernel. The message gives the reason.
    """

    tile_m: int
    tile_n: int
    stages: int
    warpgroups: int = 2
    ping_pong: bool = False
    accumulators: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    a_scales: Scales = Scales.PER_ROW
    b_scales: Scales = Scales.PER_BLOCK
    schedule: Schedule = Schedule.DENSE
    out_float: bool = False
    accumulate: bool = False
    load_c: bool = False
    prefetch_c: bool = False
    adds_rounded: bool = False
    promote: bool = True
    transposed: bool = False
    store: Store = Store.TMA
    staged_boxes: int = 0
    raster_along_n: bool = False
    raster_width: int = 8
    max_groups: int = 0
    zero_rest: bool = True
    a_e5m2: bool = False
    b_e5m2: bool = False
    bf16: bool = False
    programmatic: bool = False
    early_groups: bool = False

    def __post_init__(self) -> None:
        for holds, why in self._rules():
            if not holds:
                raise ValueError(f"{self}: {why}")

    @property
    def threads(self) -> int:
        """Threads of a thread block, the producer warpgroup included."""
        return 128 * (self.warpgroups + 1)

    @property
    def pipelines(self) -> int:
        """Pipelines of a thread block, which is also the number of tiles that it works on at the same time."""
        return self.warpgroups if self.ping_pong else 1

    @property
    def cluster_size(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def cluster_tile_m(self) -> int:
        """Rows of a cluster tile: the tiles that the thread blocks of a cluster compute together."""
        return self.tile_m * self.cluster_m

    @property
    def cluster_tile_n(self) -> int:
        """Columns of a cluster tile."""
        return self.tile_n * self.cluster_n

    @property
    def waves(self) -> int:
        """Waves of a tile: times that a consumer warpgroup multiplies 64 rows of it."""
        return self.tile_m * self.pipelines // (64 * self.warpgroups)

    @property
    def is_1d1d(self) -> bool:
        """Both operands have 1×128 scales. Those of b take registers of the consumers; the producer, which reads no
        scales then, needs few."""
        return self.a_scales is self.b_scales is Scales.PER_ROW

    @property
    def has_block_scales(self) -> bool:
        """One operand has 128×128 scales, which the producer reads."""
        return Scales.PER_BLOCK in (self.a_scales, self.b_scales)

    @property
    def passes_tiles(self) -> bool:
        """The producer passes tiles to the consumers, which otherwise find them themselves: faster with small tiles."""
        is_small = self.warpgroups == 1 or self.accumulators > self.waves
        is_simple = self.cluster_size == self.split_k == self.pipelines == 1
        can_pass = self.has_block_scales and self.schedule in (Schedule.DENSE, Schedule.MASKED)
        return is_small and is_simple and can_pass

    @property
    def producer_registers(self) -> int:
        """Registers of a producer thread after setmaxnreg."""
        return {1: 40, 2: 24 if self.is_1d1d else 40}.get(self.warpgroups, 32)

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread after setmaxnreg."""
        return {1: 255, 2: 240 if self.is_1d1d else 232}.get(self.warpgroups, 160)

    @property
    def accumulator_registers(self) -> int:
        """Registers of a consumer thread that hold accumulators and FP32 totals."""
        return self.tile_n // 2 * (self.waves + (self.accumulators if self.promote else 0))

    @property
    def cached_b_scales(self) -> int:
        """Pairs of b's 1×128 scales of a k-block that a consumer thread holds in registers."""
        if not self.is_1d1d or self.accumulators > self.waves:  # those of two k-blocks at once have no room
            return 0
        # found by compiling, as are the next 4 or 6
        others = 16 if self.out_float or self.accumulators > 1 else 28 if self.store_columns >= 32 else 30
        others += (6 if self.ping_pong else 4) if self.load_c and self.cluster_size > 1 else 0
        return min(max(self.consumer_registers - self.accumulator_registers - others, 0) // 2, self.tile_n // 8)

    @property
    def other_registers(self) -> int:
        """Registers for addresses, scales and the scheduler; found by compiling the largest tiles of every kind."""
        scales_in_flight = self.ping_pong and self.accumulators == 2 and self.b_scales is Scales.PER_ROW
        # split along K, and columns of a tile that reach two 128×128 blocks
        split_and_two_blocks = self.split_k > 1 and self.waves > 1 and BLOCK_K % self.tile_n > 0
        uses_stmatrix = self.store is Store.TMA and not self.out_float and not self.load_c
        narrow_boxes = self.is_1d1d and self.waves > 1 and uses_stmatrix and self.store_columns < 32
        base = 40 if self.warpgroups < 3 else 32
        return base + (8 if scales_in_flight else 0) + (40 if narrow_boxes else 32 if split_and_two_blocks else 0)

    @property
    def out_bytes(self) -> int:
        """Bytes of an element of the result."""
        return 4 if self.out_float else 2

    @property
    def store_columns(self) -> int:
        """Columns of a store box: the 64 rows of a tile that one TMA store writes."""
        return self.tile_n if self.transposed else gcd(self.tile_n, 128 // self.out_bytes)

    @property
    def store_boxes(self) -> int:
        """Store boxes of a warpgroup's part of a tile."""
        return self.waves * self.tile_n // self.store_columns

    @property
    def store_box_bytes(self) -> int:
        """Bytes of a store box."""
        return 64 * self.store_columns * self.out_bytes

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage, its two mbarriers and a tile that is passed included."""
        a_scales = self.tile_m * 4 if self.a_scales is Scales.PER_ROW else 0
        b_scales = _rounded_up(self.tile_n * 4, 128) if self.b_scales is Scales.PER_ROW else 0
        passed_tile = 16 if self.passes_tiles else 0
        return (self.tile_m + self.tile_n) * BLOCK_K + a_scales + b_scales + passed_tile + 16

    @property
    def other_bytes(self) -> int:
        """Shared memory besides the stages."""
        staging = self.warpgroups * self.staged_boxes * self.store_box_bytes
        groups = 4 * (2 * self.max_groups + 3) if self.max_groups else 0
        # 128×128 scales of 64 k-blocks, two for each k-block, stored twice
        block_scales = 64 * 16 * self.pipelines if self.has_block_scales else 0
        return staging + block_scales + (20 if self.load_c else 4) * self.warpgroups + groups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return self.other_bytes + self.pipelines * self.stages * self.stage_bytes

    def constants(self) -> dict[str, int | bool]:
        """The constants that the CUDA source is specialized with, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        derived = ("passes_tiles", "producer_registers", "consumer_registers", "cached_b_scales", "shared_bytes")
        return named | {name: getattr(self, name) for name in derived}

    def headers(self) -> dict[str, str]:
        """The generated header wgmma.cuh: the wgmma instruction for this tile_n and these formats."""
        a, b = ("bf16" if self.bf16 else "e5m2" if e5m2 else "e4m3" for e5m2 in (self.a_e5m2, self.b_e5m2))
        return {"wgmma.cuh": wgmma.header(self.tile_n, a, b)}

    def _rules(self) -> list[tuple[bool, str]]:
        kinds = a, b = self.a_scales, self.b_scales
        tma = self.store is Store.TMA
        grouped = self.schedule in (Schedule.GROUPED, Schedule.MASKED)
        rows = 64 * self.warpgroups // self.pipelines
        boxes, registers, limit = self.store_boxes, self.accumulator_registers, self.consumer_registers
        return [
            (self.warpgroups in (1, 2, 3), "warpgroups must be 1 to 3"),
            (not self.ping_pong or self.warpgroups == 2, "ping_pong takes two warpgroups"),
            (self.tile_m % rows == 0 and 0 < self.tile_m <= 256, f"tile_m must be a multiple of {rows} up to 256"),
            (self.tile_n in range(8, 257, 8), "tile_n must be a multiple of 8 up to 256"),
            (self.stages >= 2, "there must be two stages or more"),
            (self.cluster_size in (1, 2), "a cluster must have 1 or 2 blocks"),
            (kinds in SCALE_KINDS, "scales must be 1×128 with 128×128, 1×128 for both, or per tensor for both"),
            (not self.bf16 or not self.promote, "sums of BF16 products are not promoted"),
            (self.promote or kinds == (Scales.PER_TENSOR,) * 2, "without promotion scales must be per tensor"),
            (self.accumulators in (1, 2), "accumulators must be 1 or 2"),
            (self.accumulators == 1 or (self.waves <= 2 and self.promote), "two accumulators take one wave or two"),
            (self.split_k >= 1, "split_k must be at least 1"),
            (self.split_k == 1 or self.schedule is Schedule.DENSE, "split_k takes a dense GEMM"),
            (self.split_k == 1 or not self.ping_pong, "split_k is for few tiles, and ping_pong for many"),
            (b is not Scales.PER_BLOCK or _max_blocks(self.tile_n) <= 2, "a tile would reach three blocks of b"),
            (a is not Scales.PER_BLOCK or self.waves <= 2, "a warpgroup's rows would reach two blocks of a"),
            (a is not Scales.PER_BLOCK or self.warpgroups < 3, "rows of three warpgroups do not match blocks of a"),
            (not grouped or a is Scales.PER_ROW or self.bf16, "groups begin at any row, blocks of a do not"),
            (not grouped or not self.accumulate, "accumulate takes no groups of rows"),
            (not self.transposed or self.schedule is Schedule.DENSE, "transposed takes a dense GEMM"),
            (not self.transposed or self.tile_n % 16 == 0, "a transposed tile_n must be a multiple of 16"),
            (not self.transposed or self.store is not Store.PAIRS, "pairs of a transposed result are no neighbors"),
            (self.schedule is Schedule.DENSE or self.max_groups > 0, "groups need shared memory: max_groups is 0"),
            (not tma or not self.accumulate or self.out_float or self.load_c, "TMA adds to float32 only"),
            (not tma or not (self.transposed and self.out_float), "TMA does not store a transposed float32 result"),
            (not tma or 0 < self.staged_boxes <= boxes, f"staged_boxes must be 1 to {boxes}"),
            (tma or self.staged_boxes == 0, "only TMA stores staged boxes"),
            (not self.load_c or (tma and self.accumulate), "load_c needs accumulate and Store.TMA"),
            (not self.load_c or not self.transposed, "load_c does not transpose"),
            (not self.prefetch_c or (tma and self.accumulate), "prefetch_c needs accumulate and Store.TMA"),
            (not self.prefetch_c or not self.load_c, "prefetch_c excludes load_c: C is in shared memory then"),
            (not self.prefetch_c or not self.has_block_scales, "prefetch_c takes no 128×128 scales"),
            (not self.adds_rounded or (self.accumulate and not self.out_float), "adds_rounded adds to BF16"),
            (not self.load_c or self.split_k == 1, "load_c takes no split_k: only the last split stores"),
            (not self.load_c or self.staged_boxes * self.waves == boxes, "load_c adds to 64 rows at a time"),
            (registers + self.other_registers <= limit, f"{registers} accumulator registers are too many"),
            (self.shared_bytes <= SHARED_BYTES, f"{self.shared_bytes} bytes of shared memory do not fit"),
        ]  # fmt: skip


SCALE_KINDS = (  # of a and b, in this order
    (Scales.PER_ROW, Scales.PER_BLOCK),
    (Scales.PER_BLOCK, Scales.PER_ROW),
    (Scales.PER_ROW, Scales.PER_ROW),
    (Scales.PER_TENSOR, Scales.PER_TENSOR),
)


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _max_blocks(tile_n: int) -> int:
    """Return the largest number of blocks of 128 columns that a tile of this width overlaps."""
    starts = range(0, BLOCK_K, gcd(tile_n, BLOCK_K))
    return max(-(-(start + tile_n) // BLOCK_K) for start in starts)
