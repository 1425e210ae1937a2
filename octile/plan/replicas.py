"""Discrete-event simulation of a pipeline on all GPUs of a cluster, whose durations scatter and of which some are slow.

All data-parallel replicas of a pipeline are simulated at once, as arrays: a time has an element for each group of
replicas that share their experts. The ranks of such a group wait for each other in every layer with experts, so an
action of the group takes as long as its slowest rank. At the end of the step all replicas wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from octile.parallel.schedules import Action, Costs, Schedule, StageCosts, run_actions
from octile.validation import Range, check_fields

MAX_GPUS = 100_000
Share = Annotated[float, Range(at_least=0, at_most=1)]


@dataclass(frozen=True)
class Scatter:
    """How the durations of a cluster's GPUs differ from the planned ones.

    Attributes:
        jitter: standard deviation of an action's duration, as a share of it; drawn for each action and GPU.
        slow_gpus: GPUs that are always slower; drawn among all.
        slowdown: how many times as long a slow GPU takes.
        seed: seed of the draws.

    Raises:
        TypeError, ValueError: a field is not what its annotation says, or would change nothing.
    """

    jitter: Share = 0.0
    slow_gpus: Annotated[int, Range(at_least=0, at_most=MAX_GPUS)] = 0
    slowdown: Annotated[float, Range(at_least=1, at_most=1000)] = 1.1
    seed: Annotated[int, Range(at_least=0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slowdown != Scatter.slowdown and not self.slow_gpus:
            raise ValueError("scatter.slowdown needs scatter.slow_gpus of at least 1: without it no GPU is slower")
        if self.seed and not self.is_given:
            raise ValueError("scatter.seed needs scatter.jitter or scatter.slow_gpus: without them nothing is drawn")

    @property
    def is_given(self) -> bool:
        """Whether any duration differs from the planned one."""
        return self.jitter > 0 or self.slow_gpus > 0

    def check(self, gpus: int) -> None:
        """Refuse a cluster that cannot be simulated.

        Raises:
            ValueError: there are more GPUs than MAX_GPUS, or fewer than are to be slow.
        """
        if gpus > MAX_GPUS:
            raise ValueError(f"at most {MAX_GPUS:,} GPUs are simulated, not {gpus:,}")
        if self.slow_gpus > gpus:
            raise ValueError(f"scatter.slow_gpus must be at most the {gpus:,} GPUs, not {self.slow_gpus:,}")


@dataclass(frozen=True)
class ReplicaTimes:
    """The step of every group of replicas.

    Attributes:
        makespans: seconds of each group's pipeline [groups].
        planned: seconds without scatter.
    """

    makespans: np.ndarray
    planned: float

    @property
    def step(self) -> float:
        """Seconds until the last group has finished, for which all wait."""
        return float(self.makespans.max())

    @property
    def loss(self) -> float:
        """The share by which the step is longer than without scatter."""
        return self.step / self.planned - 1


def simulate_replicas(
    schedule: Schedule, costs: Costs | StageCosts, dp: int, ep: int, scatter: Scatter
) -> ReplicaTimes:
    """Simulate the pipelines of all data-parallel replicas.

    Args:
        schedule: schedule of the pipeline.
        costs: durations of its actions, such as measured ones.
        dp: replicas.
        ep: replicas that share their experts; they divide dp.
        scatter: how durations differ.

    Raises:
        ValueError: ep does not divide dp, there are more GPUs than MAX_GPUS, or fewer than are to be slow.
    """
    gpus = dp * schedule.n_ranks
    if dp % ep:
        raise ValueError(f"ep must divide the {dp:,} data-parallel ranks, not {ep}")
    scatter.check(gpus)
    random = np.random.default_rng(scatter.seed)
    factor = np.ones((schedule.n_ranks, dp))
    factor.reshape(-1)[random.choice(gpus, scatter.slow_gpus, replace=False)] = scatter.slowdown
    groups = dp // ep

    def duration(rank: int, action: Action) -> np.ndarray:
        times = factor[rank]
        if scatter.jitter:
            times = times * np.maximum(1 + scatter.jitter * random.standard_normal(dp), 0)
        return costs.of(action) * times.reshape(groups, ep).max(axis=1)

    spans = run_actions(schedule, duration, costs.communication, np.zeros(groups), np.maximum)
    planned = run_actions(schedule, lambda rank, action: costs.of(action), costs.communication, 0.0, max)
    ends = np.max([rank[-1].end for rank in spans], axis=0)
    return ReplicaTimes(ends, max(rank[-1].end for rank in planned))
