"""A training step on a cluster: its time, its bubble, what communication it does not hide, its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from octile.models.config import ModelConfig
from octile.models.flops import multiply_adds, train_flops_per_token
from octile.parallel.schedules import Action, ActionType, Costs, Schedule, Simulation, StageCosts, simulate
from octile.plan.hardware import Cluster
from octile.plan.layout import Layout
from octile.plan.memory import GRADIENT_BYTES, MASTER_BYTES, memory_by_kind
from octile.plan.muon import MATRIX_BYTES, held_projection, newton_schulz_flops
from octile.plan.parameters import held_parameters
from octile.plan.stages import Stage, make_stages

OPTIMIZER_BYTES = {  # of a parameter: AdamW reads 12 and writes 8, the norm reads 4
    "replicated": 24,
    "sharded": 28,  # gradients to which GEMMs add are zeroed
}
QUANTIZED_BYTES = 6  # of a weight that is quantized: FP32 read, two FP8 forms written
TRILLION = 1e12
ROUNDING = 1e-9  # share of a sum of times that is the rounding of its terms
MIN_SECONDS = 1e-9  # `Costs` needs times above 0


@dataclass(frozen=True)
class StepPlan:
    """A training step as the model of the cluster predicts it.

    Attributes:
        model, layout, cluster: what is planned.
        stages: stages of the pipeline.
        simulation: simulation of its schedule, in seconds.
        memory: bytes of the rank that needs most, by kind.
        reduction: seconds to sum gradients over the data-parallel ranks and to gather weights.
        optimizer: seconds of AdamW or Muon, of the gradients' norm and of quantizing weights.
    """

    model: ModelConfig
    layout: Layout
    cluster: Cluster
    stages: tuple[Stage, ...] = field(repr=False)
    simulation: Simulation = field(repr=False)
    memory: dict[str, float]
    reduction: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """A step."""
        return self.simulation.makespan + self.reduction + self.optimizer

    @property
    def reserved(self) -> float:
        """The bytes that torch's allocator reserves for the rank's tensors where the GPU has so many."""
        return sum(self.memory.values()) / self.cluster.reached.allocated

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.layout.batch_size * self.layout.sequence_length

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second of a GPU."""
        return self.tokens / self.seconds / self.cluster.gpus

    @property
    def gpu_hours_per_trillion_tokens(self) -> float:
        """GPU hours for 10¹² tokens."""
        return TRILLION / self.tokens_per_second_per_gpu / 3600

    @property
    def dollars_per_trillion_tokens(self) -> float | None:
        """The price of 10¹² tokens; None if the cluster has no price."""
        price = self.cluster.dollars_per_gpu_hour
        return None if price is None else price * self.gpu_hours_per_trillion_tokens

    @property
    def mfu(self) -> float:
        """The share of the BF16 peak by octile's count of FLOPs (`octile.models.flops`)."""
        flops = train_flops_per_token(self.model, self.layout.sequence_length)
        return flops * self.tokens_per_second_per_gpu / self.cluster.gpu.bf16_peak

    @property
    def causal_mfu(self) -> float:
        """The share of the BF16 peak without multi-token prediction and with the causal half of attention.

        The 38.94% that DeepSeek published count so: 385 TFLOP/s, and 432 with all of attention (arXiv 2505.09343 table
        4), whose difference at 272.8 billion tokens a day is half of attention.
        """
        flops = 6 * sum(multiply_adds(self.model, self.layout.sequence_length / 2).values())
        return flops * self.tokens_per_second_per_gpu / self.cluster.gpu.bf16_peak

    @cached_property
    def pair_seconds(self) -> float:
        """The longest overlapped pair of a forward and a backward pass; without overlap that of both in turn."""
        return max(overlapped(stage, stage) for stage in self.stages)

    @cached_property
    def seconds_by_kind(self) -> dict[str, float]:
        """What the busiest rank does in a step: computation by kind, exposed exchanges, bubble, and what follows.

        "SMs for exchanges" is what computation takes longer while exchanges have a part of the SMs; "exposed exchanges"
        is what remains of passes and of pairs.
        """
        simulation, schedule = self.simulation, self.simulation.schedule
        rank = min(range(schedule.n_ranks), key=lambda rank: simulation.bubbles[rank])
        passes = schedule.n_micro_batches // len(schedule.placement)
        kinds: Counter[str] = Counter()
        for stage in schedule.stages(rank):
            for kind, seconds in self.stages[stage].kinds.items():
                kinds[kind] += seconds * passes
        computed = sum(kinds.values())
        exposed = sum(_exposed(self.stages, span.action) for span in simulation.spans[rank])
        busy = simulation.makespan - simulation.bubbles[rank]
        slowed = busy - computed - exposed
        return {
            **dict(kinds.most_common()),
            "SMs for exchanges": slowed if slowed > ROUNDING * busy else 0.0,
            "exposed exchanges": exposed,
            "bubble": simulation.bubbles[rank],
            "gradients and weights": self.reduction,
            "optimizer": self.optimizer,
        }


def plan_step(c: ModelConfig, layout: Layout, cluster: Cluster, layers: Sequence[range] | None = None) -> StepPlan:
    """Predict a training step.

    Args:
        c, layout, cluster: what is planned.
        layers: as in `make_stages`.

    Raises:
        ValueError: the layout does not divide the layers, experts or batch, or its schedule refuses it. Whether the
            memory suffices is not asked: see `octile.plan.memory.why_not_fitting`.
    """
    layout.check(c, cluster)
    schedule, stages = layout.make_schedule(cluster), make_stages(c, layout, cluster, layers)
    simulation = simulate(schedule, stage_costs(c, layout, cluster, stages))
    memory = memory_by_kind(c, layout, cluster, schedule, stages)
    ends = [_end_of_step(c, layout, cluster, schedule, stages, rank) for rank in range(schedule.n_ranks)]
    reduction, optimizer = max(ends, key=sum)
    return StepPlan(c, layout, cluster, stages, simulation, memory, reduction, optimizer)


def stage_costs(c: ModelConfig, layout: Layout, cluster: Cluster, stages: tuple[Stage, ...]) -> StageCosts:
    """The times of a pipeline's actions, in seconds.

    Alone, a pass waits for its exchanges. In an overlapped pair they run during the computation of the other pass,
    which has fewer SMs.
    """
    costs = tuple(
        Costs(
            forward=max(stage.alone["forward"] + stage.exchanged, MIN_SECONDS),
            input_gradient=max(stage.alone["input_gradient"] + stage.exchanged, MIN_SECONDS),
            weight_gradient=max(stage.alone["weight_gradient"], MIN_SECONDS),
        )
        for stage in stages
    )
    pairs = {(f, b): overlapped(stages[f], stages[b]) for f in range(len(stages)) for b in range(len(stages))}
    return StageCosts(costs, pairs, _send_seconds(c, layout, cluster))


def overlapped(forward: Stage, backward: Stage) -> float:
    """Seconds of an overlapped pair: of its computation or of its exchanges, whichever takes longer.

    The SMs for exchanges are set aside for the whole pair, and both slow each other down as long as the exchanges last.
    If both passes in turn are faster, they run so.
    """
    exchanged = forward.exchanged + backward.exchanged
    alone = forward.alone["forward"] + backward.alone["input_gradient"] + backward.alone["weight_gradient"]
    if not exchanged:
        return alone
    e = forward.parts[0].cluster.reached
    exchanging = exchanged / e.during_gemm
    computed = _during_exchange(forward, backward) + exchanging * (1 - e.during_exchange)
    return min(alone + exchanged, max(computed / e.overlap, exchanging))


def _during_exchange(forward: Stage, backward: Stage) -> float:
    """Seconds of a pair's computation on the SMs that exchanges leave."""
    hidden_backward = backward.during_exchange["input_gradient"] + backward.during_exchange["weight_gradient"]
    return forward.during_exchange["forward"] + hidden_backward


def _exposed(stages: tuple[Stage, ...], action: Action) -> float:
    """Seconds of an action's exchanges that no computation hides."""
    if action.sub_actions is None:
        is_weight = action.computation_type == ActionType.BACKWARD_WEIGHT
        return 0.0 if is_weight else stages[action.stage_index].exchanged
    forward, backward = (stages[part.stage_index] for part in action.sub_actions)
    return max(overlapped(forward, backward) - _during_exchange(forward, backward), 0.0)


def _send_seconds(c: ModelConfig, layout: Layout, cluster: Cluster) -> float:
    """Seconds until the next rank of a pipeline has a micro-batch's activations in BF16."""
    if layout.pp == 1:
        return 0.0
    e, size = cluster.reached, 2 * layout.micro_batch_tokens * c.hidden_size
    if cluster.network is None:
        return cluster.nvlink.latency + size / (cluster.nvlink.bandwidth * e.nvlink)
    return cluster.network.latency + size / (cluster.network.bandwidth * e.network)


def _end_of_step(
    c: ModelConfig, layout: Layout, cluster: Cluster, schedule: Schedule, stages: tuple[Stage, ...], rank: int
) -> tuple[float, float]:
    """Seconds in which a rank sums gradients and gathers weights, and in which it updates its share of the weights.

    Gradients are reduced and weights gathered within a node over NVLink, then between nodes, each GPU a part. The
    copies of a bidirectional schedule are as many data-parallel ranks more.
    """
    e, dp = cluster.reached, layout.dp(cluster)
    routed, quantized, rest = held_parameters(c, layout, [stages[stage] for stage in schedule.stages(rank)])
    copies = len(schedule.placement)
    seconds, updated = 0.0, 0.0
    sizes = GRADIENT_BYTES + MASTER_BYTES[layout.masters][0]
    for parameters, ranks, stride in (
        (routed, dp // layout.ep * copies, layout.ep),
        (quantized + rest, dp * copies, 1),
    ):
        updated += parameters / ranks
        if ranks == 1:
            continue
        within = min(ranks, max(1, cluster.gpus_per_node // stride))
        nvlink = cluster.nvlink.bandwidth * e.nvlink_collective
        seconds += sizes * parameters * (within - 1) / within / nvlink
        nodes = ranks // within
        if nodes > 1 and cluster.network is not None:
            network = cluster.network.bandwidth * e.network
            seconds += sizes * parameters / within * (nodes - 1) / nodes / network
    memory = cluster.gpu.memory_bandwidth
    optimizer = 0.0
    if layout.optimizer == "muon":
        own = [stages[stage] for stage in schedule.stages(rank)]
        shares = routed * layout.ep / (dp * copies), (quantized + held_projection(c, own)) / (dp * copies)
        updated -= sum(shares)
        optimizer += MATRIX_BYTES * sum(shares) / (memory * e.copy)
        flops = sum(each * share for each, share in zip(newton_schulz_flops(c), shares, strict=True))
        optimizer += flops / (cluster.gpu.bf16_peak * e.bf16_gemm * e.gemm_in_step)
    optimizer += OPTIMIZER_BYTES[layout.masters] * updated / (memory * e.optimizer)
    optimizer += QUANTIZED_BYTES * (routed + quantized) / (memory * e.quantize)
    return seconds, optimizer
