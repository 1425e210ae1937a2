"""A planned step as a Chrome trace."""

import json

import pytest

from octile.models.config import ModelConfig
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.step import plan_step
from octile.plan.trace import write_trace


def test_a_trace_has_every_pass_of_every_rank_at_its_time(tmp_path):
    layout = Layout(pp=4, ep=2, schedule="dualpipe", batch_size=16)
    plan = plan_step(ModelConfig.v2_lite_16b(), layout, read_cluster("h200_8"))
    write_trace(tmp_path / "new" / "trace.json", plan)
    events = json.loads((tmp_path / "new" / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    passes = [event for event in events if event["name"].startswith("forward")]
    assert len(passes) == 4 * 8  # stages × micro-batches
    assert {event["pid"] for event in events} == set(range(4))
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(
        1e6 * plan.seconds
    )
