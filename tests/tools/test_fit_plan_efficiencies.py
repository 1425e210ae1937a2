"""The efficiencies of the plan against the records of kernels from which they come."""

import numpy as np
import pytest

from octile.plan.hardware import read_cluster, read_efficiencies
from tools.fit_plan_efficiencies import (
    FORWARD,
    WEIGHT_GRADIENT,
    attention_shares,
    deepseek_errors,
    gemm_errors,
    gemm_slowdown,
    operator_shares,
)

E = read_efficiencies()


@pytest.mark.parametrize(("kinds", "name"), [(FORWARD, "fp8_gemm"), (WEIGHT_GRADIENT, "fp8_wgrad")])
def test_recorded_gemms_are_estimated_within_6_percent_in_the_mean(kinds, name):
    errors = gemm_errors(kinds, getattr(E, name), getattr(E, f"{name}_unhidden"), E.gemm_latency)
    assert np.abs(errors).mean() < 0.06


def test_gemms_in_profiles_of_steps_take_as_long_as_planned_within_1_percent_in_the_median():
    assert gemm_slowdown(E.gemm_in_step) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_attention_reaches_the_median_share_of_profiles_of_steps(phase):
    assert getattr(E, f"attention_{phase}") == pytest.approx(attention_shares(phase), rel=0.01)


def test_gemms_of_the_published_run_are_estimated_within_6_percent_in_the_mean():
    e = read_cluster("h800_2048").reached
    errors = deepseek_errors(e.fp8_gemm, e.fp8_gemm_unhidden, e.gemm_latency)
    assert np.abs(errors).mean() < 0.06
    assert abs(errors.mean()) < 0.01


@pytest.mark.parametrize(("name", "share"), operator_shares().items())
def test_the_share_of_an_operator_is_that_of_the_record_within_5_percent(name, share):
    assert getattr(E, name) == pytest.approx(share, rel=0.05)
