"""Tests of the files that have the results of runs."""

import pytest

from experiments.loss.report import Results
from experiments.loss.runs import read_runs, result_file, write_result


def test_a_result_is_read_as_it_was_written(tmp_path):
    results = [{"job": {"name": name}, "loss": [3.0625, float("inf")]} for name in ("a", "b")]
    for result in results:
        write_result(result_file(tmp_path, result["job"]["name"]), result)
    assert read_runs(tmp_path) == results


def test_the_same_result_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_result(result_file(tmp_path, name), {"loss": [3.0625]})
    assert result_file(tmp_path, "a").read_bytes() == result_file(tmp_path, "b").read_bytes()


def test_of_a_job_that_several_folders_have_the_last_one_counts(tmp_path):
    for folder, loss in (("old", 3.0), ("new", 2.0)):
        (tmp_path / folder).mkdir()
        write_result(result_file(tmp_path / folder, "a"), {"job": {"name": "a"}, "loss": loss})
    assert Results.read(tmp_path / "old", tmp_path / "new").all["a"]["loss"] == 2.0


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="RUNS must be folders with files"):
        Results.read(tmp_path)
