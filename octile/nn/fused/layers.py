"""What the functions share that hold several layers: their weights, and whether such a function may take their place.

Blocks are fused where DeepSeek-V3's data flow needs it: what lies between two products is cast as it is made, and what
is not kept is made again. The layers stay modules with parameters of their own, for checkpoints, converters and
optimizers; a function reads their weights. A layer that somebody else wants to see called, by a hook, or has replaced
is called, and its block computes the same in single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octile.nn.fused.linear import wgrad
from octile.nn.fused.quantize import Weight, quantize_weight
from octile.nn.linear import Linear
from octile.nn.norm import RMSNorm
from octile.nn.observer import Backward, ObservedGemm, is_observed, report, report_fprop
from octile.nn.weight_cache import may_be_kept
from octile.recipe import Recipe
from octile.scaled import ScaledTensor

Values = Callable[[], Tensor]  # made only where somebody looks on
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def common_recipe(*layers: nn.Module) -> Recipe | None:
    """The recipe of linear layers that a function may take the place of, or None."""
    first = layers[0]
    if not isinstance(first, Linear):
        return None
    alike = (type(layer) is Linear and layer.recipe == first.recipe and layer.bias is None for layer in layers)
    return first.recipe if all(alike) and unobserved(*layers) else None


def fusable_norm(norm: nn.Module | None) -> bool:
    """Whether a function may take the norm's place; where there is none it may."""
    return norm is None or (type(norm) is RMSNorm and unobserved(norm))


def unobserved(*modules: nn.Module) -> bool:
    """Whether nobody wants to see these modules called."""
    return not any(getattr(module, hooks) for module in modules for hooks in HOOKS)


class Settings(NamedTuple):
    """What a fused function is told besides its tensors.

    Attributes:
        recipe: of its layers.
        dtype: of its result.
        keep: for each weight, whether its cast may outlive the forward pass.
        turned: dgrad will be made, so weights are cast for it, too.
    """

    recipe: Recipe
    dtype: torch.dtype
    keep: tuple[bool, ...]
    turned: bool


def settings(recipe: Recipe, dtype: torch.dtype, weights: Sequence[Tensor], *inputs: Tensor) -> Settings:
    """To be called outside of the function: inside, gradients are always off."""
    assert recipe.formats is not None
    how = recipe.formats.w
    turned = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return Settings(recipe, dtype, tuple(may_be_kept(w, how) for w in weights), turned)


class FusedLayers:
    """What a fused function knows of its weights, from the forward pass to the backward pass.

    Args:
        weights: [N, K], or of experts [G, N, K].
        need_gradient: which of them do.
    """

    def __init__(self, weights: Sequence[Tensor], need_gradient: Sequence[bool], s: Settings):
        self.settings, self.need_gradient = s, tuple(need_gradient)
        self.dtypes = [w.dtype for w in weights]
        self.main_grads = [getattr(w, "main_grad", None) for w in weights]
        self.seen: list[list[Backward]] = [[] for _ in weights]
        self.cached: list[Weight | None] = [None for _ in weights]

    def cast(self, weights: Sequence[Tensor]) -> list[Weight]:
        """The weights in 8 bits; those that live on in the cache are not kept a second time."""
        s = self.settings
        assert s.recipe.formats is not None
        how = s.recipe.formats.w
        found = [quantize_weight(w, how, None, keep, s.turned) for w, keep in zip(weights, s.keep, strict=True)]
        self.cached = [w if keep else None for w, keep in zip(found, s.keep, strict=True)]
        return found

    def show_fprop(
        self, i: int, weight: Tensor, before: Values, x: ScaledTensor, w: Weight, offs: Tensor | None = None
    ) -> None:
        """Shows the product of layer i, weight before its cast; the function may give what x was before its own."""
        if is_observed():
            self.seen[i] = report_fprop(weight, ObservedGemm("fprop", before(), x, w.w, offs))

    def show_dgrad(self, i: int, before: Values, dy: ScaledTensor, w: Weight, offs: Tensor | None = None) -> None:
        if self.seen[i]:
            report(self.seen[i], ObservedGemm("dgrad", before(), dy, w.w_t, offs))

    def wgrad(
        self, i: int, before: Values, dy: ScaledTensor, x: ScaledTensor, offs: Tensor | None = None
    ) -> Tensor | None:
        """The gradient of weight i, or None where it needs none or was added to its main_grad."""
        if not self.need_gradient[i]:
            return None
        if self.seen[i]:
            report(self.seen[i], ObservedGemm("wgrad", before().mT, dy.mT, x.mT, offs))
        return wgrad(dy, x, offs, self.dtypes[i], self.main_grads[i])


def save(ctx: Any, layers: FusedLayers, weights: Sequence[Weight], **tree: Any) -> None:
    """Saves tensors, tensors in tiles and None by name, and the weights that nobody else keeps."""
    tree["weights"] = [w if kept is None else None for w, kept in zip(weights, layers.cached, strict=True)]
    leaves: list[Tensor | None] = []
    ctx.tree = {name: _apart(part, leaves) for name, part in tree.items()}
    ctx.layers = layers
    ctx.save_for_backward(*leaves)


def saved(ctx: Any) -> tuple[FusedLayers, list[Weight], dict[str, Any]]:
    """What `save` was given."""
    leaves = iter(ctx.saved_tensors)
    tree = {name: _together(form, leaves) for name, form in ctx.tree.items()}
    weights = [kept or own for kept, own in zip(ctx.layers.cached, tree.pop("weights"), strict=True)]
    return ctx.layers, weights, tree


# torch's own pytree does this for any classes, and takes 110 µs of the host for what takes 20 here


def _apart(tree: Any, leaves: list[Tensor | None]) -> Any:
    """Adds the tree's tensors to the leaves, None for None; returns what `_together` makes the tree of."""
    if tree is None or isinstance(tree, Tensor):
        leaves.append(tree)
        return None
    if isinstance(tree, ScaledTensor):
        leaves += [tree.data, tree.scale]
        return ScaledTensor, tree.block
    return type(tree), [_apart(part, leaves) for part in tree]


def _together(form: Any, leaves: Iterator[Tensor]) -> Any:
    if form is None:
        return next(leaves)
    kind, parts = form
    if kind is ScaledTensor:
        return ScaledTensor(next(leaves), next(leaves), parts)
    made = [_together(part, leaves) for part in parts]
    return kind(made) if kind in (tuple, list) else kind(*made)
