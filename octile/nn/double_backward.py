"""Double backward: a clear error where a function has no second derivative, and that of a formula where it has one.

The backward pass of a fused function quantizes, or calls operators that have no gradient, so autograd cannot
differentiate it. Without an error its first derivative would count as a constant in a second backward pass, and a
gradient penalty or a Hessian would silently lose that part. An error in the second pass would come too late: with
`torch.autograd.grad(loss, inputs)` autograd runs only what leads to the inputs, and a constant does not.
`torch.autograd.function.once_differentiable` raises there, and only if the incoming gradient itself requires a
gradient, which that of a plain loss does not.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = Tensor | None | tuple[Tensor | None, ...]


def first_derivative_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate the backward of a `torch.autograd.Function` that has no second derivative.

    With `create_graph=True` it raises RuntimeError instead of computing a gradient.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *dys: Tensor | None) -> Gradients:
        if creates_graph():
            raise RuntimeError(
                f"{type(ctx).__name__.removesuffix('Backward')} has no second derivative: its backward pass computes "
                "in a recipe's formats. Leave out create_graph=True, or differentiate twice through a model that was "
                "not converted"
            )
        return backward(ctx, *dys)

    return wrapper


def creates_graph() -> bool:
    """Whether the backward pass that runs now is to be differentiated itself (`create_graph=True`).

    False while torch.compile traces it: AOTAutograd raises an error of its own, the debugging backend "eager" does not.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def differentiable_gradients(
    formula: Callable[..., Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return gradients of formula(*inputs) that can be differentiated, in a backward pass that `creates_graph`.

    Args:
        formula: in torch's functions, returns a tensor or several.
        gradients: gradients of its results; None for a result that nothing reads.
    """
    own = [t.view_as(t) for t in inputs]  # one input may have been computed from another
    results = formula(*own)
    results = results if isinstance(results, tuple) else (results,)
    used = [(result, dy) for result, dy in zip(results, gradients, strict=True) if dy is not None]
    wanted = [t for t in own if t.requires_grad]
    found = iter(torch.autograd.grad([y for y, _ in used], wanted, [dy for _, dy in used], create_graph=True))
    return tuple(next(found) if t.requires_grad else None for t in own)
