"""pytest plugin for racecheck: the GEMM kernel with a release of a stage by every lane, `-p tools.racecheck_all_lanes`.

In the kernel the lanes of a warp synchronize (__syncwarp), and one of them arrives at the mbarrier for all. racecheck
of compute-sanitizer does not always see this: it reports a lane that has read a scale and the thread that writes the
next scale to the same address. If it reports nothing where each lane arrives for itself, and nothing else is changed,
then the __syncwarp is all that it misses.
"""

from collections.abc import Mapping

from octile.kernels.cuda.jit import specialize

FILE = "pipeline.cuh"
CHANGES = {  # in FILE; each must be found once
    """        __syncwarp();
        if constexpr (cluster_size == 1) {
            if (ptx::lane_id() == 0) empty[which].arrive();
        } else {
            if (ptx::lane_id() <= rank) empty[which].arrive_cluster(ptx::lane_id() == 0 ? rank : 0);
        }
""": """        if constexpr (cluster_size == 1) {
            empty[which].arrive();
        } else {
            empty[which].arrive_cluster(rank);
            if (rank > 0) empty[which].arrive_cluster(0);
        }
""",
    "pipeline.empty[stage].init(4 * warpgroups_per_tile": "pipeline.empty[stage].init(32 * 4 * warpgroups_per_tile",
}

find = specialize._find


def pytest_configure() -> None:
    specialize._find = changed


def changed(name: str, headers: Mapping[str, str]) -> tuple[str, str]:
    shown, text = find(name, headers)
    if name == FILE:
        for before, after in CHANGES.items():
            if text.count(before) != 1:
                raise ValueError(f"{FILE} must contain this once, not {text.count(before)} times:\n{before}")
            text = text.replace(before, after)
    return shown, text
