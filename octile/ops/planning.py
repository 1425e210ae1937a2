"""Planning of the kernels of a model: its passes on the meta device, where operators plan launches for a GPU.

`planned_kernels` is a context for forward and backward passes of a model whose parameters and inputs are on meta. The
modules take the paths of a GPU, under autocast; each operator calls its CUDA kernel's launcher, and returns the result
of its fake.

torch computes the shapes of many operations on meta in Python, by functions that import its compiler, in seconds. This
context computes those of elementwise operations, and of others that octile's models have, itself.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from itertools import zip_longest
from math import ceil
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from octile.kernels.backends import ONLY_TORCH
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.gemm.num_sms import assume_chip
from octile.kernels.planning import PlannedKernel, record, recorded_kernels
from octile.ops.operator import OPERATORS, Operator

IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
BOOLEAN = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isfinite")


@contextmanager
def planned_kernels(gpu: Chip, compute: torch.dtype) -> Iterator[Mapping[Hashable, PlannedKernel]]:
    """A context that records the kernels which passes on the meta device would launch on a Hopper GPU, by their keys.

    Call `torch.autograd.backward` in it, not `Tensor.backward`. Nothing is launched, and other threads may launch
    kernels meanwhile.

    Args:
        gpu: the GPU.
        compute: the dtype of autocast.
    """
    with (
        recorded_kernels() as kernels, assume_chip(gpu), _triton_recorded(gpu), _without_compiler(),
        _GpuPaths(compute), _Launchers(),
    ):  # fmt: skip
        yield kernels


@contextmanager
def _triton_recorded(gpu: Chip) -> Iterator[None]:
    try:
        from octile.kernels.triton.device import DeviceProperties, assume_device
        from octile.kernels.triton.planning import recorded_launches
    except ImportError:  # a machine without a GPU has no Triton
        yield
        return
    from octile.kernels.hopper import SHARED_BYTES

    with assume_device(DeviceProperties(gpu.whole.multiprocessors, SHARED_BYTES, fp8=True)), recorded_launches(record):
        yield


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Refuse to import torch's compiler in this thread: an operation that needs it ends the plan."""

    class Refusal(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "torch._dynamo" and get_ident() == planning:
                raise ImportError("a plan does not wait for torch's compiler")

    planning, refusal = get_ident(), Refusal()
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)


class _GpuPaths(TorchFunctionMode):
    """Have modules take the paths of a GPU, and compute what autocast computes in its dtype."""

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == IS_CUDA:
            return True
        if func is F.linear:
            args = tuple(t.to(self.compute) if isinstance(t, Tensor) else t for t in args)
        result = func(*args, **(kwargs or {}))
        return result.to(self.compute) if func is F.embedding else result  # as the model itself does


class _Launchers(TorchDispatchMode):
    """Call the launchers of octile's operators, and compute shapes without torch's compiler."""

    def __init__(self) -> None:
        super().__init__()
        self._planned: set[Hashable] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or a call would import torch's compiler, to leave it out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (operator := OPERATORS.get(func)) is not None:
            self._plan(operator, args)
            if operator.fake is not None:
                with self:  # the fake's own operations
                    return operator.fake(*args, **kwargs)
        elif (result := SHAPES.get(func)) is not None:
            return result(*args, **kwargs)
        elif torch.Tag.pointwise in func.tags:
            return _elementwise(func, args)
        return func(*args, **kwargs)

    def _plan(self, operator: Operator, args: tuple[Any, ...]) -> None:
        launch, key = operator.kernels.get("cuda"), (operator.name, *map(_described, args))
        if launch is None or operator.name in ONLY_TORCH or key in self._planned:
            return
        self._planned.add(key)
        with suppress(Exception), self:  # NotLaunched; and what cannot be planned is compiled when it is launched
            launch(*args)


def _described(argument: Any) -> Hashable:
    """What a plan depends on."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return tuple(map(_described, argument)) if isinstance(argument, list | tuple) else argument


def _elementwise(func: Any, args: tuple[Any, ...]) -> Tensor:
    tensors = [t for t in args if isinstance(t, Tensor)]
    if func._schema.is_mutable:
        return tensors[0]
    dtype = tensors[0].dtype
    for other in args[1:]:
        if isinstance(other, Tensor | float):
            dtype = torch.promote_types(dtype, torch.result_type(tensors[0], other))
    if func.overloadpacket.__name__ in BOOLEAN:
        dtype = torch.bool
    return tensors[0].new_empty(_broadcast(*(t.shape for t in tensors)), dtype=dtype)


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


aten = torch.ops.aten
SHAPES: dict[Any, Callable[..., Tensor]] = {  # operations without torch's tag, and their results
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.cat.default: _joined,
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
    aten.amax.default: _reduced,
    aten.any.default: _reduced_to_bool,
    aten.any.dim: _reduced_to_bool,
    aten.all.default: _reduced_to_bool,
    aten.all.dim: _reduced_to_bool,
    aten.tril.default: _like,
    aten._safe_softmax.default: _like,
    aten._softmax_backward_data.default: _like,
}
