"""The kernel that racecheck is given differs from the GEMM kernel only in who arrives at a stage's barriers."""

from tools import racecheck_all_lanes


def test_every_lane_arrives():
    _, kernel = racecheck_all_lanes.find("pipeline.cuh", {})
    shown, changed = racecheck_all_lanes.changed("pipeline.cuh", {})
    assert shown.endswith("pipeline.cuh")
    assert "ptx::lane_id() == 0) empty[which].arrive" in kernel
    assert "ptx::lane_id() == 0) empty[which].arrive" not in changed
    assert "init(32 * 4 * warpgroups_per_tile" in changed
    assert "full[stage].init(has_block_scales ? 32 : 1)" in changed


def test_every_lane_of_the_producer_arrives_after_it_wrote_block_scales():
    _, kernel = racecheck_all_lanes.find("producer.cuh", {})
    _, changed = racecheck_all_lanes.changed("producer.cuh", {})
    assert "full[pipeline.stage].arrive()" not in kernel
    assert changed.count("full[pipeline.stage].arrive()") == 2


def test_other_files_stay_as_they_are():
    assert racecheck_all_lanes.changed("split_k.cuh", {}) == racecheck_all_lanes.find("split_k.cuh", {})
