"""A pytest plugin, `-p benchmarks.lanes_arrive`: the product kernel, where every lane gives a stage back for itself.

In the kernel the lanes of a warp meet (__syncwarp), and then one of them gives the stage back for all. racecheck, of
compute-sanitizer, does not always see that this one speaks for the others: it names a lane that has read a scale, and
the thread that writes the next one there. If it names no pair any more when each lane arrives at the barrier by itself,
and nothing else is changed, then the meeting is all that it misses.
"""

from collections.abc import Mapping

from octile.kernels.cuda.jit import specialize

CHANGES = {  # of memory.cuh; each must be found once
    """        __syncwarp();
        if constexpr (cluster == 1) {
            if (ptx::lane_id() == 0) empty[which].arrive();
        } else {
            if (ptx::lane_id() <= rank) empty[which].arrive_cluster(ptx::lane_id() == 0 ? rank : 0);
        }
""": """        if constexpr (cluster == 1) {
            empty[which].arrive();
        } else {
            empty[which].arrive_cluster(rank);
            if (rank > 0) empty[which].arrive_cluster(0);
        }
""",
    "ring.empty[stage].init(4 * team_warpgroups": "ring.empty[stage].init(32 * 4 * team_warpgroups",
}

find = specialize._find


def pytest_configure() -> None:
    specialize._find = changed


def changed(name: str, headers: Mapping[str, str]) -> tuple[str, str]:
    shown, text = find(name, headers)
    if name == "pipeline.cuh":
        for before, after in CHANGES.items():
            if text.count(before) != 1:
                raise ValueError(f"memory.cuh has {text.count(before)} times what is to be changed:\n{before}")
            text = text.replace(before, after)
    return shown, text
