"""Tests of how much of the communication in a trace is exposed."""

import gzip
import json
from pathlib import Path

from tools.exposed_communication import describe, events_of, exposed_by_name, kernels_of


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, object]:
    return {"cat": category, "name": name, "ts": start, "dur": duration}


EVENTS = [
    event("gemm", 4, 10),
    event("exchange_rows", 0, 10),
    event("peer_barrier", 13, 2),
    event("peer_barrier", 20, 1),
    event("Memcpy DtoD", 14, 0.5, "gpu_memcpy"),
    event("cudaGraphLaunch", 0, 50, "cuda_runtime"),
]


def test_only_what_runs_on_the_gpu_is_read_in_the_order_of_the_starts(tmp_path: Path):
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    found = kernels_of(events_of(tmp_path / "t.json.gz"))
    assert [kernel.start for kernel in found] == [0, 4, 13, 14, 20]


def test_the_exposed_time_of_each_communication_kernel():
    kernels = kernels_of(EVENTS[:5])
    assert exposed_by_name(kernels) == {"exchange_rows": (1, 10.0, 4.0), "peer_barrier": (2, 3.0, 1.5)}
    assert describe(kernels).startswith("span 0.021 ms, busy 0.016 ms, communication 0.013 ms, exposed 0.005 ms, 42.3%")
