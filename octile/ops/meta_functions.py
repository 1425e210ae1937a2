"""Operations of torch on the meta device, without torch's compiler.

torch computes shapes and dtypes of most operations by Python functions (`torch._refs`), which import its compiler when
they are first called: that takes one to six seconds. Here are the elementwise operations, and others that octile's
models have. Results are contiguous.
"""

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from math import ceil
from typing import Any

import torch
from torch import Tensor

BOOLEAN = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isfinite")


def meta_function(func: Any) -> Callable[..., Any] | None:
    """Return a function for an operation (`torch._ops.OpOverload`) of tensors on meta; None: there is none here."""
    found = FUNCTIONS.get(func)
    return partial(_elementwise, func) if found is None and torch.Tag.pointwise in func.tags else found


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    tensors = [t for t in args if isinstance(t, Tensor)]
    if func._schema.is_mutable:
        return tensors[0]
    numbers = [t for t in tensors if t.dtype != torch.bool] or tensors
    most = max(numbers, key=Tensor.dim)  # its dtype counts more than that of a scalar
    dtype = most.dtype
    others: list[Any] = [*numbers, *(a for a in args if isinstance(a, float))]
    for other in others:
        dtype = torch.promote_types(dtype, torch.result_type(most, other))
    if func.overloadpacket.__name__ in BOOLEAN:
        dtype = torch.bool
    return most.new_empty(_broadcast(*(t.shape for t in tensors)), dtype=dtype)


def _broadcast(*shapes: torch.Size) -> list[int]:
    """Broadcast shapes, as `torch.broadcast_shapes` does, which imports sympy."""
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return [0 if 0 in size else max(size) for size in sizes][::-1]


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return tensors[0].new_empty(shape)


def _arange(
    first: float, end: float | None = None, step: float = 1, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    start, end = (0, first) if end is None else (first, end)
    return torch.empty(ceil((end - start) / step), dtype=dtype or torch.int64, device="meta")


def _stacked(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    return tensors[0].new_empty(shape)


def _like(t: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    return t.new_empty(t.shape, dtype=dtype)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=dtype)


def _reduced(
    t: Tensor, dims: int | list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    each = [dims] if isinstance(dims, int) else dims or range(t.dim())
    reduced = {dim % t.dim() for dim in each}
    shape = [1 if i in reduced else n for i, n in enumerate(t.shape) if keepdim or i not in reduced]
    return t.new_empty(shape, dtype=dtype)


def _reduced_to_bool(t: Tensor, dims: int | list[int] | None = None, keepdim: bool = False) -> Tensor:
    return _reduced(t, dims, keepdim, dtype=torch.bool)


def _layer_norm(x: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[: x.dim() - len(shape)]
    return x.new_empty(x.shape), x.new_empty(*rows, 1), x.new_empty(*rows, 1)


def _layer_norm_backward(dy: Tensor, x: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(shape), x.new_empty(shape)


aten = torch.ops.aten
FUNCTIONS: dict[Any, Callable[..., Any]] = {  # of operations without torch's tag "pointwise"
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.cat.default: _joined,
    aten.stack.default: _stacked,
    aten.embedding.default: lambda weight, indices, *_: weight.new_empty(*indices.shape, weight.shape[1]),
    aten.empty_like.default: _like,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.embedding_dense_backward.default: lambda dy, indices, rows, *_: dy.new_empty(rows, dy.shape[-1]),
    aten.index.Tensor: lambda t, indices: t.new_empty(*indices[0].shape, *t.shape[1:]),  # by the first dimension
    aten.slice_backward.default: lambda dy, shape, *_: dy.new_empty(shape),
    aten.floor_divide.default: lambda t, _: t.new_empty(t.shape),
    aten.matmul.default: _product,
    aten.mm.default: _product,
    aten.mm.dtype: _product,
    aten.sum.default: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.mean.default: _reduced,
    aten.mean.dim: _reduced,
    aten.amax.default: _reduced,
    aten.any.default: _reduced_to_bool,
    aten.any.dim: _reduced_to_bool,
    aten.all.default: _reduced_to_bool,
    aten.all.dim: _reduced_to_bool,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.tril.default: _like,
    aten._softmax.default: _like,
    aten._log_softmax.default: _like,
    aten._log_softmax_backward_data.default: _like,
    aten._safe_softmax.default: _like,
    aten._softmax_backward_data.default: _like,
}
