"""Tests of reading run folders, also incomplete and damaged ones."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.report.run.metrics import find, flatten, read_run, smooth

TRAINING = '{"step": %d, "loss": %f, "seconds": %f}\n'


def folder_with(path: Path, metrics: str) -> Path:
    (path / "config.json").write_text('{"steps": 10}')
    (path / "metrics.jsonl").write_text(metrics)
    return path


def test_kinds_of_lines_are_recognized_by_their_keys(tmp_path):
    metrics = '{"step": 1, "loss": 8.0}\n{"step": 1, "val_loss": 7.5}\n{"step": 1, "expert_load": {"a": [1, 2]}}\n'
    run = read_run(folder_with(tmp_path, metrics))
    assert (len(run.training), len(run.validation), len(run.experts), len(run.tile_scales)) == (1, 1, 1, 0)


def test_of_two_lines_of_a_step_the_later_is_used(tmp_path):
    run = read_run(folder_with(tmp_path, TRAINING % (1, 8, 1) + TRAINING % (2, 7, 2) + TRAINING % (2, 6, 2)))
    assert [(r["step"], r["loss"]) for r in run.training] == [(1, 8), (2, 6)]


def test_a_resumed_run_drops_lines_after_its_checkpoint(tmp_path):
    before = TRAINING % (1, 8, 1) + TRAINING % (2, 7, 2) + TRAINING % (3, 6, 3) + '{"step": 3, "val_loss": 9.9}\n'
    run = read_run(folder_with(tmp_path, before + TRAINING % (2, 6.5, 2)))
    assert [r["step"] for r in run.training] == [1, 2]
    assert run.validation == ()


def test_a_validation_written_before_its_training_line_is_read(tmp_path):
    run = read_run(folder_with(tmp_path, '{"step": 2, "val_loss": 7.0}\n' + TRAINING % (2, 7, 2)))
    assert len(run.validation) == 1


def test_a_truncated_last_line_is_counted_and_left_out(tmp_path):
    run = read_run(folder_with(tmp_path, TRAINING % (1, 8, 1) + '{"step": 2, "lo'))
    assert (len(run.training), run.unreadable_lines["metrics.jsonl"]) == (1, 1)


@pytest.mark.parametrize("line", ["[1]", "7", '"step"', '{"loss": 1}', '{"step": null, "loss": 1}', "\x00"])
def test_a_line_that_is_no_record_is_left_out(tmp_path, line):
    run = read_run(folder_with(tmp_path, line + "\n" + TRAINING % (1, 8, 1)))
    assert (len(run.training), run.unreadable_lines["metrics.jsonl"]) == (1, 1)


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "null", '"broken"'])
def test_a_non_finite_loss_is_a_broken_step(tmp_path, loss):
    run = read_run(folder_with(tmp_path, f'{{"step": 5, "loss": {loss}}}\n'))
    assert run.broken_steps == [5]


def test_the_time_of_a_run_is_that_of_its_last_step(tmp_path):
    metrics = TRAINING % (1, 8, 10) + TRAINING % (2, 7, 20) + '{"step": 3, "loss": 6}\n'
    assert read_run(folder_with(tmp_path, metrics)).seconds == 20


def test_a_fact_comes_from_the_summary_before_the_configuration(tmp_path):
    (tmp_path / "summary.json").write_text('{"steps": 7}')
    assert read_run(folder_with(tmp_path, "")).fact("steps") == 7


@pytest.mark.parametrize("missing", ["config.json", "metrics.jsonl"])
def test_a_missing_file_is_named(tmp_path, missing):
    folder_with(tmp_path, "")
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_configuration_is_named(tmp_path, text):
    folder_with(tmp_path, "")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json must be"):
        read_run(tmp_path)


def test_find_prefers_the_key_nearest_to_the_root():
    assert find({"a": {"b": {"x": 1}}, "c": {"x": 2}}, "x") == 2


def test_flatten_keeps_order_and_writes_values_as_json():
    tree = {"a": {"b": [1, 2], "c": None}, "d": "text", "e": {}, "out": Path("runs")}
    assert flatten(tree) == [("a.b", "[1, 2]"), ("a.c", "null"), ("d", "text"), ("e", "{}"), ("out", '"runs"')]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=200))
def test_a_trend_stays_within_its_values(values):
    trend = smooth(np.array(values))
    assert len(trend) == len(values)
    assert trend.min() >= min(values) - 1e-9
    assert trend.max() <= max(values) + 1e-9


def test_a_trend_neither_lags_nor_bends_inside_a_straight_line():
    straight = np.linspace(8, 2, 400)
    np.testing.assert_allclose(smooth(straight)[:370], straight[:370], atol=1e-12)


def test_a_trend_skips_non_finite_values():
    trend = smooth(np.where(np.arange(400) == 200, math.nan, 3.0))
    assert math.isnan(trend[200])
    assert set(np.delete(trend, 200)) == {3.0}


def test_one_huge_value_does_not_blur_those_after_it():
    assert smooth(np.where(np.arange(400) == 100, 1e30, 3.0))[200] == 3.0
