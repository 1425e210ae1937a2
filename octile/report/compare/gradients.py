"""Comparison of a recipe's gradients with BF16's: the angle and the ratio of norms for each weight and each layer.

Both gradients are computed at the same weights and on the same batch: those of the recipe's run at some step. Gradients
of two separate runs would differ mainly because the runs have drifted apart, not because of FP8.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of one parameter compared with BF16's: cosine of the angle between them, and both norms.

    The cosine is NaN if a gradient is zero or not finite.
    """

    name: str
    cosine: float
    norm: float
    bf16_norm: float

    @property
    def degrees(self) -> float:
        """The angle between both gradients."""
        return _degrees(self.cosine)

    @property
    def norm_ratio(self) -> float:
        """The recipe's norm over BF16's."""
        return self.norm / self.bf16_norm if self.bf16_norm else math.nan


@dataclass(frozen=True)
class GradientCheck:
    """The gradients of all parameters at one step of a recipe's run, before the update of that step."""

    recipe: str
    seed: int
    step: int
    weights: tuple[WeightGradient, ...]

    def by_layer(self) -> tuple[WeightGradient, ...]:
        """The gradient of each layer as one vector, in the model's order: embedding, 0, 1, …, norm, head."""
        layers: dict[str, list[WeightGradient]] = {}
        for weight in self.weights:
            layers.setdefault(layer_of(weight.name), []).append(weight)
        return tuple(_joined(layer, weights) for layer, weights in layers.items())

    def whole(self) -> WeightGradient:
        """The gradient of all parameters as one vector."""
        return _joined("model", self.weights)


def layer_of(parameter: str) -> str:
    """The layer of a parameter: model.layers.3.mlp.gate.weight → "3"; otherwise embedding, norm or head."""
    if found := re.search(r"layers\.(\d+)\.", parameter):
        return found[1]
    return {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm", "lm_head.weight": "head"}.get(
        parameter, parameter
    )


def _joined(name: str, parts: list[WeightGradient] | tuple[WeightGradient, ...]) -> WeightGradient:
    """Join parts of a vector: squared norms and dot products add up. A part with a zero gradient adds nothing."""
    dot = sum(part.cosine * part.norm * part.bf16_norm for part in parts if part.norm != 0 and part.bf16_norm != 0)
    norm, bf16_norm = (math.hypot(*lengths) for lengths in zip(*((p.norm, p.bf16_norm) for p in parts), strict=True))
    cosine = dot / (norm * bf16_norm) if norm and bf16_norm else math.nan
    return WeightGradient(name, cosine, norm, bf16_norm)


def _degrees(cosine: float) -> float:
    return math.nan if math.isnan(cosine) else math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
