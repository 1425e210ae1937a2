"""The constants that specialise the product kernel, and which of them fit a multiprocessor together.

a tile      tile_m × tile_n of the result; a warpgroup multiplies 64 rows at a time, `waves` times
a stage     128 bytes along K of both operands, with the scales of their rows
a team      the warpgroups that share tiles: all of them, or with ping_pong each by itself
"""

from dataclasses import dataclass, fields
from enum import IntEnum
from math import gcd

from octile.kernels.cuda.jit import wgmma

SHARED_BYTES = 232448  # that a block may have on sm_90
STEP = 128  # along K: one 128-byte row of a tile, and a block of the scales


class Scales(IntEnum):
    """What one scale of an operand stands for."""

    PER_TENSOR = 0  # all of it
    PER_BLOCK = 1  # 128×128
    PER_ROW = 2  # 1×128


class Schedule(IntEnum):
    """What the product is a product of; see scheduler.cuh."""

    DENSE = 0
    GROUPED = 1
    MASKED = 2
    ALONG_K = 3


class Store(IntEnum):
    """How the result is stored; see epilogue.cuh."""

    SINGLE = 0
    PAIRS = 1
    TMA = 2


@dataclass(frozen=True)
class Config:
    """One kernel. The attributes are the names in the CUDA source.

    Attributes:
        tile_m, tile_n: of a team.
        stages: of a team.
        warpgroups: that multiply, 1 to 3; one more copies.
        ping_pong: each warpgroup has its own tiles.
        accumulators: sums of a step that a warpgroup holds: with 2 it multiplies the next while it adds the last.
        cluster_m, cluster_n: blocks of a cluster along M, which share tiles of b, and along N, which share tiles of a.
        split_k: parts that the sum over K is cut into.
        a_scales, b_scales: what a scale stands for.
        schedule: what the product is a product of.
        out_float: the result is float32, otherwise bfloat16.
        accumulate: it is added to.
        fetch: what is added to comes to shared memory first; otherwise it is added to in the L2 cache.
        promote: every step is added in FP32; otherwise the tensor cores sum over all of K.
        transposed: the result is stored as [N, M].
        store: how.
        staged_pieces: that a warpgroup has shared memory for, where the copy engine stores.
        along_n: units are taken in bands along N, and otherwise along M.
        band: units that a band has, for the L2 cache.
        max_groups: that there is shared memory for.
        zero_rest: rows past the last group are written as zeros; otherwise they stay as they are.
        a_e5m2, b_e5m2: the operand's numbers are E5M2, otherwise E4M3.

    Raises:
        ValueError: there is no such kernel; says why.
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
    fetch: bool = False
    promote: bool = True
    transposed: bool = False
    store: Store = Store.TMA
    staged_pieces: int = 0
    along_n: bool = False
    band: int = 8
    max_groups: int = 0
    zero_rest: bool = True
    a_e5m2: bool = False
    b_e5m2: bool = False

    def __post_init__(self) -> None:
        for holds, why in self._rules():
            if not holds:
                raise ValueError(f"{self}: {why}")

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.warpgroups + 1)

    @property
    def teams(self) -> int:
        return self.warpgroups if self.ping_pong else 1

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def unit_m(self) -> int:
        """Rows that the blocks of a cluster take together."""
        return self.tile_m * self.cluster_m

    @property
    def unit_n(self) -> int:
        """Columns that they take together."""
        return self.tile_n * self.cluster_n

    @property
    def waves(self) -> int:
        """Times that a warpgroup multiplies 64 rows for one tile."""
        return self.tile_m * self.teams // (64 * self.warpgroups)

    @property
    def of_rows(self) -> bool:
        """Both operands have scales of rows: those of b take registers, and the copying threads, which read none, need
        few."""
        return self.a_scales is self.b_scales is Scales.PER_ROW

    @property
    def copy_registers(self) -> int:
        """That a thread of the warpgroup that copies keeps."""
        return {1: 40, 2: 24 if self.of_rows else 40}.get(self.warpgroups, 32)

    @property
    def math_registers(self) -> int:
        """That a thread of a warpgroup that multiplies may use."""
        return {1: 255, 2: 240 if self.of_rows else 232}.get(self.warpgroups, 160)

    @property
    def sums(self) -> int:
        """Registers of a thread that hold sums."""
        return self.tile_n // 2 * (self.waves + (self.accumulators if self.promote else 0))

    @property
    def held_columns(self) -> int:
        """Pairs of a step's scales of columns that a thread keeps in registers."""
        if not self.of_rows or self.accumulators > 1:
            return 0
        others = (16 if self.out_float else 28) + (4 if self.fetch and self.cluster > 1 else 0)  # found by compiling
        return min(max(self.math_registers - self.sums - others, 0) // 2, self.tile_n // 8)

    @property
    def other_registers(self) -> int:
        """For addresses, scales and the scheduler; found by compiling the largest tiles of every kind."""
        scales_in_flight = self.ping_pong and self.accumulators == 2 and self.b_scales is Scales.PER_ROW
        cut_twice = self.split_k > 1 and self.waves > 1 and STEP % self.tile_n > 0  # along K, and columns at a block
        return (40 if self.warpgroups < 3 else 32) + (8 if scales_in_flight else 0) + (32 if cut_twice else 0)

    @property
    def out_bytes(self) -> int:
        """Of a number of the result."""
        return 4 if self.out_float else 2

    @property
    def piece_columns(self) -> int:
        """Columns of a piece of 64 rows that the copy engine stores."""
        return self.tile_n if self.transposed else gcd(self.tile_n, 128 // self.out_bytes)

    @property
    def pieces(self) -> int:
        """Of a warpgroup's part of a tile."""
        return self.waves * self.tile_n // self.piece_columns

    @property
    def piece_bytes(self) -> int:
        """Of a piece."""
        return 64 * self.piece_columns * self.out_bytes

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage, its two barriers included."""
        a_scales = self.tile_m * 4 if self.a_scales is Scales.PER_ROW else 0
        b_scales = _rounded_up(self.tile_n * 4, 128) if self.b_scales is Scales.PER_ROW else 0
        return (self.tile_m + self.tile_n) * STEP + a_scales + b_scales + 16

    @property
    def other_bytes(self) -> int:
        """Shared memory besides the stages."""
        staging = self.warpgroups * self.staged_pieces * self.piece_bytes
        groups = 4 * (2 * self.max_groups + 3) if self.max_groups else 0
        # scales of blocks of 64 steps, two for a step, twice
        of_blocks = 64 * 16 * self.teams if Scales.PER_BLOCK in (self.a_scales, self.b_scales) else 0
        return staging + of_blocks + (20 if self.fetch else 4) * self.warpgroups + groups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.other_bytes + self.teams * self.stages * self.stage_bytes

    def constants(self) -> dict[str, int | bool]:
        """What the CUDA source is specialised with."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        derived = ("copy_registers", "math_registers", "held_columns", "shared_bytes")
        return named | {name: getattr(self, name) for name in derived}

    def headers(self) -> dict[str, str]:
        """The generated header: the instruction that multiplies tiles of this width and these formats."""
        a, b = ("e5m2" if e5m2 else "e4m3" for e5m2 in (self.a_e5m2, self.b_e5m2))
        return {"wgmma.cuh": wgmma.header(self.tile_n, a, b)}

    def _rules(self) -> list[tuple[bool, str]]:
        kinds = of_a, of_b = self.a_scales, self.b_scales
        copied = self.store is Store.TMA
        grouped = self.schedule in (Schedule.GROUPED, Schedule.MASKED)
        rows = 64 * self.warpgroups // self.teams
        return [
            (self.warpgroups in (1, 2, 3), "warpgroups must be 1 to 3"),
            (not self.ping_pong or self.warpgroups == 2, "ping_pong takes two warpgroups"),
            (self.tile_m % rows == 0 and 0 < self.tile_m <= 256, f"tile_m must be a multiple of {rows} up to 256"),
            (self.tile_n in range(8, 257, 8), "tile_n must be a multiple of 8 up to 256"),
            (self.stages >= 2, "there must be two stages or more"),
            (self.cluster in (1, 2), "a cluster must have 1 or 2 blocks"),
            (kinds in KINDS, "scales must be of rows with blocks, of rows, or of the whole tensors"),
            (self.promote or kinds == (Scales.PER_TENSOR,) * 2, "without promotion there can be one scale only"),
            (self.accumulators in (1, 2), "accumulators must be 1 or 2"),
            (self.accumulators == 1 or (self.waves == 1 and self.promote), "two accumulators take one wave, promoted"),
            (self.split_k >= 1, "split_k must be at least 1"),
            (self.split_k == 1 or self.schedule is Schedule.DENSE, "only a dense product is split"),
            (self.split_k == 1 or not self.ping_pong, "few tiles are split, and ping_pong wants many"),
            (of_b is not Scales.PER_BLOCK or _most_blocks(self.tile_n) <= 2, "a tile would reach three blocks of b"),
            (of_a is not Scales.PER_BLOCK or self.waves <= 2, "a warpgroup's rows would reach two blocks of a"),
            (of_a is not Scales.PER_BLOCK or self.warpgroups < 3, "three warpgroups' rows lie askew to blocks of a"),
            (not grouped or of_a is Scales.PER_ROW, "groups begin anywhere, blocks of a do not"),
            (not grouped or not self.accumulate, "rows of groups are stored, not added"),
            (not self.transposed or self.schedule is Schedule.DENSE, "only a dense product is transposed"),
            (not self.transposed or self.tile_n % 16 == 0, "a transposed tile_n must be a multiple of 16"),
            (not self.transposed or self.store is not Store.PAIRS, "pairs of a transposed result are no neighbours"),
            (self.schedule is Schedule.DENSE or self.max_groups > 0, "groups need shared memory"),
            (not copied or not self.accumulate or self.out_float or self.fetch, "the copy engine adds float32 only"),
            (not copied or not (self.transposed and self.out_float), "a transposed float32 result is stored directly"),
            (not copied or 0 < self.staged_pieces <= self.pieces, f"staged_pieces must be 1 to {self.pieces}"),
            (copied or self.staged_pieces == 0, "only the copy engine stores staged pieces"),
            (not self.fetch or (copied and self.accumulate), "only what TMA stores is fetched to be added to"),
            (not self.fetch or not self.transposed, "what is fetched is not turned"),
            (not self.fetch or self.split_k == 1, "of a sum that is split only the last part is stored"),
            (not self.fetch or self.staged_pieces * self.waves == self.pieces, "64 rows are added to at a time"),
            (self.sums + self.other_registers <= self.math_registers, f"{self.sums} registers of sums do not fit"),
            (self.shared_bytes <= SHARED_BYTES, f"{self.shared_bytes} bytes of shared memory do not fit"),
        ]  # fmt: skip


KINDS = (
    (Scales.PER_ROW, Scales.PER_BLOCK),
    (Scales.PER_BLOCK, Scales.PER_ROW),
    (Scales.PER_ROW, Scales.PER_ROW),
    (Scales.PER_TENSOR, Scales.PER_TENSOR),
)


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _most_blocks(tile_n: int) -> int:
    """Blocks of 128 columns that a tile reaches at most, wherever it lies."""
    starts = range(0, STEP, gcd(tile_n, STEP))
    return max(-(-(start + tile_n) // STEP) for start in starts)
