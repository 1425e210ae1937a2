"""A layer's own loss under activation checkpointing with `use_reentrant=True`.

Such a checkpoint runs a layer twice: first without gradients, and again in the backward pass.  A model adds the loss
that the first run leaves behind, which has no graph; the loss of the second run has a graph, and nobody adds it.  So
the first run leaves a leaf.  Autograd computes its gradient before the second run, since backward begins with the
model's loss, and the second run passes this gradient on to its own loss.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_leaves: WeakIdKeyDictionary = WeakIdKeyDictionary()  # losses of first runs that someone still holds → id of the layer


def link_runs(layer: object, loss: Tensor, activation: Tensor) -> tuple[Tensor | None, Tensor]:
    """Link a loss that a layer leaves behind in training to the other run of a checkpoint, if there is one.

    Args:
        layer: which loss it is.
        loss: a scalar.
        activation: what the layer's output depends on differentiably.

    Returns:
        the loss to leave behind, None in a second run, and the activation to compute with.

    Raises:
        RuntimeError: it is a second run, and there were several first runs before it whose losses are still held.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return loss, activation
    if not torch.is_grad_enabled():
        leaf = loss.detach().requires_grad_()
        _leaves[leaf] = id(layer)
        return leaf, activation
    if torch._C._current_graph_task_id() < 0:  # not in a backward pass
        return loss, activation
    leaves = [leaf for leaf, owner in list(_leaves.items()) if owner == id(layer)]
    if len(leaves) > 1:
        raise RuntimeError(
            f"{type(layer).__name__} ran {len(leaves)} times under reentrant checkpointing before the backward pass, "
            "so the gradients of its balance losses cannot be distinguished: use checkpoint(…, use_reentrant=False)"
        )
    return None, _PassOn.apply(activation, loss, leaves[0]) if leaves else activation


class _PassOn(torch.autograd.Function):
    """Return the activation; backward gives the loss the gradient that the leaf of the first run has."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gradient, ctx.leaf.grad = ctx.leaf.grad, None
        return dy, gradient, None
