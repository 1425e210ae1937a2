"""What the fused functions share: the weights of their layers from forward to backward, and how they save tensors.

The layers stay modules with parameters of their own, for checkpoints, converters and optimizers; a fused function reads
their weights. When it may take their place is decided in `octile.nn.fused.fusion`.

Shapes: T tokens, K inputs, N outputs, G experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.nn.fused.linear import wgrad
from octile.nn.fused.quantize import (
    QuantizedWeight,
    RecomputedWeight,
    WeightForms,
    quantize_weight,
    recomputes_transposed,
)
from octile.nn.observer import Backward, ObservedGemm, has_gemm_observers, report_backward, report_fprop
from octile.nn.weight_cache import can_cache
from octile.ops.groups import AlignedGroups
from octile.recipe import GemmFormats, Recipe
from octile.scaled import ScaledTensor

Values = Callable[[], Tensor]  # an operand in high precision, computed only for observers


class Settings(NamedTuple):
    """The arguments of a fused function that are no tensors.

    Attributes:
        recipe: of its layers.
        dtype: of its result.
        cache: for each weight, whether its quantized form may be cached beyond the forward pass.
        needs_dgrad: whether dgrad will run, so that weights are quantized for it, too.
    """

    recipe: Recipe
    dtype: torch.dtype
    cache: tuple[bool, ...]
    needs_dgrad: bool

    @property
    def formats(self) -> GemmFormats:
        """The formats of the recipe, which has some: a recipe without them fuses nothing."""
        assert self.recipe.formats is not None
        return self.recipe.formats


def settings(recipe: Recipe, dtype: torch.dtype, weights: Sequence[Tensor], *inputs: Tensor) -> Settings:
    """Make the settings outside of the autograd function, inside of which gradients are always disabled."""
    assert recipe.formats is not None
    check_local(*weights)
    of_w = recipe.formats.w
    needs_dgrad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return Settings(recipe, dtype, tuple(can_cache(w, of_w, needs_dgrad) for w in weights), needs_dgrad)


def check_local(*tensors: Tensor) -> None:
    """Refuse DTensors: octile's operators have no sharding rules.

    Raises:
        TypeError: a tensor is a DTensor.
    """
    for t in tensors:
        if hasattr(t, "device_mesh"):
            raise TypeError(
                f"a weight or an input of shape {tuple(t.shape)} is a DTensor, but octile's layers take local tensors: "
                "tensor parallelism is not supported, and fully_shard must shard the block that holds the layers"
            )


class FusedLayers:
    """The layers of a fused function, from its forward pass to its backward pass.

    Args:
        weights: [N, K], or of experts [G, N, K].
        needs_grad: for each weight, whether it requires a gradient.
    """

    def __init__(self, weights: Sequence[Tensor], needs_grad: Sequence[bool], s: Settings):
        self.settings, self.needs_grad = s, tuple(needs_grad)
        self.dtypes = [w.dtype for w in weights]
        self.main_grads = [getattr(w, "main_grad", None) for w in weights]
        self.observers: list[list[Backward]] = [[] for _ in weights]
        self.cached: list[QuantizedWeight | None] = [None for _ in weights]
        self.recomputes = False  # whether the backward pass quantizes the transposed weights
        self.unsaved: Sequence[Tensor] = ()  # weights that are saved for backward instead of their quantized forms

    def quantize(self, weights: Sequence[Tensor]) -> list[QuantizedWeight]:
        """Quantize the weights. Those that the weight cache holds are not saved for backward a second time."""
        s = self.settings
        caches = zip(weights, s.cache, strict=True)
        self.recomputes = recomputes = any(recomputes_transposed(s.recipe, w, cache) for w, cache in caches)
        quantized = [
            quantize_weight(w, s.formats.w, None, cache, s.needs_dgrad and not recomputes)
            for w, cache in zip(weights, s.cache, strict=True)
        ]
        if recomputes:
            self.unsaved = weights
            return quantized
        self.cached = [w if cache else None for w, cache in zip(quantized, s.cache, strict=True)]
        return quantized

    def report_fprop(
        self, i: int, weight: Tensor, before: Values, x: ScaledTensor, w: WeightForms, offs: Tensor | None = None
    ) -> None:
        """Report fprop of layer i to observers.

        Args:
            weight: the weight in high precision.
            before: computes x in high precision.
        """
        if has_gemm_observers():
            self.observers[i] = report_fprop(weight, ObservedGemm("fprop", before(), x, w.w, offs))

    def report_dgrad(
        self,
        i: int,
        before: Values,
        dy: ScaledTensor,
        w: WeightForms,
        offs: Tensor | None = None,
    ) -> None:
        """Report dgrad of layer i to observers; before computes dy in high precision."""
        if self.observers[i]:
            report_backward(self.observers[i], ObservedGemm("dgrad", before(), dy, w.w_t, offs))

    def wgrad(
        self, i: int, before: Values, dy: ScaledTensor, x: ScaledTensor, groups: AlignedGroups | None = None
    ) -> Tensor | None:
        """Compute the gradient of weight i, or None where it requires none or was added to its main_grad."""
        if not self.needs_grad[i]:
            return None
        tiles, offs = (None, None) if groups is None else groups
        if self.observers[i]:
            report_backward(self.observers[i], ObservedGemm("wgrad", before().mT, dy.mT, x.mT, offs, tiles))
        return wgrad(dy, x, offs, self.dtypes[i], self.main_grads[i])


def save_for_backward(ctx: Any, layers: FusedLayers, weights: Sequence[QuantizedWeight], **tree: Any) -> None:
    """Save the layers, those quantized weights that no cache holds, and named trees of tensors.

    Where the recipe recomputes the transposed weights, the weights themselves are saved, which takes no memory.

    Args:
        tree: tensors, `ScaledTensor`s, None, and tuples, lists or named tuples of them.
    """
    unsaved, layers.unsaved = layers.unsaved, ()
    to_save = [w if cached is None else None for w, cached in zip(weights, layers.cached, strict=True)]
    tree["weights"] = list(unsaved) or to_save
    leaves: list[Tensor | None] = []
    ctx.tree = {name: _flatten(part, leaves) for name, part in tree.items()}
    ctx.layers = layers
    ctx.save_for_backward(*leaves)


def load_saved(ctx: Any, dy: Tensor) -> tuple[FusedLayers, Sequence[WeightForms], dict[str, Any]]:
    """Return what `save_for_backward` saved: layers, quantized weights, trees by name; dy is a gradient to backward."""
    leaves = iter(ctx.saved_tensors)
    tree = {name: _unflatten(form, leaves) for name, form in ctx.tree.items()}
    layers, saved = ctx.layers, tree.pop("weights")
    if layers.recomputes:
        return layers, [RecomputedWeight(weight, layers.settings.formats.w, dy) for weight in saved], tree
    return layers, [cached or own for cached, own in zip(layers.cached, saved, strict=True)], tree


# torch's own pytree supports any class, and takes 110 µs of host time for what takes 20 µs here


def _flatten(tree: Any, leaves: list[Tensor | None]) -> Any:
    """Append the tensors of a tree, None for None, to leaves; return the form from which `_unflatten` rebuilds it."""
    if tree is None or isinstance(tree, Tensor):
        leaves.append(tree)
        return None
    if isinstance(tree, ScaledTensor):
        leaves += [tree.data, tree.scale]
        return ScaledTensor, tree.block
    return type(tree), [_flatten(part, leaves) for part in tree]


def _unflatten(form: Any, leaves: Iterator[Tensor]) -> Any:
    if form is None:
        return next(leaves)
    kind, parts = form
    if kind is ScaledTensor:
        return ScaledTensor(next(leaves), next(leaves), parts)
    made = [_unflatten(part, leaves) for part in parts]
    return kind(made) if kind in (tuple, list) else kind(*made)
