"""Double backward: a clear error where a function has no second derivative.

The backward pass of a fused function quantizes, or calls operators that have no gradient, so autograd cannot
differentiate it.  Without an error its first derivative would count as a constant in a second backward pass, and a
gradient penalty or a Hessian would silently lose that part.  `torch.autograd.function.once_differentiable` raises only
if the incoming gradient itself requires a gradient, which that of a plain loss does not.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = Tensor | None | tuple[Tensor | None, ...]


def first_derivative_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate the backward of a `torch.autograd.Function` that has no second derivative.

    With `create_graph=True` the gradients are the same; differentiating them raises RuntimeError.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *dys: Tensor | None) -> Gradients:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # grad mode is on with create_graph alone
            return backward(ctx, *dys)
        with torch.no_grad():
            gradients = backward(ctx, *dys)
        every = gradients if isinstance(gradients, tuple) else (gradients,)
        tensors = [g for g in every if g is not None]
        leaf = tensors[0].new_empty(()).requires_grad_() if tensors else None
        raising = iter(_Raise.apply(type(ctx).__name__.removesuffix("Backward"), leaf, *tensors) if tensors else ())
        every = tuple(None if g is None else next(raising) for g in every)
        return every if isinstance(gradients, tuple) else every[0]

    return wrapper


class _Raise(torch.autograd.Function):
    """Return tensors unchanged, as if computed from a leaf; its backward raises."""

    @staticmethod
    def forward(ctx: Any, name: str, leaf: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            f"{ctx.name} has no second derivative: its backward pass computes in a recipe's formats. Differentiate "
            "twice through a model that was not converted, or leave out create_graph=True"
        )
