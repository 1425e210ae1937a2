"""How far a preflight's prediction is from what a run did: the figures of experiments/preflight."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "preflight"


@pytest.fixture(scope="module")
def agreement():
    return runpy.run_path(str(FOLDER / "run.py"))["agreement"]


PREDICTED = {"fprop a": 10.0, "fprop b": 22.0, "fprop c": 30.0, "fprop d": 40.0}


def test_a_prediction_that_came_true_is_no_way_off(agreement):
    found = agreement(PREDICTED, PREDICTED, 20.0)
    assert (found["rms_db"], found["mean_db"], found["rank_correlation"]) == pytest.approx((0, 0, 1))


def test_how_far_off_it_is(agreement):
    found = agreement(PREDICTED, {**PREDICTED, "fprop a": 13.0, "fprop c": 26.0}, 20.0)
    assert found["rms_db"] == pytest.approx(2.5)
    assert found["mean_db"] == pytest.approx(-0.25)
    assert list(found["misses_db"].items())[:2] == [("fprop c", pytest.approx(-4)), ("fprop a", pytest.approx(3))]


def test_an_order_that_is_the_other_way_round(agreement):
    found = agreement(PREDICTED, {name: -db for name, db in PREDICTED.items()}, 20.0)
    assert found["rank_correlation"] == pytest.approx(-1)


def test_products_below_the_bound(agreement):
    found = agreement(PREDICTED, {**PREDICTED, "fprop a": 21.0, "fprop d": 19.0}, 20.0)
    assert found["below_least"] == {"predicted": ["fprop a"], "found": ["fprop d"]}


def test_what_was_not_found_does_not_count(agreement):
    assert agreement(PREDICTED, {"fprop a": 10.0, "fprop b": 22.0}, 20.0)["products"] == 2
