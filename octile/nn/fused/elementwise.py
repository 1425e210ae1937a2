"""What lies between GEMMs in high precision, with one kernel each way: SwiGLU.

torch's own functions round each product to BF16 and pass over memory for each. Here, as where FP8 functions compute the
same, everything is in FP32 and each result is rounded once.

The formulas below in torch's functions define the results. They are called where the operators cannot be: by
`torch.compile`, which fuses them itself, in transforms, on subclasses of Tensor and in other dtypes. Second derivatives
are theirs, too.

Shapes: any leading dimensions, I channels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.operator import PLAIN_TENSORS
from octile.ops.quantize import INPUT_DTYPES
from octile.ops.swiglu import swiglu as swiglu_operator
from octile.ops.swiglu import swiglu_backward


def swiglu(*projections: Tensor) -> Tensor:
    """Return silu(gate) · up, differentiable.

    Args:
        projections: gate and up [..., I], or one tensor [..., 2I], the gate's channels first.

    Returns:
        [..., I] in their dtype, rounded once.
    """
    gate, up = _halves(projections)
    if not _can_use_operators(gate, up) or gate.dtype != up.dtype or gate.shape != up.shape:
        return _swiglu(*projections)
    return _SwiGLU.apply(*projections)


def _swiglu(*projections: Tensor) -> Tensor:
    gate, up = _halves(projections)
    return (F.silu(_at_least_float32(gate)) * _at_least_float32(up)).to(torch.promote_types(gate.dtype, up.dtype))


def _halves(projections: Sequence[Tensor]) -> Sequence[Tensor]:
    return projections if len(projections) == 2 else projections[0].chunk(2, dim=-1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *projections: Tensor) -> Tensor:
        ctx.save_for_backward(*projections)
        gate, up = _halves(projections)
        return swiglu_operator(_matrix(gate), _matrix(up)).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        projections = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(_swiglu, projections, (dh,))
        gate, up = _halves(projections)
        d = swiglu_backward(_matrix(dh), _matrix(gate), _matrix(up)).view(*gate.shape[:-1], 2 * gate.shape[-1])
        return d if len(projections) == 1 else d.chunk(2, dim=-1)


def differentiable_gradients(
    formula: Callable[..., Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of formula(*inputs) that can be differentiated themselves, in a backward with create_graph.

    Args:
        formula: in torch's functions, returns a tensor or several.
        gradients: of its results; None: of a result that nothing reads.
    """
    own = [t.view_as(t) for t in inputs]  # one input may have been computed from another
    results = formula(*own)
    results = results if isinstance(results, tuple) else (results,)
    used = [(result, dy) for result, dy in zip(results, gradients, strict=True) if dy is not None]
    wanted = [t for t in own if t.requires_grad]
    found = iter(torch.autograd.grad([y for y, _ in used], wanted, [dy for _, dy in used], create_graph=True))
    return tuple(next(found) if t.requires_grad else None for t in own)


def _can_use_operators(*tensors: Tensor) -> bool:
    """Whether octile's operators can compute with these tensors eagerly; see the head of this file."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(t) in PLAIN_TENSORS and t.dtype in INPUT_DTYPES for t in tensors)


def _matrix(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
