"""Tests of kernel configurations: impossible ones are refused with a reason; others become constants of the source."""

import pytest

from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule, Store
from octile.kernels.hopper import SHARED_BYTES

BASE = {"tile_m": 128, "tile_n": 128, "stages": 4, "staged_boxes": 2}
REFUSED = {
    "warpgroups must be 1 to 3": {"warpgroups": 4},
    "ping_pong takes two": {"warpgroups": 1, "ping_pong": True},
    "tile_m must be a multiple of 128": {"tile_m": 64},
    "tile_n must be a multiple of 8": {"tile_n": 100},
    "two stages": {"stages": 1},
    "a cluster must have 1 or 2 blocks": {"cluster_m": 2, "cluster_n": 2},
    "scales must be 1×128": {"a_scales": Scales.PER_BLOCK, "b_scales": Scales.PER_BLOCK},
    "scales must be per tensor": {"promote": False},
    "two accumulators take one wave or two": {"tile_m": 256, "tile_n": 32, "warpgroups": 1, "accumulators": 2},
    "split_k takes a dense GEMM": {"split_k": 2, "schedule": Schedule.MASKED, "max_groups": 8},
    "split_k is for few tiles, and ping_pong for many": {"split_k": 2, "ping_pong": True, "stages": 3},
    "three blocks of b": {"tile_n": 200, "staged_boxes": 1},
    "two blocks of a": {
        "tile_m": 256,
        "tile_n": 32,
        "warpgroups": 1,
        "a_scales": Scales.PER_BLOCK,
        "b_scales": Scales.PER_ROW,
    },
    "groups begin at any row, blocks of a do not": {
        "a_scales": Scales.PER_BLOCK,
        "b_scales": Scales.PER_ROW,
        "schedule": Schedule.GROUPED,
        "max_groups": 8,
    },
    "accumulate takes no groups": {
        "schedule": Schedule.GROUPED,
        "max_groups": 8,
        "out_float": True,
        "accumulate": True,
    },
    "transposed takes a dense GEMM": {"transposed": True, "schedule": Schedule.GROUPED, "max_groups": 8},
    "multiple of 16": {"transposed": True, "tile_n": 24, "staged_boxes": 1},
    "no neighbors": {"transposed": True, "store": Store.PAIRS, "staged_boxes": 0},
    "groups need shared memory": {"schedule": Schedule.ALONG_K},
    "TMA adds to float32 only": {"accumulate": True},
    "TMA does not store a transposed float32 result": {
        "out_float": True,
        "transposed": True,
        "staged_boxes": 1,
    },
    "staged_boxes must be 1 to 2": {"staged_boxes": 3},
    "only TMA stores staged boxes": {"store": Store.SINGLE},
    "load_c needs accumulate and Store.TMA": {"load_c": True},
    "prefetch_c needs accumulate and Store.TMA": {"prefetch_c": True, "b_scales": Scales.PER_ROW},
    "prefetch_c excludes load_c": {
        "prefetch_c": True,
        "load_c": True,
        "accumulate": True,
        "out_float": True,
        "b_scales": Scales.PER_ROW,
    },
    "prefetch_c takes no 128×128 scales": {"prefetch_c": True, "accumulate": True, "out_float": True},
    "adds_rounded adds to BF16": {"adds_rounded": True},
    "load_c does not transpose": {
        "load_c": True,
        "accumulate": True,
        "transposed": True,
        "staged_boxes": 1,
    },
    "only the last split stores": {"load_c": True, "accumulate": True, "out_float": True, "split_k": 2},
    "load_c adds to 64 rows at a time": {"load_c": True, "accumulate": True, "out_float": True, "staged_boxes": 1},
    "accumulator registers are too many": {"tile_m": 256, "tile_n": 160, "staged_boxes": 1},
    "bytes of shared memory": {"stages": 7},
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str):
    with pytest.raises(ValueError, match=why):
        GemmConfig(**(BASE | REFUSED[why]))


def test_constants_have_the_names_of_the_source():
    constants = GemmConfig(**BASE).constants()
    assert constants["tile_m"] == 128
    assert constants["shared_bytes"] <= SHARED_BYTES
    assert all(isinstance(value, int) for value in constants.values())


def test_waves_and_accumulator_registers():
    assert GemmConfig(256, 128, 3, staged_boxes=1).waves == 2
    assert GemmConfig(128, 128, 3, staged_boxes=1, ping_pong=True).waves == 2
    assert GemmConfig(128, 128, 3, staged_boxes=1, accumulators=2).accumulator_registers == 192
    assert GemmConfig(256, 96, 4, staged_boxes=1, accumulators=2).accumulator_registers == 192
