"""Gradient clipping: one long vector of all gradients is made no longer than `max_norm`, its direction kept."""

from collections.abc import Iterable

import torch
from torch import Tensor

from octile.optim.gradient import Gradient, gradients_of, multiply_
from octile.optim.storage import Scaled


@torch.no_grad()
def clip_grad_norm_(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients in place by min(1, max_norm / (norm + 1e-6)), like torch's function of this name.

    Differs from torch's in three things: it finds the gradient where it lies (`.grad`, `.main_grad` or in 8 bits), it
    computes in FP32 whatever the gradients' dtype, and a norm that is not finite leaves the gradients as they are, so
    that one can see which of them broke. That norm is returned like any other: the caller decides whether it skips the
    step or stops. The host is never made to wait for the device.

    Args:
        params: parameters of one device; those without a gradient count nothing.
        max_norm: above 0; infinity only measures.

    Returns:
        The norm before clipping, float32 []: NaN or Inf where a gradient is.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, not {max_norm}")
    gradients = gradients_of(params)
    if not gradients:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(_norms(gradients)))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    multiply_(gradients, torch.where(norm.isfinite(), factor, 1.0))
    return norm


def _norms(gradients: list[Gradient]) -> list[Tensor]:
    plain = [g for g in gradients if not isinstance(g, Scaled)]
    scaled = [torch.linalg.vector_norm(g.load()) for g in gradients if isinstance(g, Scaled)]
    return [*torch._foreach_norm(plain, 2, dtype=torch.float32), *scaled] if plain else scaled
