"""The parameters of the parts of a model, and of a rank's stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from octile.models.config import ModelConfig
from octile.models.counts import count_parameters
from octile.plan.layout import Layout
from octile.plan.stages import Stage


def held_parameters(c: ModelConfig, layout: Layout, stages: Sequence[Stage]) -> tuple[float, float, float]:
    """The parameters of a rank with these stages: of experts, others that are quantized, others that are not."""
    each = parameters_of_parts(c)
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


class Parameters(NamedTuple):
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
def parameters_of_parts(c: ModelConfig) -> Parameters:
    """Count the parameters of the parts of a model."""
    counts = count_parameters(c)
    main, layers, dense = counts.main, c.num_hidden_layers, c.first_k_dense_replace
    norms = (main["norms"] - c.hidden_size) / layers  # without the last one
    prediction = counts.mtp["MTP projection"] + counts.mtp["norms"] - norms if counts.mtp else 0
    gate, shared, experts = (
        main.get(kind, 0) / max(layers - dense, 1) for kind in ("gate", "shared experts", "routed experts")
    )
    dense_mlp = main.get("dense MLP", 0) / max(dense, 1)
    return Parameters(
        main["attention projections"] / layers, norms, gate, shared, experts, dense_mlp, main["head"], prediction
    )
