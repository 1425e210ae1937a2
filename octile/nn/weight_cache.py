"""Weights are quantised once a step: the result is kept until the optimizer writes the parameter again.

A copy may outlive a forward pass only where the next write will be noticed.  A parameter counts its in-place writes
(`_version`), but torch's fused optimizers write without counting (seen in 2.13), and so does all that goes through
`.data`: hand-written training loops, averages swapped in.  Therefore a copy is kept

    while training, of a weight that a `torch.optim.Optimizer` has stepped before: until its next step, so that every
    micro-batch, and fprop and dgrad of each, share it
    inside `frozen_weights(model)`: until its end

and is made anew for each forward pass otherwise.  What is not noticed is a write through `.data` between the forward
passes of one step; autograd does not notice it either.

Under `torch.compile`, and while a CUDA graph is captured, the cast is part of the graph: each replay casts the weight
as it is then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from octile.recipe import OperandFormat

T = TypeVar("T")

_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → (what it was made from, the quantised copy)
_stepped: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that a torch optimizer writes
_frozen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → how many frozen_weights it is inside


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Promises that nobody writes the model's weights inside, so that they are quantised once and not in every call.

    For evaluating and generating; a training step needs no such promise.
    """
    weights = list(model.parameters())
    for weight in weights:
        if weight not in _frozen:
            _kept.pop(weight, None)  # of a training step: a write through `.data` since then was not counted
        _frozen[weight] = _frozen.get(weight, 0) + 1
    try:
        yield
    finally:
        for weight in weights:
            _frozen[weight] -= 1
            if not _frozen[weight]:
                del _frozen[weight]
                _kept.pop(weight, None)


def quantized_weight(
    weight: Tensor, cast: OperandFormat, quantize: Callable[[Tensor, OperandFormat], T], turned: bool = False
) -> T:
    """quantize(weight, cast), kept; or what was kept, if it was made from the same memory and no write was counted.

    Args:
        turned: what quantize makes has the transposed weight beside it; the other form is another result.
    """
    memory = StorageWeakRef(weight.untyped_storage())  # an address alone may have been freed and given out again
    made_from = (memory, weight.storage_offset(), weight._version, weight.dtype, cast, turned)
    kept = _kept.get(weight)
    if kept is None or kept[0] != made_from:
        kept = made_from, quantize(weight.detach(), cast)
        _kept[weight] = kept
    return kept[1]


def may_be_kept(weight: Tensor, cast: OperandFormat) -> bool:
    """Whether a quantised copy may outlive this forward pass; see the head of this file."""
    if torch.compiler.is_compiling() or cast.amax == "delayed":
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    if not weight.is_leaf or weight.is_inference():  # not a parameter, or one whose writes are not counted
        return False
    return weight in _frozen or (weight in _stepped and torch.is_grad_enabled())


def _forget(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in held.values():
        _stepped[parameter] = True
    for weight in list(_kept):
        if weight.requires_grad or id(weight) in held:  # a wrapper may train another tensor in the weight's place
            del _kept[weight]


register_optimizer_step_post_hook(_forget)
