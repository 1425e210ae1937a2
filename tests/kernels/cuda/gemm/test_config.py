"""A configuration that no multiprocessor can run is refused, and says why; the others become constants."""

import pytest

from octile.kernels.cuda.gemm.config import SHARED_BYTES, Config, Scales, Schedule, Store

BASE = {"tile_m": 128, "tile_n": 128, "stages": 4, "staged_pieces": 2}
REFUSED = {
    "warpgroups must be 1 to 3": {"warpgroups": 4},
    "ping_pong takes two": {"warpgroups": 1, "ping_pong": True},
    "tile_m must be a multiple of 128": {"tile_m": 64},
    "tile_n must be a multiple of 8": {"tile_n": 100},
    "two stages": {"stages": 1},
    "a cluster must have 1 or 2 blocks": {"cluster_m": 2, "cluster_n": 2},
    "scales must be of rows": {"a_scales": Scales.PER_BLOCK, "b_scales": Scales.PER_BLOCK},
    "one scale only": {"promote": False},
    "two accumulators take one wave": {"tile_m": 256, "tile_n": 64, "accumulators": 2},
    "only a dense product is split": {"split_k": 2, "schedule": Schedule.MASKED, "max_groups": 8},
    "ping_pong wants many": {"split_k": 2, "ping_pong": True, "stages": 3},
    "three blocks of b": {"tile_n": 200, "staged_pieces": 1},
    "two blocks of a": {
        "tile_m": 256,
        "tile_n": 32,
        "warpgroups": 1,
        "a_scales": Scales.PER_BLOCK,
        "b_scales": Scales.PER_ROW,
    },
    "blocks of a do not": {
        "a_scales": Scales.PER_BLOCK,
        "b_scales": Scales.PER_ROW,
        "schedule": Schedule.GROUPED,
        "max_groups": 8,
    },
    "stored, not added": {
        "schedule": Schedule.GROUPED,
        "max_groups": 8,
        "out_float": True,
        "accumulate": True,
    },
    "only a dense product is transposed": {"transposed": True, "schedule": Schedule.GROUPED, "max_groups": 8},
    "multiple of 16": {"transposed": True, "tile_n": 24, "staged_pieces": 1},
    "no neighbours": {"transposed": True, "store": Store.PAIRS, "staged_pieces": 0},
    "groups need shared memory": {"schedule": Schedule.ALONG_K},
    "adds float32 only": {"accumulate": True},
    "a transposed float32 result": {
        "out_float": True,
        "transposed": True,
        "staged_pieces": 1,
    },
    "staged_pieces must be 1 to 2": {"staged_pieces": 3},
    "only the copy engine": {"store": Store.SINGLE},
    "is fetched to be added to": {"fetch": True},
    "is not turned": {
        "fetch": True,
        "accumulate": True,
        "transposed": True,
        "staged_pieces": 1,
    },
    "only the last part is stored": {"fetch": True, "accumulate": True, "out_float": True, "split_k": 2},
    "64 rows are added to at a time": {"fetch": True, "accumulate": True, "out_float": True, "staged_pieces": 1},
    "registers of sums": {"tile_m": 256, "tile_n": 160, "staged_pieces": 1},
    "bytes of shared memory": {"stages": 7},
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str):
    with pytest.raises(ValueError, match=why):
        Config(**(BASE | REFUSED[why]))


def test_constants_are_what_the_source_names():
    constants = Config(**BASE).constants()
    assert constants["tile_m"] == 128
    assert constants["shared_bytes"] <= SHARED_BYTES
    assert all(isinstance(value, int) for value in constants.values())


def test_waves_and_sums():
    assert Config(256, 128, 3, staged_pieces=1).waves == 2
    assert Config(128, 128, 3, staged_pieces=1, ping_pong=True).waves == 2
    assert Config(128, 128, 3, staged_pieces=1, accumulators=2).sums == 192
