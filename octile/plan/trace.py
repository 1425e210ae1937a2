"""A planned step as a Chrome trace, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octile.atomic_files import write_text
from octile.parallel.schedules import ActionType
from octile.parallel.schedules.actions import parts
from octile.plan.step import StepPlan

NAMES = {
    ActionType.FORWARD: "forward",
    ActionType.FULL_BACKWARD: "backward",
    ActionType.BACKWARD_INPUT: "input gradient",
    ActionType.BACKWARD_WEIGHT: "weight gradient",
}
MICROSECONDS = 1e6


def write_trace(path: Path, plan: StepPlan) -> None:
    """Write a step as a trace, whose folder is created if necessary: a process for each rank of the pipeline.

    A rank has a row for its forward and one for its backward passes; both passes of an overlapped pair take all of its
    time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"traceEvents": list(trace_events(plan)), "displayTimeUnit": "ms"}
    write_text(path, json.dumps(content))


def trace_events(plan: StepPlan) -> Iterator[dict[str, Any]]:
    """The events of a trace; times are in microseconds."""
    simulation = plan.simulation
    for rank, spans in enumerate(simulation.spans):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for span in spans:
            for action in parts(span.action):
                row = 0 if action.computation_type == ActionType.FORWARD else 1
                name = f"{NAMES[action.computation_type]} {action.microbatch_index}"
                what = {"stage": action.stage_index, "overlapped": span.action.sub_actions is not None}
                yield _event(name, rank, row, span.start, span.end, what)
        end = simulation.makespan
        yield _event("gradients and weights", rank, 0, end, end + plan.reduction, {})
        yield _event("optimizer", rank, 0, end + plan.reduction, plan.seconds, {})


def _event(name: str, rank: int, row: int, start: float, end: float, what: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"name": name, "ph": "X", "pid": rank, "tid": row, **times, "args": what}
