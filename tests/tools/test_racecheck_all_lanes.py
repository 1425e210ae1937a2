"""The kernel that racecheck is given differs from the GEMM kernel only in who releases a stage."""

from tools import racecheck_all_lanes


def test_every_lane_arrives():
    _, kernel = racecheck_all_lanes.find("pipeline.cuh", {})
    shown, changed = racecheck_all_lanes.changed("pipeline.cuh", {})
    assert shown.endswith("pipeline.cuh")
    assert "ptx::lane_id() == 0) empty[which].arrive" in kernel
    assert "ptx::lane_id() == 0) empty[which].arrive" not in changed
    assert "init(32 * 4 * warpgroups_per_tile" in changed


def test_other_files_stay_as_they_are():
    assert racecheck_all_lanes.changed("split_k.cuh", {}) == racecheck_all_lanes.find("split_k.cuh", {})
