"""Cache of quantized weights: a weight is quantized once per step, until the optimizer writes it again.

A quantized weight may outlive a forward pass only where the next write to the weight will be noticed.  A parameter
counts its in-place writes (`_version`), but torch's fused optimizers write without counting (seen in 2.13), and so does
every write through `.data`: hand-written training loops, averages that are swapped in.  Therefore it is cached

    in training, for a weight that a `torch.optim.Optimizer` has stepped before: until its next step, so that all
    micro-batches, and fprop and dgrad of each, share it, or until its gradient is removed or written
    inside `frozen_weights(model)`: until its end
    in training, for a parameter with `requires_grad=False` whose layer passes a gradient on, as LoRA has them below its
        adapters: until it is written, until its layer moves within a model, or until the module around it
        merges its adapters into it or takes them out again (peft's `merge` and `unmerge`)

and quantized in each forward pass otherwise, also without gradients: somebody may have written through `.data`.

A training loop written by hand may write through `.data` what a torch optimizer has stepped before. The gradient
distinguishes it from micro-batches: these add to the gradient that the last backward pass left, while the loop removes
it, sets it to zero or replaces it. Autograd counts the writes to a gradient, so this takes no look at the weight, and
no wait for a GPU. A weight is quantized once a micro-batch where the gradient does not stay in `.grad` or `main_grad`
between them: a hook takes it away, `torch.autograd.grad` returns it, or it is clipped after each. Results are right
then, it costs time.

A write through `.data`, or to the memory as by numpy, is not noticed

    between two forward passes of one step without a backward pass between them
    where the gradient stays as the backward pass left it, or is written through `.grad.data`, before the next step
    after a backward pass under compiled autograd, before the next step
    of a parameter with `requires_grad=False`, in training

Autograd does not notice it either. Entering or leaving `frozen_weights` makes it seen. Parameters that FSDP2 gathers
are written without counting and freed after their layer, so none is cached for `requires_grad=False` while a module of
the process is sharded.

Nothing here refers to a parameter itself, not even weakly: `torch.utils.swap_tensors`, which `Module.to` may use,
refuses a tensor with weak references. What is known about a weight is stored by its memory (`torch.UntypedStorage`).

Under `torch.compile`, and while a CUDA graph is captured, quantization is part of the graph: each replay quantizes the
weight as it is then. `quantized_once_in_capture` has the micro-batches of one graph share the result.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping  # modules that FSDP2 shards
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from octile.nn.gathered_weight import GatheredWeight
from octile.recipe import OperandFormat

T = TypeVar("T")


class _Entry(NamedTuple):
    """Quantized weights, the key of the content that they were quantized from, and whether a step may change that."""

    key: Hashable
    quantized: Any
    requires_grad: bool


_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storage → {id of a parameter in it: its entry}
_stepped: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storages of parameters that a torch optimizer writes
_gradients: dict[int, Hashable] = {}  # id of a cached weight → its gradient after a backward pass, see `_gradient`
_checked_in: dict[int, int] = {}  # id of a cached weight → the last backward pass in `drop_written_weights`
_merging: set[type] = set()  # classes whose `merge` and `unmerge` drop what they write
_frozen = Counter[int]()  # id of a parameter → how many frozen_weights, which hold the parameter, it is inside
_NO_GRADIENT = (0, 0)
_in_capture = False  # whether quantized_once_in_capture is entered


class WeightRequest(NamedTuple):
    """What `quantized_weights` did not find: its arguments, without the function."""

    weights: tuple[Tensor, ...]
    operand_format: OperandFormat
    transposed: bool


_requests: list[WeightRequest] | None = None  # those of recorded_requests


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Promise that nobody writes the model's weights inside, so that they are quantized once and not in every call.

    For evaluation and generation; a training step needs no such promise. What was quantized before is not used inside,
    nor what was quantized inside after it.
    """
    weights = list(model.parameters())
    for weight in weights:
        if id(weight) not in _frozen:
            _drop(weight)  # of a training step: a write through `.data` since then was not counted
        _frozen[id(weight)] += 1
    try:
        yield
    finally:
        for weight in weights:
            _frozen[id(weight)] -= 1
            if not _frozen[id(weight)]:
                del _frozen[id(weight)]
                _drop(weight)


@contextmanager
def quantized_once_in_capture() -> Iterator[None]:
    """Promise that the CUDA graph which is captured inside writes no weight that requires a gradient before its end.

    Each of them is quantized once in the graph, at its first use. What was cached before is neither read, since its
    memory is not the graph's, nor lost.
    """
    global _cache, _in_capture
    outer, _cache, _in_capture = (_cache, _in_capture), WeakIdKeyDictionary(), True
    try:
        yield
    finally:
        _cache, _in_capture = outer


@contextmanager
def recorded_requests() -> Iterator[list[WeightRequest]]:
    """Record which weights are quantized inside to be cached."""
    global _requests
    outer, _requests = _requests, []
    try:
        yield _requests
    finally:
        _requests = outer


def quantized_weight(
    weight: Tensor,
    operand_format: OperandFormat,
    quantize: Callable[[Tensor, OperandFormat], T],
    transposed: bool = False,
) -> T:
    """Return quantize(weight, operand_format), or the cached result if the weight's memory was not written since.

    Args:
        transposed: whether the result of quantize contains the transposed weight, too. One result is cached: asked
            for the other kind, the weight is quantized again.
    """
    return quantized_weights(
        (weight,), operand_format, lambda weights, w_format: quantize(weights[0], w_format), transposed
    )


def quantized_weights(
    weights: Sequence[Tensor],
    operand_format: OperandFormat,
    quantize: Callable[[Sequence[Tensor], OperandFormat], T],
    transposed: bool = False,
) -> T:
    """Return quantize(weights, operand_format), or the cached result if the memory of none was written since.

    Args:
        weights: each of them can be cached. The result is cached under all, so what drops that of one drops it.
        transposed: as in `quantized_weight`.
    """
    caches = [_cache.setdefault(weight.untyped_storage(), {}) for weight in weights]
    requires_grad = any(weight.requires_grad for weight in weights)
    key = (operand_format, transposed, *(_content(weight) for weight in weights))
    found = [entries.get(id(weight)) for weight, entries in zip(weights, caches, strict=True)]
    entry = found[0]
    if entry is None or entry.key != key or any(other is not entry for other in found) or _is_gradient_new(weights):
        if _requests is not None:
            _requests.append(WeightRequest(tuple(weights), operand_format, transposed))
        with torch.inference_mode(False):  # a later training step may read it
            entry = _Entry(key, quantize([weight.detach() for weight in weights], operand_format), requires_grad)
        for weight, entries in zip(weights, caches, strict=True):
            entries[id(weight)] = entry
            if not _in_capture:  # what was cached before it stays, and what its gradient was
                _gradients[id(weight)] = None  # there was no backward pass
    return entry.quantized


def _content(weight: Tensor) -> Hashable:
    return weight.storage_offset(), weight._version, weight.dtype, weight.requires_grad


def _gradient(weight: Tensor) -> Hashable:
    """Return what changes when the gradient of a weight is replaced or written; _NO_GRADIENT if it has none."""
    gradient = getattr(weight, "main_grad", None)
    gradient = weight.grad if gradient is None else gradient
    if gradient is None and (scaled := getattr(weight, "scaled_grad", None)) is not None:
        gradient = scaled.data  # octile.optim stores it in FP8
    return _NO_GRADIENT if gradient is None or gradient.is_inference() else (id(gradient), gradient._version)


def _is_gradient_new(weights: Sequence[Tensor]) -> bool:
    """Whether the gradient of a weight is not as a backward pass left it; never inside a backward pass or a capture."""
    if _in_capture or torch._C._current_graph_task_id() >= 0:  # where a checkpoint runs a layer again
        return False
    return any(map(_has_new_gradient, weights))


def _has_new_gradient(weight: Tensor) -> bool:
    recorded = _gradients.get(id(weight))
    return recorded is not None and (recorded == _NO_GRADIENT or recorded != _gradient(weight))


def drop_written_weights(weights: Sequence[Tensor]) -> None:
    """Drop cached weights whose gradient is new when a backward pass begins to add to it: it will be recorded anew.

    That is checked where the pass first comes to a weight: its next use in the pass finds a `main_grad` that this one
    has written.
    """
    if torch.compiler.is_compiling() or _in_capture:
        return
    backward_pass = torch._C._current_graph_task_id()
    for weight in weights:
        if id(weight) in _gradients and _checked_in.get(id(weight)) != backward_pass:
            _checked_in[id(weight)] = backward_pass
            if _has_new_gradient(weight):
                _drop(weight)


def record_gradients(weights: Sequence[Tensor]) -> None:
    """Record the gradients of cached weights, as the backward pass that adds to them now leaves them."""
    if torch.compiler.is_compiling():  # compiled autograd, which may not queue, traces an eager layer's backward pass
        return
    for weight in weights:
        if id(weight) not in _gradients or _in_capture:  # where nobody asks for it
            continue
        if torch._C._current_graph_task_id() >= 0:  # autograd adds to `.grad` after the layer's backward pass
            _queue(functools.partial(_queue, functools.partial(_record_gradient, weight)))  # twice: after DDP's
        else:
            _record_gradient(weight)


def _queue(callback: Callable[[], None]) -> None:
    """Have autograd call a function when this backward pass ends, after those that are queued by then."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _record_gradient(weight: Tensor) -> None:
    _gradients[id(weight)] = _gradient(weight)


def can_cache(weight: Tensor, operand_format: OperandFormat, needs_dgrad: bool = False) -> bool:
    """Whether the quantized weight may outlive this forward pass; see the head of this file.

    Args:
        needs_dgrad: whether the layer's input gets a gradient.
    """
    if torch.compiler.is_compiling() or operand_format.amax == "delayed" or isinstance(weight, GatheredWeight):
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return _in_capture and weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
    if not weight.is_leaf or weight.is_inference():  # not a parameter, or one whose writes are not counted
        return False
    if id(weight) in _frozen:
        return True
    if not weight.requires_grad:
        return needs_dgrad and isinstance(weight, nn.Parameter) and not _module_state_mapping
    return torch.is_grad_enabled() and weight.untyped_storage() in _stepped


def _drop(weight: Tensor) -> None:
    storage = _storage(weight)
    if storage is not None and (entries := _cache.get(storage)) is not None:
        entries.pop(id(weight), None)


def _forget(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in stepped.values():
        if (storage := _storage(parameter)) is not None:
            _stepped[storage] = True
            _cache.pop(storage, None)  # of every parameter in it
    _gradients.clear()  # no entry of a weight with a gradient stays
    _checked_in.clear()
    for entries in list(_cache.values()):
        for weight, entry in list(entries.items()):
            if entry.requires_grad or weight in stepped:  # a wrapper may train another tensor in the weight's place
                del entries[weight]


def _storage(t: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None if it has none, as of sparse and lazy ones, which octile does not quantize."""
    try:
        return t.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def _forget_moved(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if torch.compiler.is_compiling() or module is None:  # transformers makes a list of some layers as it computes
        return
    kind = type(parent)  # a module that is being made may have no attributes yet
    if hasattr(kind, "merge") and hasattr(kind, "unmerge"):
        _drop_merged(kind)
    if _cache:
        for parameter in module.parameters(recurse=False):
            _drop(parameter)


def _drop_merged(kind: type[nn.Module]) -> None:
    """Have the methods by which peft's layers write adapters into a weight's `.data` drop the quantized weight."""
    if kind in _merging:
        return
    _merging.add(kind)
    for name in ("merge", "unmerge"):
        setattr(kind, name, _dropping(getattr(kind, name)))


def _dropping(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def write(layer: nn.Module, *args: Any, **kwargs: Any) -> T:
        try:
            return method(layer, *args, **kwargs)
        finally:
            for parameter in layer.parameters():
                _drop(parameter)

    return write


register_optimizer_step_post_hook(_forget)
register_module_module_registration_hook(_forget_moved)
