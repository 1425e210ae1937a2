"""Weights are quantised once a step: the result is kept until the optimizer writes the parameter again.

A parameter counts its in-place writes (`_version`), so every micro-batch of a step, and fprop and dgrad of each, share
one quantised copy.  torch's fused optimizers write without counting (seen in 2.13), so every step of any
`torch.optim.Optimizer` empties the cache besides, but for frozen weights that it does not hold.  Other writes that go
around the counter (`p.data.add_(…)` in a training loop) go around the cache as well: use `with torch.no_grad():
p.add_(…)`.

Under `torch.compile`, and while a CUDA graph is captured, the cast is part of the graph: each replay casts the weight
as it is then.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from octile.recipe import Cast
from octile.scaled import ScaledTensor

_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → (what it was made from, the quantised copy)


def quantized_weight(weight: Tensor, cast: Cast, quantize: Callable[[Tensor, Cast], ScaledTensor]) -> ScaledTensor:
    """quantize(weight, cast), from the cache where the parameter has not changed since."""
    if not is_cached(weight, cast):
        return quantize(weight.detach(), cast)
    memory = StorageWeakRef(weight.untyped_storage())  # an address alone may have been freed and given out again
    made_from = (memory, weight.storage_offset(), weight._version, weight.dtype, cast)
    kept = _kept.get(weight)
    if kept is None or kept[0] != made_from:
        kept = made_from, quantize(weight.detach(), cast)
        _kept[weight] = kept
    return kept[1]


def is_cached(weight: Tensor, cast: Cast) -> bool:
    """Whether the quantised copy is kept: of parameters, whose writes are counted, by scales that are their own."""
    if torch.compiler.is_compiling() or cast.amax == "delayed":
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    return weight.is_leaf and not weight.is_inference()


def _forget(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for weight in list(_kept):
        if weight.requires_grad or id(weight) in held:  # a wrapper may train another tensor in the weight's place
            del _kept[weight]


register_optimizer_step_post_hook(_forget)
