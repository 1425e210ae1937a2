"""The layers of a model that octile has converted, by name, and choosing among them by pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, cast

from torch import Tensor, nn

from octile.recipe import Recipe


class HasRecipe(Protocol):
    """`octile.nn.Linear` or `Experts`: what multiplies as its recipe says."""

    recipe: Recipe | None


@dataclass(frozen=True)
class LayerWeights:
    """The weights of converted layers.

    Attributes:
        weights: the name of a layer (its weight's, without ".weight") → its weight [N, K], or of experts [G, N, K].
        modules: the same name → the module that holds the recipe. Experts hold two weights under one recipe.
    """

    weights: Mapping[str, Tensor]
    modules: Mapping[str, HasRecipe]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", {id(weight): name for name, weight in self.weights.items()})

    def name_of(self, weight: Tensor) -> str | None:
        """The layer's name, also where the product takes a scaled copy of its weight (Smooth-SwiGLU)."""
        names: dict[int, str] = self.__dict__["_names"]
        node = weight.grad_fn
        while node is not None and id(weight) not in names:
            node = node.next_functions[0][0] if node.next_functions else None
            weight = getattr(node, "variable", weight)
        return names.get(id(weight))


def layer_weights(model: nn.Module, layers: str = "*") -> LayerWeights:
    """The converted layers whose names match one of the patterns.

    Args:
        model: as `octile.convert` or a training run left it.
        layers: patterns as of file names, separated by commas: "*", "model.layers.0.*,*.experts.down".

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
                full = f"{path}.{name}".removesuffix(".weight").strip(".") or "weight"
                weights[full], modules[full] = parameter, cast(HasRecipe, module)
    if not weights:
        raise ValueError("model has no layer with a recipe: octile.convert gives it some")
    chosen = matching(tuple(weights), layers)
    return LayerWeights({name: weights[name] for name in chosen}, {name: modules[name] for name in chosen})


def matching(names: tuple[str, ...], layers: str) -> list[str]:
    """The names that match one of the patterns, in their order.

    Raises:
        ValueError: a pattern matches none.
    """
    patterns = [pattern.strip() for pattern in layers.split(",")]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no layer matches {pattern!r}; there are {_some(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
