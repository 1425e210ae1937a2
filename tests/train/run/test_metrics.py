"""Tests of a run's metrics: what a line holds, and that resuming removes measurements after the checkpoint."""

import json
import time

import pytest

from octile.train.run.folder import RunFolder
from octile.train.run.metrics import MetricsWriter, open_metrics, read_lines, truncate_after
from tests.train.run.test_folder import new_run


def test_measurements_after_the_checkpoint_and_a_truncated_line_are_removed(tmp_path):
    run = new_run(tmp_path)
    run.metrics_file.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    truncate_after(run, 1)
    assert run.metrics_file.read_text() == '{"step": 1, "loss": 3.0}\n'


def test_a_measurement_is_in_the_file_when_write_returns(tmp_path):
    run = new_run(tmp_path)
    writer = MetricsWriter(run)
    writer.write({"step": 1, "loss": 2.5})
    assert json.loads(run.metrics_file.read_text()) == {"step": 1, "loss": 2.5}
    writer.close()


def test_tensorboard_gets_the_same_values(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = new_run(tmp_path)
    with open_metrics(run, ["tensorboard"], {}, 0) as writer:
        writer.write({"step": 4, "loss": 2.5})
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(4, 2.5)]


def test_a_non_finite_value_is_null_in_the_file(tmp_path):
    run = new_run(tmp_path)
    writer = MetricsWriter(run)
    writer.write({"step": 1, "grad_norm": float("inf")})
    writer.close()
    assert run.metrics_file.read_text() == '{"step": 1, "grad_norm": null}\n'


def test_tensorboard_shows_only_the_later_of_repeated_steps(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, now = new_run(tmp_path), time.time
    for done, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        # TensorBoard orders files by the second in which they were made
        monkeypatch.setattr(time, "time", lambda seconds=1.1 * done: now() + seconds)
        with open_metrics(run, ["tensorboard"], {}, done) as writer:
            for step in steps:
                writer.write({"step": step, "loss": done + step})
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 3.0), (3, 4.0)]


def test_telemetry_after_the_checkpoint_is_removed(tmp_path):
    run = RunFolder(tmp_path)
    first, second = ({"step": step, "layer": "a", "product": "fprop"} for step in (1, 2))
    run.telemetry_file.write_text(f'{json.dumps(first)}\n{json.dumps(second)}\n{{"step": 2, "lay')
    truncate_after(run, 1)
    assert read_lines(run.telemetry_file) == [first]


def test_all_measurements_are_removed_where_a_run_starts_anew(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics_file.write_text('{"step": 0, "val_loss": 3.0}\n{"step": 1, "loss": 3.0}\n')
    assert truncate_after(run, -1) == []
    assert read_lines(run.metrics_file) == []


def test_telemetry_of_no_layer_is_left_out_and_said(tmp_path):
    """One changed letter leaves JSON, of which a guard could not tell the layer."""
    run = RunFolder(tmp_path)
    first, second = ({"step": 1, "layer": layer, "product": "fprop"} for layer in "ab")
    damaged = json.dumps(first).replace("layer", "laxer")
    run.telemetry_file.write_text(f"{damaged}\n{json.dumps(second)}\n")
    run.metrics_file.write_text('{"step": 1, "loss": 3.0}\n')
    assert truncate_after(run, 1) == ["line 1 was damaged in telemetry.jsonl: left out"]
    assert read_lines(run.telemetry_file) == [second]


@pytest.mark.parametrize("text", ["", "no JSON\n", "[1]\n", '{"loss": 1}\n', '{"step": "1"}\n'])
def test_lines_that_are_no_measurements_are_left_out(tmp_path, text):
    (tmp_path / "lines.jsonl").write_text(text + '{"step": 3}\n')
    assert read_lines(tmp_path / "lines.jsonl") == [{"step": 3}]
