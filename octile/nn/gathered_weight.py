"""A weight whose encoded values and scales were gathered from the ranks that hold its shards, as layers read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octile.formats import BLOCK
from octile.ops.transpose import transpose_encoded
from octile.scaled import ScaledTensor

_aten = torch.ops.aten


class GatheredWeight(Tensor):
    """A weight [..., N, K] in 128×128 blocks of FP8, with the shape and dtype of the parameter that it stands for.

    octile's layers read its `encoded` values and their scales; no layer quantizes it. Any other operation gets the
    dequantized values. Its gradient is an ordinary tensor of its dtype.

    Args:
        data, scale: the encoded values [..., N, K] and their scales [..., ⌈N/128⌉, ⌈K/128⌉].
        dtype: dtype of the values and of the gradient.

    Raises:
        TypeError: an operation would write to it.
    """

    encoded: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> GatheredWeight:
        """Make the tensor, which has no memory besides data and scale."""
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype):
        self.encoded, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["encoded", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["encoded"], inner["scale"], dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            return cls(first.encoded, first.scale, first.dtype)
        if func is _aten.as_strided.default and (tuple(args[1]), tuple(args[2])) == (first.shape, first.stride()):
            return cls(first.encoded, first.scale, first.dtype)
        if func._schema.is_mutable and isinstance(first, cls):
            raise TypeError(f"{func} would write to a weight that FSDP2 has gathered: write to its sharded parameter")
        args, kwargs = pytree.tree_map_only(cls, lambda w: gathered(w).dequantize(w.dtype), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({gathered(self)!r}, dtype={self.dtype})"


# Functions, because torch.compile does not trace a property of a tensor's subclass that returns a ScaledTensor.


def gathered(weight: GatheredWeight) -> ScaledTensor:
    """Return a gathered weight as fprop reads it."""
    return ScaledTensor(weight.encoded, weight.scale, BLOCK)


def gathered_transposed(weight: GatheredWeight, dy: Tensor) -> ScaledTensor:
    """Return a gathered weight as dgrad reads it, [..., K, N]: the same values, in a layout that its GEMM takes.

    Args:
        dy: a gradient of this backward pass; see `octile.ops.transpose.quantize_transposed`.
    """
    if not weight.encoded.is_cuda:
        return gathered(weight).mT
    return ScaledTensor(transpose_encoded(weight.encoded, dy), weight.scale.mT, BLOCK)
