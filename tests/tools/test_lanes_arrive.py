"""What racecheck is shown instead of the product kernel still is that kernel, but for who gives a stage back."""

from benchmarks import lanes_arrive


def test_every_lane_arrives():
    _, kernel = lanes_arrive.find("pipeline.cuh", {})
    shown, changed = lanes_arrive.changed("pipeline.cuh", {})
    assert shown.endswith("pipeline.cuh")
    assert "ptx::lane_id() == 0) empty[which].arrive" in kernel
    assert "ptx::lane_id() == 0) empty[which].arrive" not in changed
    assert "init(32 * 4 * team_warpgroups" in changed


def test_other_files_stay_as_they_are():
    assert lanes_arrive.changed("split_k.cuh", {}) == lanes_arrive.find("split_k.cuh", {})
