"""Compare the kernels of recorded profiles with the durations that the plan has for them, by kind.

    python -m tools.compare_plan_kernels

The profiles: passes through 4 layers with experts on two GPUs (benchmarks/history/pair), and captured training steps on
one (benchmarks/history/plan, by `tools.measure_step_kernels`). Communication with other ranks is left out. The norm
before a mixture did not yet add the gradients of what reads it; see `_additions_by_autograd`.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from octile.plan.durations import by_kind, seconds
from octile.plan.hardware import Cluster, read_cluster
from octile.plan.published import MEASURED, MEDIUM, PAIRS, PLAN, V3_LAYERS, work_on_two
from octile.plan.work import Unit, Work
from octile.train.step.kernel_records import is_communication
from tools.kernel_kinds import KINDS, kind_of

ROOT = Path(__file__).parents[1]
PLANNED = {"FP8 weight gradients": "FP8 GEMMs"}  # kinds of the plan that a profile does not tell apart


@dataclass(frozen=True)
class Kernel:
    """A kernel of a profile: its name, its time in µs, its thread blocks."""

    name: str
    time: float
    blocks: int


@dataclass(frozen=True, eq=False)
class Profile:
    """Recorded kernels, and the plan of the same.

    Attributes:
        title: in print.
        kernels: without communication.
        work: all of it, as often as it was done.
        cluster: on which.
        others: seconds by kind that are planned in addition.
    """

    title: str
    kernels: Sequence[Kernel]
    work: Sequence[Work]
    cluster: Cluster
    others: Sequence[tuple[str, float]] = ()

    def recorded(self) -> Counter[str]:
        """The ms of the kernels of each kind."""
        found: Counter[str] = Counter()
        for kernel in self.kernels:
            found[kind_of(kernel.name)] += kernel.time / 1e3  # type: ignore[assignment]
        return found

    def planned(self) -> Counter[str]:
        """The plan's ms of each kind."""
        planned: Counter[str] = Counter()
        for kind, time in (*by_kind(self.work, self.cluster).items(), *self.others):
            planned[PLANNED.get(kind, kind)] += 1e3 * time  # type: ignore[assignment]
        return planned


@cache
def profiles() -> tuple[Profile, ...]:
    """All recorded profiles: rank 0 of the passes of a pair in sequence, and one step of each recorded run."""
    return tuple(_profiles())


def _profiles() -> Iterator[Profile]:
    cluster = replace(read_cluster("h200_8"), gpus=2)
    for name, file in (("DeepSeek-V3", "v3"), ("DeepSeek-V2-Lite", "v2_lite")):
        events = [
            e for e in read_json(f"benchmarks/history/pair/{file}_sequence_0.json.gz")["traceEvents"] if e["ph"] == "X"
        ]
        kernels = _computing((event["name"], event["dur"], event["args"].get("grid")) for event in events)
        model = PAIRS[name][0]
        additions = 4 * _additions_by_autograd(model.hidden_size, 4096, cluster)
        yield Profile(f"{name}'s layers on two", kernels, 4 * work_on_two(model), cluster, additions)
    for model, file in ((MEDIUM, "medium"), (V3_LAYERS, "v3_layers")):
        run = next(run for run in MEASURED if run.model == model and run.gpus == 1)
        events = read_json(f"{PLAN}/{file}.json.gz")["profile"]
        kernels = _computing((name, time, grid) for _, time, grid, name in events)
        plan = run.plan()
        parts = [part for stage in plan.stages for part in stage.parts]
        n = plan.layout.micro_batches(plan.cluster)
        work = [piece for part in parts for piece in part.work] * n
        additions = _additions_by_autograd(model.hidden_size, plan.layout.micro_batch_tokens, plan.cluster)
        others = [("optimizer", plan.optimizer), *n * sum(part.mixtures for part in parts) * additions]
        yield Profile(f"a step of {run.name}", kernels, work, plan.cluster, others)


def _additions_by_autograd(d: int, tokens: int, cluster: Cluster) -> list[tuple[str, float]]:
    """Seconds by kind that a recorded mixture takes more than one of today, and in norms less.

    Autograd added the gradients of its gate, experts and shared experts in two kernels. Today the backward kernel of
    the norm before it reads all three.
    """

    def duration(unit: Unit, bytes_per_channel: int) -> float:
        return seconds(Work(unit, "input_gradient", bytes=bytes_per_channel * tokens * d), cluster)

    norms = duration("norm_backward", 8) - duration("norm_backward", 12)
    return [("elementwise", 2 * duration("copy", 6)), ("quantization and norms", norms)]


def read_json(path: str) -> Any:
    """Read a file of the repository, compressed if its name ends with .gz."""
    data = (ROOT / path).read_bytes()
    return json.loads(gzip.decompress(data) if path.endswith(".gz") else data)


def _computing(events: Iterable[tuple[str, float, list[int] | None]]) -> list[Kernel]:
    return [Kernel(name, time, grid[0] if grid else 0) for name, time, grid in events if not is_communication(name)]


def main() -> None:
    """Print the tables."""
    for profile in profiles():
        found, planned = profile.recorded(), profile.planned()
        print(f"{profile.title}: ms of the profile, of the plan, their ratio")
        for kind in (*KINDS, "others"):
            if found[kind] or planned[kind]:
                ratio = f"{planned[kind] / found[kind]:.2f}" if found[kind] else "-"
                print(f"  {kind:24} {found[kind]:9.2f} {planned[kind]:9.2f} {ratio:>6}")
        print(f"  {'all':24} {found.total():9.2f} {planned.total():9.2f} {planned.total() / found.total():6.2f}")


if __name__ == "__main__":
    main()
