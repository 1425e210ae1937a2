"""Tests of experiments/preflight: the error of a preflight's predictions compared with a run."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "preflight"


@pytest.fixture(scope="module")
def agreement():
    return runpy.run_path(str(FOLDER / "run.py"))["agreement"]


PREDICTED = {"fprop a": 10.0, "fprop b": 22.0, "fprop c": 30.0, "fprop d": 40.0}


def test_a_correct_prediction_has_no_error(agreement):
    found = agreement(PREDICTED, PREDICTED, 20.0)
    assert (found["rms_db"], found["mean_db"], found["rank_correlation"]) == pytest.approx((0, 0, 1))


def test_the_error_of_a_prediction(agreement):
    found = agreement(PREDICTED, {**PREDICTED, "fprop a": 13.0, "fprop c": 26.0}, 20.0)
    assert found["rms_db"] == pytest.approx(2.5)
    assert found["mean_db"] == pytest.approx(-0.25)
    assert list(found["misses_db"].items())[:2] == [("fprop c", pytest.approx(-4)), ("fprop a", pytest.approx(3))]


def test_a_reversed_order_has_negative_rank_correlation(agreement):
    found = agreement(PREDICTED, {name: -db for name, db in PREDICTED.items()}, 20.0)
    assert found["rank_correlation"] == pytest.approx(-1)


def test_gemms_below_the_bound(agreement):
    found = agreement(PREDICTED, {**PREDICTED, "fprop a": 21.0, "fprop d": 19.0}, 20.0)
    assert found["below_least"] == {"predicted": ["fprop a"], "found": ["fprop d"]}


def test_missing_gemms_do_not_count(agreement):
    assert agreement(PREDICTED, {"fprop a": 10.0, "fprop b": 22.0}, 20.0)["products"] == 2
