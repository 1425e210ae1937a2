"""Find the converted layers of a model by name pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, cast

from torch import Tensor, nn

from octile.recipe import Recipe


class HasRecipe(Protocol):
    """A module whose GEMMs follow a recipe: `octile.nn.Linear` or `Experts`."""

    recipe: Recipe | None


@dataclass(frozen=True)
class LayerWeights:
    """The weights of converted layers.

    Attributes:
        weights: layer name (the name of its weight without ".weight") → weight, [N, K] or for experts [G, N, K].
        modules: layer name → the module that holds the recipe. Experts hold two weights under one recipe.
    """

    weights: Mapping[str, Tensor]
    modules: Mapping[str, HasRecipe]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", {id(weight): name for name, weight in self.weights.items()})

    @property
    def unobserved(self) -> list[str]:
        """The layers of which observers see no GEMM: under a batch-invariant recipe attention absorbs `kv_b_proj`."""
        invariant = [name for name, owner in self.modules.items() if owner.recipe and owner.recipe.batch_invariant]
        return [name for name in invariant if name.rpartition(".")[2] == "kv_b_proj"]

    def name_of(self, weight: Tensor) -> str | None:
        """Return the layer's name, also for a scaled copy of its weight (Smooth-SwiGLU); None if it is unknown."""
        names: dict[int, str] = self.__dict__["_names"]
        node = weight.grad_fn
        while node is not None and id(weight) not in names:
            node = node.next_functions[0][0] if node.next_functions else None
            weight = getattr(node, "variable", weight)
        return names.get(id(weight))


def layer_weights(model: nn.Module, layers: str = "*") -> LayerWeights:
    """Return the converted layers whose names match one of the patterns.

    Args:
        model: a model that `octile.convert` has converted.
        layers: patterns in the syntax of file names, separated by commas: "*", "model.layers.0.*,*.experts.down".

    Raises:
        ValueError: the model has no converted layer, or a pattern matches none.
    """
    weights: dict[str, Tensor] = {}
    modules: dict[str, HasRecipe] = {}
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "recipe", None), Recipe):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                layer = f"{path}.{name}".removesuffix(".weight").strip(".") or "weight"
                weights[layer], modules[layer] = parameter, cast(HasRecipe, module)
    if not weights:
        raise ValueError("model has no layer with a recipe: convert it with octile.convert")
    chosen = match_layers(tuple(weights), layers)
    return LayerWeights({name: weights[name] for name in chosen}, {name: modules[name] for name in chosen})


def observed_weights(model: nn.Module, layers: str = "*") -> LayerWeights:
    """Return the layers of `layer_weights` of which observers see the GEMMs.

    Raises:
        ValueError: as `layer_weights`, or they see none of them.
    """
    found = layer_weights(model, layers)
    unobserved = found.unobserved
    if len(unobserved) == len(found.weights):
        raise ValueError(f"layers must match other layers than {why_unobserved(unobserved)}")
    weights = {name: weight for name, weight in found.weights.items() if name not in unobserved}
    return LayerWeights(weights, {name: found.modules[name] for name in weights})


def why_unobserved(names: Sequence[str]) -> str:
    """Name layers of which no GEMM is observed, and say why."""
    which = "it" if len(names) == 1 else "them"
    return f"{_shown(names)}: a batch-invariant recipe absorbs {which} into attention, so that no GEMM is observed"


def match_layers(names: tuple[str, ...], layers: str) -> list[str]:
    """Return the names that match one of the patterns, in their order.

    Raises:
        ValueError: a pattern matches none.
    """
    patterns = [pattern.strip() for pattern in layers.split(",")]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no layer matches {pattern!r}; there are {_shown(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
