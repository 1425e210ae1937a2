"""The best layouts of a model on a cluster, and why the others are not."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from octile.models.config import ModelConfig
from octile.plan.hardware import Cluster
from octile.plan.layout import Layout, ScheduleName
from octile.plan.memory import memory_by_kind, usable_memory, why_not_fitting
from octile.plan.stages import make_stages
from octile.plan.step import StepPlan, plan_step

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zb1p", "dualpipe", "dualpipev", "chimera")
MICRO_BATCH_SIZES = (1, 2, 4)
T = TypeVar("T")


@dataclass(frozen=True)
class RuledOut:
    """A layout that cannot run.

    Attributes:
        layout: which one.
        reason: why not.
        needed: the memory that it needs, as a share of what is usable; infinite if something else rules it out.
    """

    layout: Layout
    reason: str
    needed: float = math.inf


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        plans: plans of the layouts that can run, the fastest first.
        ruled_out: the others.
    """

    plans: tuple[StepPlan, ...]
    ruled_out: tuple[RuledOut, ...]

    @property
    def reasons(self) -> Counter[str]:
        """How often each reason rules a layout out; reasons that differ in numbers count together, by their first."""
        firsts: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for no in self.ruled_out:
            kind = re.sub(r"[\d,.]+", "#", no.reason)
            counts[firsts.setdefault(kind, f"{no.layout}: {no.reason}")] += 1
        return counts

    @property
    def nearest(self) -> str:
        """The layout that lacks the least memory, and why; if none gets so far, the commonest reason."""
        no = min(self.ruled_out, key=lambda no: no.needed)
        if no.needed == math.inf:
            return f"for example {self.reasons.most_common(1)[0][0]}"
        return f"the nearest to fitting is {no.layout}: {no.reason}"

    def why_not_best(self, plan: StepPlan) -> str:
        """Say what a plan loses to the best one: the kind of time that it has more of."""
        best = self.plans[0]
        if plan is best:
            return "the fastest"
        gap = plan.seconds / best.seconds - 1
        mine, its = plan.seconds_by_kind, best.seconds_by_kind
        kind = max(mine, key=lambda kind: mine[kind] - its.get(kind, 0.0))
        return f"{gap:+.1%}, {kind}: {mine[kind]:.3g} vs. {its.get(kind, 0.0):.3g} s"


def search(c: ModelConfig, cluster: Cluster, like: Layout, fixed: Collection[str] = ()) -> Search:
    """Plan every layout whose pipeline and expert ranks are powers of two.

    Args:
        c: the model.
        cluster: its GPUs.
        like: the batch, the sequence length, masters and rows, which every layout has; the rest is searched.
        fixed: fields that are not searched either: of pp, ep, schedule and micro_batch_size.
    """
    plans, ruled_out = [], []
    for layout in candidates(c, cluster, like, fixed):
        try:
            layout.check(c, cluster)
            schedule, stages = layout.make_schedule(cluster), make_stages(c, layout, cluster)
            memory = memory_by_kind(c, layout, cluster, schedule, stages)
            if reason := why_not_fitting(memory, cluster):
                ruled_out.append(RuledOut(layout, reason, sum(memory.values()) / usable_memory(cluster)))
            else:
                plans.append(plan_step(c, layout, cluster))
        except ValueError as error:
            ruled_out.append(RuledOut(layout, str(error)))
    return Search(tuple(sorted(plans, key=lambda plan: plan.seconds)), tuple(ruled_out))


def candidates(c: ModelConfig, cluster: Cluster, like: Layout, fixed: Collection[str] = ()) -> Iterator[Layout]:
    """The layouts that a search plans."""

    def values(field: str, searched: Iterable[T]) -> Iterable[T]:
        return (getattr(like, field),) if field in fixed else searched

    for pp in values("pp", _powers_of_two(min(cluster.gpus, c.num_hidden_layers))):
        for ep in values("ep", _powers_of_two(min(cluster.gpus // pp, c.n_routed_experts))):
            for schedule in values("schedule", SCHEDULES if pp > 1 else SCHEDULES[:1]):
                for size in values("micro_batch_size", MICRO_BATCH_SIZES):
                    for recompute in (True, False):
                        yield replace(like, pp=pp, ep=ep, schedule=schedule, micro_batch_size=size, recompute=recompute)


def _powers_of_two(most: int) -> list[int]:
    """The powers of two up to a number; 1 in any case, so that a search of none says why."""
    return [1 << exponent for exponent in range(max(1, most.bit_length()))]
