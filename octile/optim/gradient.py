"""Access to gradients, which are stored in one of three attributes of a parameter, and gradient clipping.

- `param.grad`, where autograd stores it, in the parameter's dtype;
- `param.main_grad`, a float32 buffer to which a layer adds its weight gradient, so that the gradients of many
  micro-batches of a BF16 parameter are summed in float32;
- `param.scaled_grad`, FP8 values with one scale, to which `store_scaled` moves each gradient when it is computed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from octile.ops.gradient_norms import gradient_norms
from octile.optim.storage import Scaled

Gradient = Tensor | Scaled

_SCALED = "scaled_grad"


def gradient_of(param: Tensor) -> Gradient | None:
    """The gradient of a parameter, or None if it has none.

    Raises:
        RuntimeError: it has two. Each holds a part of the sum, so that using one would lose the other.
    """
    places = {name: getattr(param, name, None) for name in ("grad", "main_grad", _SCALED)}
    found = {name: gradient for name, gradient in places.items() if gradient is not None}
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
    """Multiply gradients in place by a factor; of a scaled gradient only the scale changes."""
    tensors = [g.scale if isinstance(g, Scaled) else g for g in gradients]
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

    Args:
        params: parameters of one device; those without a gradient are ignored.
        max_norm: above 0; with infinity the norm is only computed.

    Returns:
        The norm before clipping, float32 []; NaN or Inf if a gradient is not finite.

    Raises:
        ValueError: max_norm is not above 0.
    """
    gradients = gradients_of(params)
    norm = _norm(gradients)
    multiply_(gradients, clip_factor(norm, max_norm))
    return norm


@torch.no_grad()
def gradient_norm(params: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients that `clip_grad_norm_` returns, float32 []; the host does not wait for the device.

    Args:
        params: parameters of one device; those without a gradient are ignored.
    """
    return _norm(gradients_of(params))


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


@torch.no_grad()
def last_non_finite(params: Iterable[Tensor]) -> Tensor:
    """The index of the last parameter whose gradient has a NaN or an Inf, int64 [] on its device; -1 if none has.

    The host does not wait for the device. An Inf or NaN in a scaled gradient makes its scale NaN.

    Args:
        params: parameters of one device, at least one.
    """
    params = list(params)
    largest = [torch.zeros((), device=p.device) for p in params]
    found = {i: g for i, p in enumerate(params) if (g := gradient_of(p)) is not None}
    unscaled = {i: g for i, g in found.items() if not isinstance(g, Scaled) and g.numel()}
    maxima = torch._foreach_norm(list(unscaled.values()), torch.inf) if unscaled else ()
    for i, amax in zip(unscaled, maxima, strict=True):
        largest[i] = amax.float()
    for i, g in found.items():
        if isinstance(g, Scaled):
            largest[i] = g.scale
    index_N = torch.arange(len(params), device=params[0].device)
    return torch.where(torch.stack(largest).isfinite(), -1, index_N).amax()


def _norm(gradients: list[Gradient]) -> Tensor:
    """The norm of all gradients together, float32 []; 0 on the CPU if there are none."""
    return torch.linalg.vector_norm(_norms(gradients)) if gradients else torch.zeros(())


def _norms(gradients: list[Gradient]) -> Tensor:
    """The norm of each gradient, float32 [N], those of scaled ones last."""
    unscaled = [g for g in gradients if not isinstance(g, Scaled)]
    scaled = [torch.linalg.vector_norm(g.load()) for g in gradients if isinstance(g, Scaled)]
    return torch.cat([*([gradient_norms(unscaled)] if unscaled else []), *(norm[None] for norm in scaled)])
