"""How far a recipe's gradient points away from BF16's: an angle and a ratio of norms for each weight and each layer.

Both gradients are taken at the same weights and on the same batch: the recipe's own, at some step of its run. Two
runs that once differed by a rounding drift apart, and the gradients of one beside those of the other would show where
each model stands, not what 8 bits do to a gradient.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightGradient:
    """Of one parameter: the cosine of the angle between both gradients, and the norm of each.

    The cosine is NaN where a gradient is zero or not finite.
    """

    name: str
    cosine: float
    norm: float
    bf16_norm: float

    @property
    def degrees(self) -> float:
        return _degrees(self.cosine)

    @property
    def norm_ratio(self) -> float:
        return self.norm / self.bf16_norm if self.bf16_norm else math.nan


@dataclass(frozen=True)
class GradientCheck:
    """All of a model's parameters at one step of a recipe's run, before that step's update."""

    recipe: str
    seed: int
    step: int
    weights: tuple[WeightGradient, ...]

    def by_layer(self) -> tuple[WeightGradient, ...]:
        """The gradients of each layer as one long vector, in the model's order: embedding, 0, 1, …, norm, head."""
        layers: dict[str, list[WeightGradient]] = {}
        for weight in self.weights:
            layers.setdefault(layer_of(weight.name), []).append(weight)
        return tuple(_joined(layer, weights) for layer, weights in layers.items())

    def whole(self) -> WeightGradient:
        """The gradient of all parameters as one vector."""
        return _joined("model", self.weights)


def layer_of(parameter: str) -> str:
    """model.layers.3.mlp.gate.weight → "3"; what belongs to no layer is called embedding, norm or head."""
    if found := re.search(r"layers\.(\d+)\.", parameter):
        return found[1]
    return {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm", "lm_head.weight": "head"}.get(
        parameter, parameter
    )


def _joined(name: str, parts: list[WeightGradient] | tuple[WeightGradient, ...]) -> WeightGradient:
    """Lengths add as squares, and |a| |b| cos adds up; a part with a gradient of zero adds nothing to either."""
    dot = sum(part.cosine * part.norm * part.bf16_norm for part in parts if part.norm != 0 and part.bf16_norm != 0)
    norm, bf16_norm = (math.hypot(*lengths) for lengths in zip(*((p.norm, p.bf16_norm) for p in parts), strict=True))
    cosine = dot / (norm * bf16_norm) if norm and bf16_norm else math.nan
    return WeightGradient(name, cosine, norm, bf16_norm)


def _degrees(cosine: float) -> float:
    return math.nan if math.isnan(cosine) else math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
