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

from octile.nn.deferred_wgrad import parameters_of, run_or_defer
from octile.nn.fused.linear import wgrad
from octile.nn.fused.quantize import (
    QuantizedWeight,
    RecomputedJoinedWeight,
    RecomputedWeight,
    WeightForms,
    quantize_joined_weights,
    quantize_weight,
    recomputes_transposed,
    split_rows,
    why_not_join_weights,
)
from octile.nn.main_grad import MainGrads, main_grads_of
from octile.nn.observer import Backward, ObservedGemm, has_gemm_observers, report_backward, report_fprop
from octile.nn.weight_cache import can_cache
from octile.ops.groups import AlignedGroups
from octile.ops.operator import is_transformed
from octile.recipe import GemmFormats, Recipe
from octile.scaled import ScaledTensor

Values = Callable[[], Tensor]  # an operand in high precision, computed only for observers


class Settings(NamedTuple):
    """The arguments of a fused function that are no tensors.

    Attributes:
        recipe: recipe of its layers.
        dtype: dtype of its result.
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
    check_operands(*weights)
    w_format = recipe.formats.w
    needs_dgrad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return Settings(recipe, dtype, tuple(can_cache(w, w_format, needs_dgrad) for w in weights), needs_dgrad)


def is_dtensor(t: object) -> bool:
    """Whether t is a tensor that torch has distributed over a device mesh."""
    return hasattr(t, "device_mesh")


PLAIN = (Tensor, torch.nn.Parameter)


def torchao_type(t: object) -> str | None:
    """The name of t's class if torchao has quantized it, as its `quantize_` does to the weights of linear layers."""
    return type(t).__name__ if type(t).__module__.startswith("torchao.") else None


def check_operands(*tensors: Tensor) -> None:
    """Refuse DTensors, for which experts and fused layers have no sharding rules, and transforms of torch.func.

    Raises:
        TypeError: a tensor is a DTensor, or one that torchao has quantized.
        NotImplementedError: a transform of torch.func is active.
    """
    if is_transformed():
        raise NotImplementedError(
            "octile's quantized layers were called inside a transform of torch.func (vmap, grad, ...), and compute on "
            "plain tensors alone: give them a batch in the leading dimensions of x, and use backward()"
        )
    for t in tensors:
        if is_dtensor(t):
            raise TypeError(
                f"a weight or an input of shape {tuple(t.shape)} is a DTensor, but octile's experts and fused layers "
                "take local tensors: tensor parallelism is supported for octile.nn.Linear by ColwiseParallel and "
                "RowwiseParallel, and fully_shard must shard the block that holds the layers"
            )
        if type(t) not in PLAIN and not torch.compiler.is_compiling() and (name := torchao_type(t)) is not None:
            raise TypeError(
                f"a weight of shape {tuple(t.shape)} is torchao's {name}, but octile's layers quantize weights "
                "themselves: give torchao's quantize_ a filter_fn that leaves out octile.nn.Linear"
            )


class FusedLayers:
    """The layers of a fused function, from its forward pass to its backward pass.

    Layers that multiply one input are joined: their weights are quantized as one matrix, and each of fprop, dgrad and
    wgrad is one GEMM, whose results, and operands for observers, are split. Their dgrad so sums over the outputs of
    all of them in FP32. wgrad of experts is one GEMM a weight, so that each gradient is contiguous. The methods take
    the number of a GEMM; where nothing is joined, it is that of the layer.

    Args:
        weights: [N, K], or of experts [G, N, K].
        needs_grad: for each weight, whether it requires a gradient.
        shared: how many of the first weights multiply one input. They are joined unless their sizes or formats do not
            allow it, or they differ in dtype, in whether they need a gradient or in whether they may be cached.
    """

    def __init__(self, weights: Sequence[Tensor], needs_grad: Sequence[bool], s: Settings, shared: int = 1):
        self.settings, self.needs_grad = s, tuple(needs_grad)
        self.dtypes = [w.dtype for w in weights]
        self.main_grads = main_grads_of(weights)
        self.parameters = parameters_of(weights)
        self.observers: list[list[Backward]] = [[] for _ in weights]
        first = range(shared)
        alike = all((needs_grad[i], s.cache[i]) == (needs_grad[0], s.cache[0]) for i in first)
        joins = shared > 1 and alike and why_not_join_weights(weights[:shared], s.formats.w) is None
        self.gemms = [[i] for i in range(len(weights))]  # the layers of each GEMM
        if joins:
            self.gemms[:shared] = [list(first)]
        self.sizes = [w.shape[-2] for w in weights]
        self.cached: list[QuantizedWeight | None] = [None for _ in self.gemms]
        self.recomputes = False  # whether the backward pass quantizes the transposed weights
        self.unsaved: Sequence[Tensor] = ()  # weights that are saved for backward instead of their quantized forms

    def quantize(self, weights: Sequence[Tensor]) -> list[QuantizedWeight]:
        """Quantize the weights of each GEMM. Those that the cache holds are not saved for backward a second time."""
        s = self.settings
        caches = zip(weights, s.cache, strict=True)
        self.recomputes = recomputes = any(recomputes_transposed(s.recipe, w, cache) for w, cache in caches)
        quantized, needs_dgrad = [], s.needs_dgrad and not recomputes
        for layers in self.gemms:
            is_cached = s.cache[layers[0]]
            if len(layers) == 1:
                quantized.append(quantize_weight(weights[layers[0]], s.formats.w, None, is_cached, needs_dgrad))
            else:
                joined = [weights[i] for i in layers]
                quantized.append(quantize_joined_weights(joined, s.formats.w, is_cached, needs_dgrad))
        if recomputes:
            self.unsaved = weights
            return quantized
        pairs = zip(self.gemms, quantized, strict=True)
        self.cached = [w if s.cache[layers[0]] else None for layers, w in pairs]
        return quantized

    def recomputed(self, weights: Sequence[Tensor], dy: Tensor) -> list[WeightForms]:
        """Return the weights of each GEMM, which are quantized when they are read; see `load_saved`."""
        w_format = self.settings.formats.w
        return [
            RecomputedWeight(weights[layers[0]], w_format, dy)
            if len(layers) == 1
            else RecomputedJoinedWeight([weights[i] for i in layers], w_format, dy)
            for layers in self.gemms
        ]

    def report_fprop(
        self,
        gemm: int,
        weights: Sequence[Tensor],
        before: Values,
        x: ScaledTensor,
        w: WeightForms,
        offs: Tensor | None = None,
    ) -> None:
        """Report fprop of the layers of a GEMM to observers.

        Args:
            weights: all weights in high precision.
            before: computes x in high precision.
        """
        if has_gemm_observers():
            for i, part in self._parts(gemm, w.w):
                self.observers[i] = report_fprop(weights[i], ObservedGemm("fprop", before(), x, part, offs))

    def report_dgrad(
        self, gemm: int, before: Values, dy: ScaledTensor, w: WeightForms, offs: Tensor | None = None
    ) -> None:
        """Report dgrad of the layers of a GEMM to observers; before computes dy in high precision."""
        layers = self.gemms[gemm]
        if any(self.observers[i] for i in layers):
            values = before().split([self.sizes[i] for i in layers], dim=-1)
            parts = zip(values, self._parts(gemm, dy.mT), self._parts(gemm, w.w_t.mT), strict=True)
            for value, (i, dgrad_dy), (_, w_format) in parts:
                report_backward(self.observers[i], ObservedGemm("dgrad", value, dgrad_dy.mT, w_format.mT, offs))

    def wgrad(
        self, gemm: int, before: Values, dy: ScaledTensor, x: ScaledTensor, groups: AlignedGroups | None = None
    ) -> list[Tensor | None]:
        """Compute the gradients of the weights of a GEMM.

        None: where none is needed, where it was added to main_grad, and inside `defer_wgrads`.

        Args:
            before: computes dy in high precision.
            dy, x: as in `octile.nn.fused.linear.wgrad`.
        """
        layers = self.gemms[gemm]
        if not self.needs_grad[layers[0]]:
            return [None for _ in layers]
        tiles, offs = (None, None) if groups is None else groups
        sizes = [self.sizes[i] for i in layers]
        if any(self.observers[i] for i in layers):
            for value, (i, part) in zip(before().split(sizes, dim=-1), self._parts(gemm, dy.mT), strict=True):
                report_backward(self.observers[i], ObservedGemm("wgrad", value.mT, part, x.mT, offs, tiles))

        def compute(main_grads: MainGrads) -> list[Tensor | None]:
            if len(layers) > 1 and offs is None and all(main_grad is None for main_grad in main_grads):
                dw = wgrad(dy, x, offs, self.dtypes[layers[0]], None)
                assert dw is not None  # it has no main_grad
                return list(dw.split(sizes))
            parts = zip(self._parts(gemm, dy.mT), main_grads, strict=True)
            return [wgrad(part.mT, x, offs, self.dtypes[i], main_grad) for (i, part), main_grad in parts]

        parameters = self.parameters and [self.parameters[i] for i in layers]
        return list(run_or_defer(parameters, [self.main_grads[i] for i in layers], compute))

    def _parts(self, gemm: int, q: ScaledTensor) -> list[tuple[int, ScaledTensor]]:
        """Split the rows of an operand among the layers of a GEMM, with the number of each layer."""
        layers = self.gemms[gemm]
        if len(layers) == 1:
            return [(layers[0], q)]
        return list(zip(layers, split_rows(q, [self.sizes[i] for i in layers]), strict=True))


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
    """Return what `save_for_backward` saved: layers, the weights of each GEMM, trees; dy is a gradient to backward."""
    leaves = iter(ctx.saved_tensors)
    tree = {name: _unflatten(form, leaves) for name, form in ctx.tree.items()}
    layers, saved = ctx.layers, tree.pop("weights")
    if layers.recomputes:
        return layers, layers.recomputed(saved, dy), tree
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
