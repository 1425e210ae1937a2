"""The search of layouts."""

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


def test_every_candidate_is_planned_or_ruled_out_with_a_reason(found):
    assert len(found.plans) + len(found.ruled_out) == len(list(candidates(LITE, NODE, LIKE)))
    assert all(no.reason for no in found.ruled_out)


def test_the_fastest_comes_first_and_all_fit(found):
    seconds = [plan.seconds for plan in found.plans]
    assert seconds == sorted(seconds)
    assert all(why_not_fitting(plan.memory, NODE) is None for plan in found.plans)


def test_a_slower_layout_says_what_it_loses(found):
    assert found.why_not_best(found.plans[0]) == "the fastest"
    gap = found.plans[-1].seconds / found.plans[0].seconds - 1
    assert found.why_not_best(found.plans[-1]).startswith(f"{gap:+.1%}, ")
