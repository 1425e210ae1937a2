"""Decision whether one autograd function replaces several layers of a module (fusion).

Half a transformer block is one function where the data flow of DeepSeek-V3 needs it: what lies between two GEMMs is
quantized as it is computed, and what is not saved for backward is recomputed (`docs/data_flow.md`).

What can be fused is decided once, after a recipe was applied: the layers must be exactly `octile.nn.Linear`, without
biases and with one recipe. Two questions are left to each forward pass: whether these layers are still the module's own
(somebody may have replaced one), and whether one of them has hooks. A layer with a hook is called, so that the hook is;
the module then runs its layers one after the other. (A bias that was added to a layer since has the same effect.) A
module of another library then runs its own forward pass where its activation was replaced or has hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octile.nn.fused.block_input import BlockInput, quantize_block_input
from octile.nn.linear import Linear, RecipeHolder, recipe_changes, was_batch_invariant
from octile.nn.norm import RMSNorm
from octile.recipe import GemmFormats, Recipe


class Activations(NamedTuple):
    """What the forward pass of another library's module may call besides its layers, when it was converted.

    Attributes:
        attributes: submodules and functions of the module, with their names.
        submodules: for each of them all its submodules, itself first; a function has none.
        methods: names of its class's methods, and of functions that are attributes of the class.
    """

    attributes: tuple[tuple[str, Any], ...]
    submodules: tuple[tuple[nn.Module, ...], ...]
    methods: tuple[str, ...]


class Fusion(NamedTuple):
    """The recipe by which layers are fused, and its formats."""

    recipe: Recipe
    formats: GemmFormats


class _Decision(NamedTuple):
    """What was decided, for which layers, and how many changes of recipes there had been by then."""

    fusion: Fusion | None
    layers: tuple[nn.Module | None, ...]
    recipe_changes: int


class FusableModule(nn.Module):
    """A module some of whose layers can run as one autograd function.

    A subclass names these layers in `fusable_layers`, and says in `decide_fusion` when they are fused.

    Attributes:
        fusable_layers: the names of the layers that the function takes the place of.
        reads_high_precision: whether a layer outside of the function reads the module's input in high precision.
    """

    fusable_layers: tuple[str, ...] = ()
    reads_high_precision = False
    _decision: _Decision | None = None

    def decide_fusion(self) -> Fusion | None:
        """Decide by the recipes and types of the layers whether they are fused, regardless of hooks."""
        raise NotImplementedError

    def fusion(self) -> Fusion | None:
        """Return how the layers are fused in this forward pass; None: they run one after the other."""
        layers = tuple([self._modules.get(name) for name in self.fusable_layers])
        if torch.compiler.is_compiling():  # decided once: while the graph is traced
            fusion = self.decide_fusion()
        else:
            decision, changes = self._decision, recipe_changes()
            if decision is None or decision.recipe_changes != changes or decision.layers != layers:
                self._decision = decision = _Decision(self.decide_fusion(), layers, changes)
            fusion = decision.fusion
        if fusion is None or has_hooks(*layers) or _has_bias(*layers):
            if not self.is_batch_invariant_unfused():
                check_not_batch_invariant(layers)
            return None
        return fusion

    def is_batch_invariant_unfused(self) -> bool:
        """Whether the layers have the bits of serving where they run one after the other, too."""
        return False

    def fused_input(self, x: Tensor | BlockInput) -> Tensor | BlockInput:
        """Return the module's input [..., K] as it reads it: quantized where its layers are fused, else as it is."""
        if isinstance(x, BlockInput):  # `pre_norm` has asked
            return x
        fusion = self.fusion()
        if fusion is None:
            return x
        return quantize_block_input(x, fusion.recipe, values=self.reads_high_precision)


def fuse_linear(*layers: nn.Module, can_fuse: Callable[[Recipe], bool]) -> Fusion | None:
    """Return the fusion of linear layers: all of them `octile.nn.Linear` without a bias, of one recipe that can."""
    first = layers[0]
    if not isinstance(first, Linear):
        return None
    recipe = first.recipe
    alike = (type(layer) is Linear and layer.bias is None and layer.recipe == recipe for layer in layers)
    if recipe.formats is None or not can_fuse(recipe) or not all(alike):
        return None
    return Fusion(recipe, recipe.formats)


def is_fusable_norm(norm: nn.Module) -> bool:
    """Whether a fused kernel computes this norm: exactly `octile.nn.RMSNorm`, without hooks."""
    return type(norm) is RMSNorm and not has_hooks(norm)


def has_hooks(*modules: nn.Module | None) -> bool:
    """Whether one of the modules has a forward or backward hook of its own, or, as from accelerate, another forward."""
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or is_forward_replaced(module)
        for module in modules
        if module is not None
    )


def is_forward_replaced(module: nn.Module) -> bool:
    """Whether another library, such as accelerate, has given this one module a forward pass of its own."""
    return "forward" in module.__dict__


def activations_of(module: nn.Module, layers: Iterable[str] = ()) -> Activations:
    """Return what a module of another library may call besides its layers."""
    attributes = [(name, child) for name, child in module._modules.items() if name not in layers]
    attributes += [(name, value) for name, value in vars(module).items() if callable(value)]
    methods = (name for name in own_names(type(module)) if callable(getattr(type(module), name)))
    return Activations(
        tuple(attributes),
        tuple(_submodules(value) for _, value in attributes),
        tuple(name for name in methods if name not in vars(module)),
    )


def own_names(cls: type[nn.Module]) -> list[str]:
    """Return the names that a module's class has besides those of `nn.Module`, sorted."""
    classes = cls.__mro__[: cls.__mro__.index(nn.Module)]
    names = {name for own in classes for name in vars(own) if not name.startswith("__")}
    return sorted(names - set(dir(nn.Module)))


def has_other_activation(module: nn.Module, activations: Activations | None) -> bool:
    """Whether one of a module's activations was replaced since `activations_of` returned them, or has hooks."""
    if activations is None:  # the module is octile's own
        return False
    if any(name in module.__dict__ for name in activations.methods):
        return True
    for (name, activation), submodules in zip(activations.attributes, activations.submodules, strict=True):
        if getattr(module, name, None) is not activation:
            return True
        if _submodules(activation) != submodules or has_hooks(*submodules):
            return True
    return False


def _submodules(activation: object) -> tuple[nn.Module, ...]:
    return tuple(activation.modules()) if isinstance(activation, nn.Module) else ()


def check_not_batch_invariant(layers: Iterable[nn.Module | None]) -> None:
    """Refuse to call layers one after the other that have a batch-invariant recipe, which needs them as one function.

    Raises:
        RuntimeError: one has such a recipe.
    """
    if not was_batch_invariant():
        return
    for layer in layers:
        recipe = layer.recipe if isinstance(layer, RecipeHolder) else None
        if recipe is not None and recipe.batch_invariant:
            raise RuntimeError(
                f"recipe {recipe.name!r} computes the layers of a block together, as serving does, but here "
                f"{type(layer).__name__} would be called alone, with other bits: a layer, their norm, or a module "
                "around them has a hook or a bias, was replaced or is wrapped"
            )


def _has_bias(*modules: nn.Module | None) -> bool:
    return any(module._parameters.get("bias") is not None for module in modules if module is not None)
