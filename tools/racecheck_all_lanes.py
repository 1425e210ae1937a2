"""pytest plugin for racecheck: the GEMM kernel with an arrival by every lane, `-p tools.racecheck_all_lanes`.

In the kernel the lanes of a warp synchronize (__syncwarp), and one of them arrives at the mbarrier for all: a consumer
warp that releases a stage, and the producer warp, whose lanes have written 128×128 scales. racecheck of
compute-sanitizer does not follow this: it reports the lanes that read or wrote a scale and the thread that accesses it
next. If it reports nothing where each lane arrives for itself, and nothing else is changed, then the __syncwarp is all
that it misses.
"""

from collections.abc import Mapping

from octile.kernels.cuda.jit import specialize

CHANGES = {  # by file; each text must be found once
    "pipeline.cuh": {
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
        "pipeline.full[stage].init(1)": "pipeline.full[stage].init(has_block_scales ? 32 : 1)",
    },
    "producer.cuh": {
        """                if (elected) pipeline.producer_commit();
""": """                if (elected) pipeline.producer_commit();
                else pipeline.full[pipeline.stage].arrive();
""",
        """                    pipeline.producer_commit();
                }
""": """                    pipeline.producer_commit();
                } else {
                    pipeline.full[pipeline.stage].arrive();
                }
""",
    },
}

find = specialize._find


def pytest_configure() -> None:
    specialize._find = changed


def changed(name: str, headers: Mapping[str, str]) -> tuple[str, str]:
    shown, text = find(name, headers)
    for before, after in CHANGES.get(name, {}).items():
        if text.count(before) != 1:
            raise ValueError(f"{name} must contain this once, not {text.count(before)} times:\n{before}")
        text = text.replace(before, after)
    return shown, text
