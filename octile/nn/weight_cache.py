"""Cache of quantized weights: a weight is quantized once per step, until the optimizer writes it again.

A quantized weight may outlive a forward pass only where the next write to the weight will be noticed.  A parameter
counts its in-place writes (`_version`), but torch's fused optimizers write without counting (seen in 2.13), and so does
every write through `.data`: hand-written training loops, averages that are swapped in.  Therefore it is cached

    in training, for a weight that a `torch.optim.Optimizer` has stepped before: until its next step, so that all
    micro-batches, and fprop and dgrad of each, share it
    inside `frozen_weights(model)`: until its end

and quantized in each forward pass otherwise.  A write through `.data` between the forward passes of one step is not
noticed; autograd does not notice it either.

Under `torch.compile`, and while a CUDA graph is captured, quantization is part of the graph: each replay quantizes the
weight as it is then.
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

_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → (the key of its content, the quantized weight)
_stepped: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that a torch optimizer writes
_frozen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → how many frozen_weights it is inside


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Promise that nobody writes the model's weights inside, so that they are quantized once and not in every call.

    For evaluation and generation; a training step needs no such promise.
    """
    weights = list(model.parameters())
    for weight in weights:
        if weight not in _frozen:
            _cache.pop(weight, None)  # of a training step: a write through `.data` since then was not counted
        _frozen[weight] = _frozen.get(weight, 0) + 1
    try:
        yield
    finally:
        for weight in weights:
            _frozen[weight] -= 1
            if not _frozen[weight]:
                del _frozen[weight]
                _cache.pop(weight, None)


def quantized_weight(
    weight: Tensor,
    operand_format: OperandFormat,
    quantize: Callable[[Tensor, OperandFormat], T],
    transposed: bool = False,
) -> T:
    """Return quantize(weight, operand_format), or the cached result if the weight's memory was not written since.

    Args:
        transposed: whether the result of quantize contains the transposed weight, too; it is cached separately.
    """
    memory = StorageWeakRef(weight.untyped_storage())  # an address alone may have been freed and reused
    key = (memory, weight.storage_offset(), weight._version, weight.dtype, operand_format, transposed)
    cached = _cache.get(weight)
    if cached is None or cached[0] != key:
        cached = key, quantize(weight.detach(), operand_format)
        _cache[weight] = cached
    return cached[1]


def can_cache(weight: Tensor, operand_format: OperandFormat) -> bool:
    """Whether the quantized weight may outlive this forward pass; see the head of this file."""
    if torch.compiler.is_compiling() or operand_format.amax == "delayed":
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    if not weight.is_leaf or weight.is_inference():  # not a parameter, or one whose writes are not counted
        return False
    return weight in _frozen or (weight in _stepped and torch.is_grad_enabled())


def _forget(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in stepped.values():
        _stepped[parameter] = True
    for weight in list(_cache):
        if weight.requires_grad or id(weight) in stepped:  # a wrapper may train another tensor in the weight's place
            del _cache[weight]


register_optimizer_step_post_hook(_forget)
