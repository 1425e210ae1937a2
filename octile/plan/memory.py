"""The memory of a rank by kind, in bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from octile.models.config import ModelConfig
from octile.parallel.schedules import Schedule
from octile.plan.hardware import Cluster
from octile.plan.layout import Layout
from octile.plan.muon import MATRIX_MOMENT_BYTES, held_projection, update_bytes
from octile.plan.parameters import held_parameters
from octile.plan.pass_memory import GRADIENT_BYTES, message_bytes, most_in_passes, pass_bytes
from octile.plan.stages import Stage

MASTER_BYTES = {"replicated": (4, 0), "sharded": (2, 4)}  # on every rank, and shared by the data-parallel ranks
MOMENT_BYTES = 4  # two in BF16
FP8_BYTES = 2  # a weight and its transpose
USABLE = 0.94  # of a GPU's memory: the others are CUDA's context, NCCL's buffers and fragmentation


def memory_by_kind(
    c: ModelConfig, layout: Layout, cluster: Cluster, schedule: Schedule, stages: Sequence[Stage]
) -> dict[str, float]:
    """The memory of the rank that needs most.

    Args:
        c, layout, cluster: what is planned.
        schedule: says which stages a rank has.
        stages: the layers of each.

    Returns:
        Bytes by kind, as `memory_of_rank`.
    """
    ranks = (memory_of_rank(c, layout, cluster, schedule, stages, rank) for rank in range(schedule.n_ranks))
    return max(ranks, key=lambda kinds: sum(kinds.values()))


def why_not_fitting(kinds: Mapping[str, float], cluster: Cluster) -> str | None:
    """Say why a rank's memory does not suffice; None if it does."""
    needed, usable = sum(kinds.values()), usable_memory(cluster)
    if needed <= usable:
        return None
    largest = max(kinds, key=lambda kind: kinds[kind])
    return (
        f"a rank needs {needed / 1e9:,.0f} GB, {kinds[largest] / 1e9:,.0f} of them for {largest}, and "
        f"{usable / 1e9:,.0f} of the {cluster.gpu.name}'s {cluster.gpu.memory / 1e9:,.0f} GB are usable"
    )


def usable_memory(cluster: Cluster) -> float:
    """The bytes of a GPU that a rank can use."""
    return USABLE * cluster.gpu.memory


def memory_of_rank(
    c: ModelConfig, layout: Layout, cluster: Cluster, schedule: Schedule, stages: Sequence[Stage], rank: int
) -> dict[str, float]:
    """The memory of a rank by kind, in bytes, when it needs most.

    Args:
        c, layout, cluster, schedule, stages: as in `memory_by_kind`.
        rank: a rank of the pipeline.

    Returns:
        Bytes by kind: weights, FP8 weights, gradients, moments (with masters that are sharded), activations, working.
        Activations are what is saved for backward passes, and operands of weight gradients that are deferred. Working
        memory is what passes take besides: logits, tensors of the pass that runs, messages to other ranks. Where an
        update by Muon takes more than a pass, it is what that takes beyond the activations, which it does not need.
        In a pipeline gradients are those of the stages that have computed some, without one all.
    """
    own = [stages[stage] for stage in schedule.stages(rank)]
    routed, quantized, rest = held_parameters(c, layout, own)
    parameters, dp = routed + quantized + rest, layout.dp(cluster)
    everywhere, shared = MASTER_BYTES[layout.masters]
    sharded = routed / (dp // layout.ep) + (quantized + rest) / dp
    moments = MOMENT_BYTES * sharded
    if layout.optimizer == "muon":
        matrices = routed / (dp // layout.ep) + (quantized + held_projection(c, own)) / dp
        moments -= (MOMENT_BYTES - MATRIX_MOMENT_BYTES) * matrices
    # data-parallel ranks without a pipeline store the last micro-batch's gradients alone, since hooks read them
    hooked = layout.stages == 1 and dp > 1
    stores = layout.masters == "replicated" and schedule.n_micro_batches > 1 and hooked
    passes = {stage: pass_bytes(c, layout, stages[stage], stores) for stage in schedule.stages(rank)}

    def gradients_of(begun: Collection[int]) -> float:
        return GRADIENT_BYTES * sum(held_parameters(c, layout, [stages[stage] for stage in begun]))

    activations, gradients, working = most_in_passes(
        schedule, rank, passes, gradients_of, exchanges=layout.ep > 1, has_gradients=layout.stages == 1
    )
    working += message_bytes(c, layout, schedule, rank)
    if layout.optimizer == "muon":
        working = max(
            working, update_bytes(c, own, layout.ep, dp) + GRADIENT_BYTES * parameters - gradients - activations
        )
    return {
        "weights": everywhere * parameters,
        "FP8 weights": FP8_BYTES * (routed + quantized),
        "gradients": gradients,
        "moments": moments + shared * sharded,
        "activations": activations,
        "working": working,
    }
