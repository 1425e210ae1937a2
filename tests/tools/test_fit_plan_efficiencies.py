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
CHIPS = {chip: read_cluster(f"{chip}_8").reached for chip in ("h100", "h200")}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("kinds", "name"), [(FORWARD, "fp8_gemm"), (WEIGHT_GRADIENT, "fp8_wgrad")])
def test_recorded_gemms_are_estimated_within_6_percent_in_the_mean(kinds, name, chip):
    e = CHIPS[chip]
    errors = gemm_errors(kinds, getattr(e, name), getattr(e, f"{name}_unhidden"), e.gemm_latency, chip)
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


@pytest.mark.parametrize(
    ("chip", "name", "share"), [(chip, name, share) for chip in CHIPS for name, share in operator_shares(chip).items()]
)
def test_the_share_of_an_operator_is_that_of_the_record_within_5_percent(chip, name, share):
    assert getattr(CHIPS[chip], name) == pytest.approx(share, rel=0.05)
