"""The stages of a pipeline: which layers each has, their work and their exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from octile.models.config import ModelConfig
from octile.plan.division import divide, fold
from octile.plan.durations import by_kind, seconds
from octile.plan.exchange import busiest_rank, exchange
from octile.plan.hardware import Cluster
from octile.plan.layout import Layout
from octile.plan.work import (
    PHASES,
    Phase,
    Work,
    attention_work,
    dense_work,
    embedding_work,
    gradient_sums,
    head_work,
    mixture_work,
    prediction_work,
)

OVERLAPPING = ("dualpipe", "dualpipev")  # schedules with overlapped pairs


@dataclass(frozen=True, eq=False)
class Part:
    """A piece of the model that is not divided among stages, for one micro-batch: a layer, or the end.

    Attributes:
        work: the kernels of one micro-batch.
        cluster: the GPUs that run them.
        layers: how many layers it has: attention with a dense or an expert part.
        mixtures: how many of them have experts.
        heads: how often the head is computed: once, and once more for multi-token prediction.
        has_embedding: whether it begins with the embedding; multi-token prediction does, too.
    """

    work: tuple[Work, ...]
    cluster: Cluster
    layers: int = 1
    mixtures: int = 0
    heads: int = 0
    has_embedding: bool = False

    @cached_property
    def alone(self) -> dict[Phase, float]:
        """Seconds of computation by phase, with all SMs."""
        return self._compute(None)

    @cached_property
    def during_exchange(self) -> dict[Phase, float]:
        """Seconds of computation by phase, while exchanges have their SMs."""
        return self._compute(self.cluster.gpu.multiprocessors - self.cluster.exchange_multiprocessors)

    @cached_property
    def kinds(self) -> Counter[str]:
        """Seconds of computation by kind, of a forward and a backward pass with all SMs."""
        return by_kind(self.work, self.cluster)

    def _compute(self, multiprocessors: int | None) -> dict[Phase, float]:
        total = dict.fromkeys(PHASES, 0.0)
        for work in self.work:
            total[work.phase] += seconds(work, self.cluster, multiprocessors)
        return total


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage of the pipeline, for one micro-batch.

    Attributes:
        parts: parts of the model, in order.
        exchange_seconds: dispatch and combine of one layer with experts in one direction, if nothing hides them.
    """

    parts: tuple[Part, ...]
    exchange_seconds: float

    @cached_property
    def mixtures(self) -> int:
        """Layers with experts."""
        return sum(part.mixtures for part in self.parts)

    @property
    def exchanged(self) -> float:
        """Seconds of dispatch and combine in a forward pass; a backward pass takes as long."""
        return self.mixtures * self.exchange_seconds

    @cached_property
    def alone(self) -> dict[Phase, float]:
        """Seconds of computation by phase, with all SMs."""
        return {phase: sum(part.alone[phase] for part in self.parts) for phase in PHASES}

    @cached_property
    def during_exchange(self) -> dict[Phase, float]:
        """Seconds of computation by phase, while exchanges have their SMs."""
        return {phase: sum(part.during_exchange[phase] for part in self.parts) for phase in PHASES}

    @cached_property
    def kinds(self) -> Counter[str]:
        """Seconds of computation by kind, of a forward and a backward pass with all SMs."""
        return sum((part.kinds for part in self.parts), Counter())


def make_stages(
    c: ModelConfig, layout: Layout, cluster: Cluster, layers: Sequence[range] | None = None
) -> tuple[Stage, ...]:
    """Divide a model into stages so that the slowest rank takes as little time as possible.

    With DualPipeV a rank has two stages, whose times add up; in bidirectional schedules it has one in each direction,
    and each counts alone. Exchanges count unless the schedule overlaps them with computation.

    Args:
        c, layout, cluster: what is planned.
        layers: the layers of each stage, as `stage_layers` returns them, if they are given.
    """
    exchange_seconds = exchange(c, layout.micro_batch_tokens, layout.ep, cluster, layout.is_balanced).total
    parts = make_parts(c, layout, cluster)
    if layers is not None:
        ends = [0, *(own.stop for own in layers[:-1]), len(parts)]
        return tuple(Stage(tuple(parts[begin:end]), exchange_seconds) for begin, end in pairwise(ends))
    shown = 0.0 if layout.schedule in OVERLAPPING else 2 * exchange_seconds
    costs = tuple(sum(part.alone.values()) + part.mixtures * shown for part in parts)
    bounds = fold(costs, layout.pp) if layout.schedule == "dualpipev" else divide(costs, layout.stages)
    return tuple(Stage(tuple(parts[begin:end]), exchange_seconds) for begin, end in bounds)


def stage_layers(c: ModelConfig, layout: Layout, cluster: Cluster) -> list[range]:
    """The layers of each stage of `make_stages`.

    The last stage has the head and multi-token prediction, too. If these take long it has no layers: an empty range.
    """
    ends = [0, *accumulate(len(stage.parts) for stage in make_stages(c, layout, cluster))]
    ends[-1] = c.num_hidden_layers
    return [range(begin, end) for begin, end in pairwise(ends)]


def make_parts(c: ModelConfig, layout: Layout, cluster: Cluster) -> list[Part]:
    """The parts of a model in order: the first layer with the embedding, the others, the end.

    The end is the head; with multi-token prediction its layer stands before it, since both share embedding and head.
    """
    tokens, saved, predicted = layout.micro_batch_tokens, not layout.recompute, c.num_nextn_predict_layers
    load = 1.0 if layout.is_balanced else busiest_rank(c, layout.ep, cluster)
    attention = tuple(attention_work(c, tokens, layout.sequence_length, saved))
    dense = Part((*attention, *dense_work(c, tokens, saved)), cluster)
    mixture = Part(
        (*attention, *mixture_work(c, tokens, layout.ep, saved, load, layout.spare_rows)), cluster, mixtures=1
    )
    layers = [mixture if c.is_moe(number) else dense for number in range(c.num_hidden_layers)]
    embedding, head = tuple(embedding_work(c, tokens)), tuple(head_work(c, tokens))
    layers[0] = replace(layers[0], work=(*embedding, *layers[0].work), has_embedding=True)
    if predicted:
        work = (*head, *embedding, *prediction_work(c, tokens), *mixture.work, *head)
        end = Part(work, cluster, mixtures=1, heads=2, has_embedding=True)
    else:
        end = Part(head, cluster, layers=0, heads=1)
    parts = [*layers, end]
    if layout.masters == "sharded":  # GEMMs add to FP32 gradients
        return parts
    n = layout.micro_batches(cluster)
    return [replace(part, work=(*part.work, *gradient_sums(part.work, n))) for part in parts]
