"""A weight whose encoded values and scales were gathered from the ranks that hold its shards, as layers read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octile.formats import BLOCK
from octile.kernels.memory_layout import new_transposed
from octile.scaled import ScaledTensor

_aten = torch.ops.aten


class GatheredWeight(Tensor):
    """A weight [..., N, K] in 128×128 blocks of FP8, with the shape and dtype of the parameter that it stands for.

    octile's layers read `quantized` and `transposed`; no layer quantizes it. Any other operation gets the dequantized
    values. Its gradient is an ordinary tensor of its dtype.

    Args:
        data, scale: the encoded values [..., N, K] and their scales [..., ⌈N/128⌉, ⌈K/128⌉].
        dtype: of the values and of the gradient.

    Raises:
        TypeError: an operation would write to it.
    """

    _data: Tensor
    _scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> GatheredWeight:
        """Make the tensor, which has no memory besides data and scale."""
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype):
        self._data, self._scale = data, scale

    @property
    def quantized(self) -> ScaledTensor:
        """The weight as fprop reads it."""
        return ScaledTensor(self._data, self._scale, BLOCK)

    @property
    def transposed(self) -> ScaledTensor:
        """The weight [..., K, N] as dgrad reads it: the same encoded values, in a layout that its GEMM takes."""
        if not self._data.is_cuda:
            return self.quantized.mT
        return ScaledTensor(transposed_layout(self._data), self._scale.mT, BLOCK)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_data", "_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["_data"], inner["_scale"], dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            return cls(first._data, first._scale, first.dtype)
        if func is _aten.as_strided.default and (tuple(args[1]), tuple(args[2])) == (first.shape, first.stride()):
            return cls(first._data, first._scale, first.dtype)
        if func._schema.is_mutable and isinstance(first, cls):
            raise TypeError(f"{func} would write to a weight that FSDP2 has gathered: write to its sharded parameter")
        args, kwargs = pytree.tree_map_only(cls, lambda w: w.quantized.dequantize(w.dtype), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self.quantized!r}, dtype={self.dtype})"


def transposed_layout(data: Tensor) -> Tensor:
    """Copy encoded values [..., N, K] transposed, as dgrad's GEMM reads them on a GPU."""
    return new_transposed(data, data.dtype).copy_(data.mT)
