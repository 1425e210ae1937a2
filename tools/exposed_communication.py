"""How much of the communication in traces of torch's profiler is exposed.

    python -m tools.exposed_communication TRACE.json.gz [TRACE.json.gz …]

Communication is exposed while no kernel that computes runs on the GPU (`octile.train.step.kernel_records`).
"""

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from octile.train.step.kernel_records import KernelRecord, busy, communication, is_communication, span

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's events


def events_of(trace: Path) -> list[dict[str, Any]]:
    """The kernels, copies and memsets of a trace, in the order of their starts."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event.get("cat") in ON_DEVICE]
    return sorted(events, key=lambda event: event["ts"])


def kernels_of(events: list[dict[str, Any]]) -> list[KernelRecord]:
    """The kernels of events."""
    return [KernelRecord(event["name"], event["ts"], event["dur"]) for event in events]


def exposed_by_name(kernels: list[KernelRecord]) -> dict[str, tuple[int, float, float]]:
    """For each communication kernel its calls, the µs that it ran, and the µs of these without another kernel."""
    computing = [k for k in kernels if not is_communication(k.name)]
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kernel in kernels:
        if is_communication(kernel.name):
            end = kernel.start + kernel.duration
            spans = [(max(k.start, kernel.start), min(k.start + k.duration, end)) for k in computing]
            beside = [KernelRecord("", start, until - start) for start, until in spans if start < until]
            found[kernel.name].append((kernel.duration, kernel.duration - busy(beside)))
    return {name: (len(all), *(sum(part) for part in zip(*all, strict=True))) for name, all in found.items()}


def describe(kernels: list[KernelRecord]) -> str:
    """A line on all communication, and one for each of its kernels."""
    found = communication(kernels)
    lines = [
        f"span {span(kernels) / 1e3:.3f} ms, busy {busy(kernels) / 1e3:.3f} ms, communication "
        f"{found.time / 1e3:.3f} ms, exposed {found.exposed / 1e3:.3f} ms, {found.exposed_share:.1%}"
    ]
    for name, (calls, time, exposed) in exposed_by_name(kernels).items():
        lines.append(f"  {name[:60]}: {calls} calls, {time / 1e3:.3f} ms, exposed {exposed / 1e3:.3f} ms")
    return "\n".join(lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {describe(kernels_of(events_of(Path(name))))}")
