"""A layer's own loss under activation checkpointing.

A checkpoint runs a layer twice, the second time in the backward pass.  What the second run leaves behind is for the
checkpointed function alone, which may add it itself; after the backward pass the layer has what it had before.

With `use_reentrant=True` the first run has no gradients.  A model adds the loss that it leaves behind, which has no
graph; the loss of the second run has a graph, and nobody adds it.  So the first run leaves a leaf.  Autograd computes
its gradient before the second run, since backward begins with the model's loss, and the second run passes this gradient
on to its own loss.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_leaves: WeakIdKeyDictionary = WeakIdKeyDictionary()  # losses of first runs that someone still holds → id of the layer
_restored: dict[tuple[int, str], int] = {}  # id of a layer and an attribute → the backward pass whose end restores it


def leave_behind(layer: object, attribute: str, loss: Tensor, activation: Tensor) -> Tensor:
    """Set an attribute of a layer to its loss, linked to the other run of a checkpoint if there is one.

    Args:
        layer: the layer, in training.
        attribute: its name.
        loss: a scalar.
        activation: what the layer's output depends on differentiably.

    Returns:
        the activation to compute with.

    Raises:
        RuntimeError: it is a second run, and there were several first runs before it whose losses are still held.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        setattr(layer, attribute, loss)
        return activation
    if not torch.is_grad_enabled():
        leaf = loss.detach().requires_grad_()
        _leaves[leaf] = id(layer)
        setattr(layer, attribute, leaf)
        return activation
    if torch._C._current_graph_task_id() < 0:  # not in a backward pass
        setattr(layer, attribute, loss)
        return activation
    # what a checkpoint returned is no leaf any more: autograd passes its gradient on
    leaves = [leaf for leaf, owner in list(_leaves.items()) if owner == id(layer) and leaf.is_leaf]
    if len(leaves) > 1:
        raise RuntimeError(
            f"{type(layer).__name__} ran {len(leaves)} times under reentrant checkpointing before the backward pass, "
            "so the gradients of its balance losses cannot be distinguished: use checkpoint(…, use_reentrant=False)"
        )
    _restore_after_backward(layer, attribute)
    setattr(layer, attribute, loss)
    return _PassOn.apply(activation, loss, leaves[0]) if leaves else activation


def pop_loss(layer: object, attribute: str, weight: Tensor) -> Tensor | float:
    """Return a layer's loss and forget it; 0 if there is none.

    Args:
        layer, attribute: as in `leave_behind`.
        weight: one on which the loss depends.

    Raises:
        RuntimeError: the loss has no gradient although the weight has, because compiled code ran without gradients. A
            reentrant checkpoint runs it so, and compiled code leaves no leaf behind.
    """
    loss = getattr(layer, attribute)
    setattr(layer, attribute, None)
    if loss is None:
        return 0.0
    lost = weight.requires_grad and not (loss.requires_grad or loss.is_inference())
    if lost and torch.is_grad_enabled():
        raise RuntimeError(
            f"{attribute} of a compiled {type(layer).__name__} was computed without gradients and would train nothing: "
            "if the layer is checkpointed, use checkpoint(…, use_reentrant=False)"
        )
    return loss


def _restore_after_backward(layer: object, attribute: str) -> None:
    """Give an attribute its present value again when the backward pass that runs now has ended."""
    key, before = (id(layer), attribute), getattr(layer, attribute)
    backward = torch._C._current_graph_task_id()
    if _restored.get(key) == backward:  # not another one, which raised and never ended
        return

    def restore() -> None:
        _restored.pop(key, None)
        setattr(layer, attribute, before)

    _restored[key] = backward
    torch.autograd.Variable._execution_engine.queue_callback(restore)


class _PassOn(torch.autograd.Function):
    """Return the activation; backward gives the loss the gradient that the leaf of the first run has."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gradient, ctx.leaf.grad = ctx.leaf.grad, None
        _leaves.pop(ctx.leaf, None)
        return dy, gradient, None
