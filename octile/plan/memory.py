"""The memory of a rank by kind, in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from octile.models.config import ModelConfig
from octile.models.counts import count_parameters
from octile.parallel.schedules import Schedule
from octile.plan.exchange import hit_probability
from octile.plan.hardware import Cluster
from octile.plan.layout import Layout
from octile.plan.muon import MATRIX_MOMENT_BYTES, held_projection, update_bytes
from octile.plan.stages import Stage
from octile.plan.work import tiles

GRADIENT_BYTES = 4  # FP32
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
        Bytes by kind: weights, FP8 weights, gradients, moments (with masters that are sharded), activations, working.
        Where an update by Muon takes more than a pass, working memory is what it takes beyond the activations, which
        it does not need.
    """
    held = schedule.activations
    ranks = (
        _rank_bytes(c, layout, cluster, [stages[stage] for stage in schedule.stages(rank)], held[rank])
        for rank in range(schedule.n_ranks)
    )
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


def saved_bytes(c: ModelConfig, layout: Layout, is_moe: bool) -> float:
    """The bytes that a layer saves of each token for its backward pass (docs/data_flow.md).

    With experts on several ranks the rows that a rank was sent are saved, too.
    """
    d, h = c.hidden_size, c.num_attention_heads
    saved = 2 * d + 4 + 2 * c.latent_dim + 4 + (2 * c.q_lora_rank + 4 if c.q_lora_rank else 0)
    saved += 3 * h * c.v_head_dim // 2 + 4 * -(-h * c.v_head_dim // 128) + 4 * h
    saved += 2 * d + 4
    if not layout.recompute:
        saved += recomputable_bytes(c) // (c.num_hidden_layers + c.num_nextn_predict_layers)
    if not is_moe:
        return saved + 2 * tiles(c.intermediate_size)
    k = c.num_experts_per_tok
    swiglu = 2 * tiles(c.n_shared_experts * c.moe_intermediate_size) + k * 2 * tiles(c.moe_intermediate_size) * (
        1 + layout.spare_rows
    )
    received = layout.ep * hit_probability(c, layout.ep) * tiles(d) if layout.ep > 1 else 0
    return saved + swiglu + received + 4 * c.n_routed_experts + 20 * k


def recomputable_bytes(c: ModelConfig) -> int:
    """The bytes of each token that the layers save although they could be recomputed, if a run saves them.

    Norms in 1×128 tiles, those that a gate reads in BF16, too; queries, keys and values in BF16.
    """
    norms = 2 * tiles(c.hidden_size) + tiles(c.kv_lora_rank) + tiles(c.q_lora_rank or 0)
    a_head = 3 * c.qk_nope_head_dim + 2 * c.qk_rope_head_dim + c.v_head_dim
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    gates = sum(c.is_moe(layer) for layer in range(layers))
    return layers * (norms + 2 * c.num_attention_heads * a_head) + gates * 2 * c.hidden_size


def saved_bytes_of_heads(c: ModelConfig, heads: int) -> float:
    """The bytes that so many heads save of each token: the input and the result of the norm, and the loss's sum.

    The second head is that of multi-token prediction, which also saves the pairs that its layer projects: the
    embeddings and the states, before and after a norm each. Logits are counted as working memory.
    """
    d = c.hidden_size
    return heads * (2 * d + 4 + 2 * d + 4) + (2 * (4 * d + 4) if heads > 1 else 0)


def working_bytes(c: ModelConfig, layout: Layout, heads: int) -> float:
    """The bytes that are in use besides what is saved, at most, on a rank with so many heads.

    When the backward pass begins, these are the logits of all heads and the gradient of one. In a layer with experts
    they are the rows of its experts (inputs in FP8, gate and up in BF16, both and their product in FP8, results in
    BF16), and the logits of the heads whose backward pass follows.
    """
    tokens, d, f = layout.micro_batch_tokens, c.hidden_size, c.moe_intermediate_size
    rows = tokens * c.num_experts_per_tok * (1 + layout.spare_rows)
    expert_bytes = rows * (2 * d + tiles(d) + 2 * 2 * f + 3 * f)
    if not heads:
        return expert_bytes
    logits = 2 * tokens * c.vocab_size
    return max((heads + 1) * logits, (heads - 1) * logits + expert_bytes)


def held_parameters(c: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> tuple[float, float, float]:
    """The parameters of a rank with these stages: of experts, others that are quantized, others that are not."""
    each = _parameters(c)
    routed = quantized = rest = 0.0
    for part in (part for stage in stages for part in stage.parts):
        dense = part.layers - part.mixtures
        routed += part.mixtures * each.experts / layout.ep
        quantized += part.layers * each.attention + dense * each.dense + part.mixtures * each.shared
        rest += part.layers * each.norms + part.mixtures * each.gate
        if part.heads:
            rest += c.hidden_size  # the last norm
        if part.heads > 1:  # multi-token prediction
            rest += each.prediction
    tables = any(p.has_embedding for s in stages for p in s.parts) + any(p.heads for s in stages for p in s.parts)
    return routed, quantized, rest + tables * each.table


def _rank_bytes(
    c: ModelConfig, layout: Layout, cluster: Cluster, stages: Sequence[Stage], held: int
) -> dict[str, float]:
    routed, quantized, rest = held_parameters(c, layout, stages)
    parameters, dp = routed + quantized + rest, layout.dp(cluster)
    everywhere, shared = MASTER_BYTES[layout.masters]
    sharded = routed / (dp // layout.ep) + (quantized + rest) / dp
    moments = MOMENT_BYTES * sharded
    if layout.optimizer == "muon":
        matrices = routed / (dp // layout.ep) + (quantized + held_projection(c, stages)) / dp
        moments -= (MOMENT_BYTES - MATRIX_MOMENT_BYTES) * matrices
    parts = [part for stage in stages for part in stage.parts]
    dense, mixture = (saved_bytes(c, layout, is_moe) for is_moe in (False, True))
    saved = [
        sum(
            part.mixtures * mixture + (part.layers - part.mixtures) * dense + saved_bytes_of_heads(c, part.heads)
            for part in stage.parts
        )
        for stage in stages
    ]
    activations = held * layout.micro_batch_tokens * sum(saved) / len(saved)  # as many in each of a rank's stages
    working = working_bytes(c, layout, sum(part.heads for part in parts))
    if layout.optimizer == "muon":
        working = max(working, update_bytes(c, stages, layout.ep, dp) - activations)
    return {
        "weights": everywhere * parameters,
        "FP8 weights": FP8_BYTES * (routed + quantized),
        "gradients": GRADIENT_BYTES * parameters,
        "moments": moments + shared * sharded,
        "activations": activations,
        "working": working,
    }


class _Parameters(NamedTuple):
    """Parameters of parts of a model.

    Attributes:
        attention, norms: those of every layer.
        gate, shared, experts: those of a layer with experts; `experts` counts all its routed ones.
        dense: those of a layer without experts, besides attention.
        table: those of the embedding or the head.
        prediction: those of multi-token prediction, besides its layer: the projection and its norms.
    """

    attention: float
    norms: float
    gate: float
    shared: float
    experts: float
    dense: float
    table: float
    prediction: float


@cache
def _parameters(c: ModelConfig) -> _Parameters:
    counts = count_parameters(c)
    main, layers, dense = counts.main, c.num_hidden_layers, c.first_k_dense_replace
    norms = (main["norms"] - c.hidden_size) / layers  # without the last one
    prediction = counts.mtp["MTP projection"] + counts.mtp["norms"] - norms if counts.mtp else 0
    gate, shared, experts = (
        main.get(kind, 0) / max(layers - dense, 1) for kind in ("gate", "shared experts", "routed experts")
    )
    dense_mlp = main.get("dense MLP", 0) / max(dense, 1)
    return _Parameters(
        main["attention projections"] / layers, norms, gate, shared, experts, dense_mlp, main["head"], prediction
    )
