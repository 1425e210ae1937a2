"""The best layouts of a model on a cluster, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octile.models.config import ModelConfig
from octile.plan.hardware import Cluster
from octile.plan.layout import Layout, ScheduleName
from octile.plan.memory import memory_by_kind, why_not_fitting
from octile.plan.stages import make_stages
from octile.plan.step import StepPlan, plan_step

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zb1p", "dualpipe", "dualpipev", "chimera")
MICRO_BATCH_SIZES = (1, 2, 4)


@dataclass(frozen=True)
class RuledOut:
    """A layout that cannot run, with the reason."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        plans: of the layouts that can run, the fastest first.
        ruled_out: the others.
    """

    plans: tuple[StepPlan, ...]
    ruled_out: tuple[RuledOut, ...]

    def why_not_best(self, plan: StepPlan) -> str:
        """Say what a plan loses to the best one: the kind of time that it has more of."""
        best = self.plans[0]
        if plan is best:
            return "the fastest"
        gap = plan.seconds / best.seconds - 1
        mine, its = plan.seconds_by_kind, best.seconds_by_kind
        kind = max(mine, key=lambda kind: mine[kind] - its.get(kind, 0.0))
        return f"{gap:+.1%}, {kind}: {mine[kind]:.3g} vs. {its.get(kind, 0.0):.3g} s"


def search(c: ModelConfig, cluster: Cluster, like: Layout) -> Search:
    """Plan every layout whose pipeline and expert ranks are powers of two.

    Args:
        c: the model.
        cluster: its GPUs.
        like: the batch, the sequence length, masters and rows, which every layout has; the rest is searched.
    """
    plans, ruled_out = [], []
    for layout in candidates(c, cluster, like):
        try:
            layout.check(c, cluster)
            schedule, stages = layout.make_schedule(cluster), make_stages(c, layout, cluster)
            if reason := why_not_fitting(memory_by_kind(c, layout, cluster, schedule, stages), cluster):
                ruled_out.append(RuledOut(layout, reason))
            else:
                plans.append(plan_step(c, layout, cluster))
        except ValueError as error:
            ruled_out.append(RuledOut(layout, str(error)))
    return Search(tuple(sorted(plans, key=lambda plan: plan.seconds)), tuple(ruled_out))


def candidates(c: ModelConfig, cluster: Cluster, like: Layout) -> Iterator[Layout]:
    """The layouts that a search plans."""
    for pp in _powers_of_two(min(cluster.gpus, c.num_hidden_layers)):
        for ep in _powers_of_two(min(cluster.gpus // pp, c.n_routed_experts)):
            for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
                for size in MICRO_BATCH_SIZES:
                    for recompute in (True, False):
                        yield replace(like, pp=pp, ep=ep, schedule=schedule, micro_batch_size=size, recompute=recompute)


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]
