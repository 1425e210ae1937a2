"""The search of layouts."""

from dataclasses import replace

import pytest

from octile.models.config import ModelConfig
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.memory import why_not_fitting
from octile.plan.search import candidates, search

NODE, LITE = read_cluster("h200_8"), ModelConfig.v2_lite_16b()
LIKE = Layout(batch_size=64)


@pytest.fixture(scope="module")
def found():
    return search(LITE, NODE, LIKE)


@pytest.mark.slow
def test_every_candidate_is_planned_or_ruled_out_with_a_reason(found):
    assert len(found.plans) + len(found.ruled_out) == len(list(candidates(LITE, NODE, LIKE)))
    assert all(no.reason for no in found.ruled_out)


@pytest.mark.slow
def test_the_fastest_comes_first_and_all_fit(found):
    seconds = [plan.seconds for plan in found.plans]
    assert seconds == sorted(seconds)
    assert all(why_not_fitting(plan.memory, NODE) is None for plan in found.plans)


def test_a_slower_layout_says_what_it_loses(found):
    assert found.why_not_best(found.plans[0]) == "the fastest"
    gap = found.plans[-1].seconds / found.plans[0].seconds - 1
    assert found.why_not_best(found.plans[-1]).startswith(f"{gap:+.1%}, ")


@pytest.mark.parametrize(
    "given", [{"pp": 2}, {"ep": 4}, {"schedule": "gpipe"}, {"micro_batch_size": 3}, {"pp": 3, "micro_batch_size": 1}]
)
def test_given_fields_are_kept_and_the_others_searched(given):
    layouts = list(candidates(LITE, NODE, replace(LIKE, **given), tuple(given)))
    assert {tuple(getattr(layout, name) for name in given) for layout in layouts} == {tuple(given.values())}
    searched = {"pp", "ep", "schedule", "micro_batch_size", "recompute"} - set(given)
    assert all(len({getattr(layout, name) for layout in layouts}) > 1 for name in searched)


@pytest.mark.slow
def test_the_layout_nearest_to_fitting_lacks_the_least_memory():
    found = search(ModelConfig.v3_671b(), NODE, LIKE)
    assert not found.plans
    least = min(found.ruled_out, key=lambda no: no.needed)
    assert found.nearest == f"the nearest to fitting is {least.layout}: {least.reason}"


def test_where_no_layout_divides_the_commonest_reason_is_named():
    found = search(LITE, NODE, replace(LIKE, pp=3), ("pp",))
    assert found.nearest.startswith("for example PP3 × EP")
    assert found.nearest.endswith(": pp must divide the 8 GPUs, not 3")
