"""The plan's durations by kind against recorded profiles."""

import pytest

from tools.compare_plan_kernels import profiles
from tools.kernel_kinds import KINDS

PROFILES = pytest.mark.parametrize("profile", profiles(), ids=lambda profile: profile.title)
LARGE = 0.04  # of all kernels of a profile


@PROFILES
def test_kernels_that_wait_for_other_ranks_do_not_count(profile):
    assert not [kernel for kernel in profile.kernels if kernel.name in ("peer_barrier", "send_results")]


@PROFILES
def test_all_kernels_take_as_long_as_planned_within_8_percent(profile):
    assert profile.planned().total() == pytest.approx(profile.recorded().total(), rel=0.08)


@PROFILES
def test_each_large_kind_takes_as_long_as_planned_within_12_percent(profile):
    found, planned = profile.recorded(), profile.planned()
    large = [kind for kind in KINDS if found[kind] > LARGE * found.total()]
    assert "FP8 GEMMs" in large
    assert {kind: planned[kind] for kind in large} == pytest.approx({kind: found[kind] for kind in large}, rel=0.12)


@PROFILES
def test_the_plan_leaves_out_less_than_1_percent_of_the_kernels(profile):
    found, planned = profile.recorded(), profile.planned()
    assert sum(found[kind] for kind in (*KINDS, "others") if not planned[kind]) < 0.01 * found.total()
