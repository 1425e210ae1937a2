"""Access to gradients, which are stored in one of three attributes of a parameter, and gradient clipping.

- `param.grad`, where autograd stores it, in the parameter's dtype;
- `param.main_grad`, a float32 buffer to which a layer adds its weight gradient, so that the gradients of many
  micro-batches of a BF16 parameter are summed in float32;
- `param.scaled_grad`, FP8 values with one scale, to which `store_scaled` moves each gradient when it is computed.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octile.ops.gradient_norms import gradient_norms
from octile.optim.storage import Scaled, shard

Gradient = Tensor | Scaled

_SCALED = "scaled_grad"


def gradient_of(param: Tensor) -> Gradient | None:
    """The gradient of a parameter, or None if it has none.

    Raises:
        RuntimeError: it has two. Each holds a part of the sum, so that using one would lose the other.
    """
    attributes = {name: getattr(param, name, None) for name in ("grad", "main_grad", _SCALED)}
    found = {name: gradient for name, gradient in attributes.items() if gradient is not None}
    if len(found) > 1:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} has its gradient in {' and '.join(found)}: needs one of them"
        )
    return next(iter(found.values()), None)


def gradients_of(params: Iterable[Tensor]) -> list[Gradient]:
    """The gradients of all parameters that have one."""
    return [gradient for param in params if (gradient := gradient_of(param)) is not None]


def load(gradient: Gradient) -> Tensor:
    """The gradient as a tensor: itself, or the values of a scaled one as a new float32 tensor."""
    return gradient.load() if isinstance(gradient, Scaled) else gradient


@torch.no_grad()
def multiply_(gradients: list[Gradient], factor: Tensor | float) -> None:
    """Multiply gradients in place by a factor; of a scaled gradient the scale, of a DTensor the part here."""
    tensors = [g.scale if isinstance(g, Scaled) else g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    if tensors:
        torch._foreach_mul_(tensors, factor)


def store_scaled(param: Tensor, dtype: torch.dtype) -> None:
    """Register a hook that moves every gradient of a parameter to `param.scaled_grad` when autograd has computed it.

    Full-size gradients then exist only for the layer whose backward pass is running. Sums over micro-batches are
    rounded to `dtype` after each micro-batch.
    """

    @torch.no_grad()
    def move(param: Tensor) -> None:
        if param.grad is None:  # another hook has moved it
            return
        total, scaled = param.grad.float(), getattr(param, _SCALED, None)
        if scaled is None:
            setattr(param, _SCALED, scaled := Scaled.zeros_like(param, dtype))
        else:
            total = total + scaled.load()
        scaled.store_(total)
        param.grad = None

    param.register_post_accumulate_grad_hook(move)


@contextmanager
def added_in_place(params: Iterable[Tensor]) -> Iterator[None]:
    """Context manager of a backward pass: layers add weight gradients to those of earlier micro-batches, in place.

    `.grad` is their `main_grad`, so that a GEMM adds to what it stores, and the sum of one micro-batch is not stored
    alone. Parameters without a float32 gradient, as all in the first micro-batch, are left out, and so are those with
    hooks of gradients, which would not be called.
    """
    changed = [p for p in params if _adds_in_place(p)]
    for param in changed:
        param.main_grad = param.grad  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param in changed:
            del param.main_grad  # type: ignore[attr-defined]


def _adds_in_place(param: Tensor) -> bool:
    has_hooks = param._backward_hooks or param._post_accumulate_grad_hooks
    is_plain = type(param.grad) is Tensor and param.grad.dtype == torch.float32 and param.grad.is_contiguous()
    return is_plain and not has_hooks and getattr(param, "main_grad", None) is None


def reset(param: Tensor) -> None:
    """Delete `scaled_grad` and zero a `main_grad` buffer; `.grad` is left as it is."""
    if getattr(param, _SCALED, None) is not None:
        setattr(param, _SCALED, None)
    if (main_grad := getattr(param, "main_grad", None)) is not None:
        main_grad.zero_()


@torch.no_grad()
def clip_grad_norm_(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place by min(1, max_norm / (norm + 1e-6)), like torch's function of this name.

    It differs from torch's function in three ways. It reads gradients from `.grad`, `.main_grad` or `.scaled_grad`. It
    computes in FP32, whatever the gradients' dtype. If the norm is not finite, it leaves the gradients unchanged, so
    that the non-finite ones can be found; the caller decides whether to skip the step or to stop. The host does not
    wait for the device.

    DTensors, as parameters are under FSDP2 and tensor parallelism, count as whole tensors, and all ranks of their mesh
    get the same norm. The squares of the norms of the shards are summed over the ranks, in FP64, and each rank scales
    its own shards. All these ranks must call the function, with the same parameters in the same order. The norm is a
    plain tensor, not a DTensor as torch's. Parameters of other ranks, as of a pipeline's other stages, do not count.

    Args:
        params: parameters of one device, DTensors or not; those without a gradient are ignored.
        max_norm: above 0; with infinity the norm is only computed.

    Returns:
        The norm before clipping, float32 []; NaN or Inf if a gradient is not finite.

    Raises:
        ValueError: max_norm is not above 0.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    norm = gradient_norm(params).norm
    multiply_(gradients_of(params), clip_factor(norm, max_norm))
    return norm


class GradientNorm(NamedTuple):
    """The norm of all gradients of a model, and where one of them is not finite.

    Attributes:
        norm: float32 []; NaN or Inf if a gradient is not finite, and Inf if the squares exceed FP32's range.
        last_non_finite: the index of the last parameter whose gradient has a NaN or an Inf, int64 []; -1 if none has.
    """

    norm: Tensor
    last_non_finite: Tensor


@torch.no_grad()
def gradient_norm(params: Sequence[Tensor]) -> GradientNorm:
    """Compute the norm that `clip_grad_norm_` returns, and find what is not finite, in one pass over the gradients.

    The host does not wait for the device. An Inf or NaN in a scaled gradient makes its scale NaN. Of DTensors each rank
    gets both of the whole tensors.

    Args:
        params: parameters of one device; the norm of those without a gradient is 0.

    Returns:
        Both on the parameters' device; on the CPU if there are none.
    """
    if not params:
        return GradientNorm(torch.zeros(()), torch.tensor(-1))
    norms_N = norms_of(params)
    index_N = torch.arange(len(params), device=norms_N.device)
    return GradientNorm(torch.linalg.vector_norm(norms_N), torch.where(norms_N.isnan(), index_N, -1).amax())


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which `clip_grad_norm_` scales the gradients, float32 [].

    With `AdamW.step(gradient_scale=…)` the gradients are clipped without being written.

    Args:
        norm: their norm, float32 [].
        max_norm: above 0.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, not {max_norm}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, 1.0)


def norms_of(params: Sequence[Tensor]) -> Tensor:
    """The norm of each parameter's gradient, float32 [N]: NaN if, and only if, an element is not finite.

    Those of DTensors are summed over the ranks of their meshes.
    """
    found = [gradient_of(p) for p in params]
    nothing = torch.empty(0, device=params[0].device)  # whose norm is 0
    norms_N = gradient_norms([shard(g) if isinstance(g, Tensor) else nothing for g in found])
    for i, g in enumerate(found):
        if isinstance(g, Scaled):
            norms_N[i] = torch.linalg.vector_norm(g.load())
    return _sum_over_shards(norms_N, [_sharded_dims(p if g is None else g) for p, g in zip(params, found, strict=True)])


ShardedDims = tuple[Any, tuple[int, ...]]
"""A DeviceMesh, and those of its dimensions whose ranks hold different shards of a tensor."""


def _sharded_dims(tensor: Any) -> ShardedDims | None:
    """Where the shards of a DTensor are, or None if each rank has all of a tensor."""
    divided = [not (p.is_replicate() or p.is_partial()) for p in getattr(tensor, "placements", ())]
    dims = tuple(i for i, is_divided in enumerate(divided) if is_divided)  # not `is_shard`: false for strided shards
    return (tensor.device_mesh, dims) if dims else None


def _sum_over_shards(norms_N: Tensor, dims_N: list[ShardedDims | None]) -> Tensor:
    """Make norms of shards those of the whole tensors: one all-reduce for all tensors that are sharded alike.

    The squares of FP32 norms neither overflow nor vanish in FP64.
    """
    kinds = dict.fromkeys(sharded for sharded in dims_N if sharded)
    if not kinds:
        return norms_N
    norms = list(norms_N.unbind())  # not indexed by lists, for whose copy to a GPU the host would wait
    for mesh, dims in kinds:
        alike = [i for i, other in enumerate(dims_N) if other == (mesh, dims)]
        squares = torch.stack([norms[i] for i in alike]).double().square()
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        for i, norm in zip(alike, squares.sqrt().float().unbind(), strict=True):
            norms[i] = norm
    return torch.stack(norms)
