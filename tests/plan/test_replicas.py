"""The simulation of all GPUs of a cluster."""

from dataclasses import replace

import numpy as np
import pytest

from octile.parallel.schedules import Costs, make_schedule, simulate
from octile.plan.replicas import Scatter, simulate_replicas

SCHEDULE, COSTS = make_schedule("dualpipe", 4, 8), Costs(forward=2, input_gradient=2, weight_gradient=1, pair=4)


def test_without_scatter_all_replicas_take_the_planned_time():
    times = simulate_replicas(SCHEDULE, COSTS, 6, 2, Scatter())
    np.testing.assert_array_equal(times.makespans, np.full(3, simulate(SCHEDULE, COSTS).makespan))
    assert times.loss == 0


def test_one_slow_gpu_delays_the_group_whose_experts_it_has():
    times = simulate_replicas(SCHEDULE, COSTS, 6, 2, Scatter(slow_gpus=1, slowdown=1.5))
    assert sorted(times.makespans > times.planned) == [False, False, True]


def test_if_all_gpus_are_slow_the_step_takes_as_many_times_as_long():
    times = simulate_replicas(SCHEDULE, COSTS, 2, 1, Scatter(slow_gpus=8, slowdown=1.5))
    assert times.step == pytest.approx(1.5 * times.planned)


def test_more_ranks_that_share_experts_wait_longer():
    steps = [simulate_replicas(SCHEDULE, COSTS, 64, ep, Scatter(jitter=0.05)).makespans.mean() for ep in (1, 8, 64)]
    assert steps == sorted(steps)
    assert steps[0] > simulate(SCHEDULE, COSTS).makespan


def test_the_seed_decides_the_draws():
    scatter = Scatter(jitter=0.05, slow_gpus=2)
    first, again, other = (
        simulate_replicas(SCHEDULE, COSTS, 8, 2, s).step for s in (scatter, scatter, replace(scatter, seed=1))
    )
    assert first == again != other


def test_ten_thousand_gpus_are_simulated():
    schedule = make_schedule("dualpipe", 16, 120)
    times = simulate_replicas(schedule, COSTS, 625, 25, Scatter(jitter=0.03, slow_gpus=10))
    assert times.makespans.shape == (25,)
    assert times.loss > 0


@pytest.mark.parametrize(
    ("dp", "ep", "scatter", "message"),
    [
        (6, 4, Scatter(), "ep must divide the 6 data-parallel ranks, not 4"),
        (50_000, 1, Scatter(), "at most 100,000 GPUs are simulated, not 200,000"),
        (2, 1, Scatter(slow_gpus=9), "slow_gpus must be at most the 8 GPUs, not 9"),
    ],
)
def test_what_cannot_be_simulated_is_refused(dp, ep, scatter, message):
    with pytest.raises(ValueError, match=message):
        simulate_replicas(SCHEDULE, COSTS, dp, ep, scatter)


@pytest.mark.parametrize(
    ("field", "needed"),
    [({"slowdown": 2.0}, "slow_gpus"), ({"slowdown": 2.0, "jitter": 0.1}, "slow_gpus"), ({"seed": 1}, "jitter or")],
)
def test_a_scatter_that_would_change_nothing_is_refused(field, needed):
    with pytest.raises(ValueError, match=f"{next(iter(field))} needs scatter.{needed}"):
        Scatter(**field)


@pytest.mark.parametrize(
    "field", [{"slowdown": 1e308}, {"jitter": 2.0}, {"slow_gpus": -1}, {"slowdown": 0.5}, {"seed": -1}]
)
def test_a_scatter_outside_its_range_is_refused(field):
    with pytest.raises(ValueError, match=f"{next(iter(field))} must be"):
        Scatter(**field)
