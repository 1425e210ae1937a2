"""Where a parameter's gradient lies: one of three places, and whoever reads gradients asks here.

- `param.grad`, where autograd leaves it, in the parameter's dtype;
- `param.main_grad`, a float32 buffer that a layer adds to itself, so that a BF16 parameter loses nothing when the
  gradients of many micro-batches are summed;
- `param.scaled_grad`, 8-bit numbers with one scale, into which `keep_scaled` moves each gradient as soon as it is made.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from octile.optim.storage import Scaled

Gradient = Tensor | Scaled

_SCALED = "scaled_grad"


def gradient_of(param: Tensor) -> Gradient | None:
    """The gradient of a parameter, or None where it has none.

    Raises:
        RuntimeError: it has two. Each holds a part of the sum, and using one would lose the other.
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
    """The gradient as a tensor: itself, or a new float32 one."""
    return gradient.load() if isinstance(gradient, Scaled) else gradient


@torch.no_grad()
def multiply_(gradients: list[Gradient], factor: Tensor | float) -> None:
    """Multiplies gradients in place by a factor. Of a scaled one only the scale changes."""
    tensors = [g.scale if isinstance(g, Scaled) else g for g in gradients]
    if tensors:
        torch._foreach_mul_(tensors, factor)


def keep_scaled(param: Tensor, dtype: torch.dtype) -> None:
    """From now on, every gradient of this parameter goes to `param.scaled_grad` once autograd has made it.

    At no time are there more full-size gradients than the backward pass just works on. Sums over micro-batches are
    rounded to `dtype` after each.
    """

    @torch.no_grad()
    def keep(param: Tensor) -> None:
        if param.grad is None:  # another hook took it
            return
        total, kept = param.grad.float(), getattr(param, _SCALED, None)
        if kept is None:
            setattr(param, _SCALED, kept := Scaled.zeros_like(param, dtype))
        else:
            total = total + kept.load()
        kept.store_(total)
        param.grad = None

    param.register_post_accumulate_grad_hook(keep)


def reset(param: Tensor) -> None:
    """Forgets what lies outside `.grad`; a main_grad buffer stays and becomes zero."""
    if getattr(param, _SCALED, None) is not None:
        setattr(param, _SCALED, None)
    if (main_grad := getattr(param, "main_grad", None)) is not None:
        main_grad.zero_()
