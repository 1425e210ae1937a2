"""Compare the kernels of recorded profiles with the durations that the plan has for them, by kind.

    python -m tools.compare_plan_kernels

The profiles: passes through 4 layers with experts on two GPUs (benchmarks/history/pair), and captured training steps on
one (benchmarks/history/plan, by `tools.measure_step_kernels`). Communication with other ranks is left out.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from octile.plan.durations import by_kind
from octile.plan.hardware import read_cluster
from octile.plan.published import MEASURED, PAIRS, work_on_two
from octile.train.kernel_records import is_communication

HISTORY = Path(__file__).parents[1] / "benchmarks" / "history"
KINDS = {  # of a kernel by its name; the first that matches counts
    "FP8 GEMMs": r"^gemm$",
    "BF16 GEMMs": r"nvjet|cutlass|splitKreduce|bfloat16_terms|gate_backward_gemm|gate_forward",
    "attention": r"sdpa|convert_dq|dot_do_o",
    "loss": r"cross_entropy",
    "optimizer": r"adamw|gradient_squares|multi_tensor",
    "routing": r"permute|gather_kernel<16, int|scatter_gather|count_|place_|choose_experts|balance|sum_blocks|gate_",
    "quantization and norms": r"^(blocks|tiles|matrices|dequantize)|rms_norm|swiglu|rotate|latent_keys|reduce_kernel",
    "elementwise": r"CUDAFunctor_add|vectorized_gather_kernel|elementwise_kernel|compute_grad_weight|sum_and_scatter",
}
PLANNED = {"FP8 weight gradients": "FP8 GEMMs"}  # kinds of the plan that a profile does not tell apart


def kind_of(name: str) -> str:
    """The kind under which the plan counts a kernel; `others` if it counts none."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "others")


def milliseconds_by_kind(kernels: Iterable[tuple[str, float]]) -> Counter[str]:
    """The ms of the kernels of each kind, whose names and µs are given."""
    found: Counter[str] = Counter()
    for name, microseconds in kernels:
        if not is_communication(name):
            found[kind_of(name)] += microseconds / 1e3  # type: ignore[assignment]
    return found


def planned_by_kind(seconds_by_kind: Iterable[tuple[str, float]]) -> Counter[str]:
    """The plan's ms of each kind."""
    planned: Counter[str] = Counter()
    for kind, seconds in seconds_by_kind:
        planned[PLANNED.get(kind, kind)] += 1e3 * seconds  # type: ignore[assignment]
    return planned


def pair(name: str, file: str) -> tuple[Counter[str], Counter[str]]:
    """The profile of the passes of a pair in sequence on rank 0, and the plan for them."""
    events = json.loads(gzip.decompress((HISTORY / "pair" / file).read_bytes()))["traceEvents"]
    found = milliseconds_by_kind((event["name"], event["dur"]) for event in events if event["ph"] == "X")
    cluster = replace(read_cluster("h200_8"), gpus=2)
    return found, planned_by_kind(by_kind(4 * work_on_two(PAIRS[name][0]), cluster).items())


def step(file: str) -> tuple[Counter[str], Counter[str]]:
    """The profile of a captured step of `medium`, the last of three, and the plan for it."""
    events = json.loads(gzip.decompress((HISTORY / "plan" / file).read_bytes()))["profile"]
    last = events[-len(events) // 3 :]
    plan = next(run for run in MEASURED if (run.preset, run.gpus) == ("medium", 1)).plan()
    return milliseconds_by_kind((name, us) for _, us, _, name in last), planned_by_kind(plan.seconds_by_kind.items())


def tables() -> Iterator[tuple[str, Counter[str], Counter[str]]]:
    """A profile's name, its ms by kind and the plan's, for all profiles."""
    yield "DeepSeek-V3's layers", *pair("DeepSeek-V3", "v3_sequence_0.json.gz")
    yield "V2-Lite's layers", *pair("DeepSeek-V2-Lite", "v2_lite_sequence_0.json.gz")
    if (HISTORY / "plan" / "medium.json.gz").exists():
        yield "medium", *step("medium.json.gz")


def main() -> None:
    """Print the tables."""
    for title, found, planned in tables():
        print(f"{title}: ms of the profile, of the plan, ratio")
        for kind in (*KINDS, "others"):
            if found[kind] or planned[kind]:
                ratio = f"{planned[kind] / found[kind]:.2f}" if found[kind] else "-"
                print(f"  {kind:24} {found[kind]:9.2f} {planned[kind]:9.2f} {ratio:>6}")
        print(f"  {'all':24} {found.total():9.2f} {planned.total():9.2f} {planned.total() / found.total():6.2f}")


if __name__ == "__main__":
    main()
