"""A run's folder keeps what was measured, and nothing twice."""

import json

import pytest

from octile.train.run_folder import MetricsWriter, RunFolder
from tests.train.conftest import micro


def test_a_run_is_not_overwritten(tmp_path):
    config = micro(out=tmp_path / "run")
    RunFolder.create(config).write_config(config)
    with pytest.raises(FileExistsError, match="holds a run already: add --resume"):
        RunFolder.create(config)


def test_runs_without_a_name_get_one_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [RunFolder.create(micro()).path.name for _ in range(3)]
    assert names == ["tiny-deepseek_v3", "tiny-deepseek_v3-2", "tiny-deepseek_v3-3"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no .*config\.json"):
        RunFolder.open(tmp_path)


def test_the_configuration_is_read_back(tmp_path):
    config = micro(out=tmp_path / "run")
    run = RunFolder.create(config)
    run.write_config(config)
    assert run.read_config() == config


def test_what_was_measured_after_the_checkpoint_is_forgotten_with_a_line_cut_short(tmp_path):
    run = RunFolder.create(micro(out=tmp_path / "run"))
    run.metrics_file.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    run.forget_after(1)
    assert run.metrics_file.read_text() == '{"step": 1, "loss": 3.0}\n'


def test_a_measurement_is_in_the_file_when_write_returns(tmp_path):
    run = RunFolder.create(micro(out=tmp_path / "run"))
    writer = MetricsWriter(run)
    writer.write({"step": 1, "loss": 2.5})
    assert json.loads(run.metrics_file.read_text()) == {"step": 1, "loss": 2.5}
    writer.close()


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunFolder.create(micro(out=tmp_path / "run"))
    writer = MetricsWriter(run)
    writer.write({"step": 4, "loss": 2.5})
    writer.close()
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(4, 2.5)]
