"""Weight gradients that are computed after the backward pass, when a pipeline schedule has time for them.

Inside `defer_wgrads` the backward pass of octile's linear layers and experts, fused or not, computes no weight
gradient: it stores the operands of wgrad, and `DeferredWgrads.compute` runs the GEMMs. So do torch's own linear layers
whose forward pass ran inside `DeferrableLinears`. The gradients are the same bits, since those of one weight are added
up in the order in which the backward pass would have done so.

Everything else gets its gradient in the backward pass: biases, norms, gates, embeddings, convolutions, weights that
were computed from a parameter, such as those of `smooth_swiglu`, and weights with hooks.

torch splits a backward pass at the nodes of the autograd graph (`torch.distributed.pipelining`), and runs the nodes
where input and weight gradients meet in both halves. A layer of octile is one such node, whose backward pass has both.

Sources: the backward passes for weights in DeepSeek-V3 (arXiv 2412.19437) §3.2.1, and ZeroBubble (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octile.nn.double_backward import first_derivative_only
from octile.nn.gathered_weight import GatheredWeight
from octile.nn.main_grad import MainGrads, main_grads_of
from octile.nn.weight_cache import drop_written_weights, record_gradients

Wgrads = Callable[[], Sequence[Tensor | None]]


class DeferredWgrads:
    """The wgrad GEMMs that a backward pass has left for later."""

    def __init__(self) -> None:
        self._pending: list[tuple[Sequence[Tensor], Wgrads]] = []

    def __len__(self) -> int:
        """The number of GEMMs that are not computed yet."""
        return len(self._pending)

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the weight gradients, and add them to `.grad` or `main_grad`; their operands are freed."""
        found: dict[int, tuple[Tensor, Tensor]] = {}  # a backward pass adds up what one weight gets from several uses
        pending, self._pending = self._pending[::-1], []
        all_weights = {id(weight): weight for weights, _ in pending for weight in weights}
        while pending:
            weights, compute = pending.pop()
            for weight, dw in zip(weights, compute(), strict=True):
                if dw is not None:
                    before = found.get(id(weight))
                    found[id(weight)] = weight, dw if before is None else before[1] + dw
            del compute  # and the operands with it
        while found:
            _add_to_grad(*found.popitem()[1])
        record_gradients([*all_weights.values()])


def _add_to_grad(weight: Tensor, dw: Tensor) -> None:
    """Add dw to `.grad` as autograd does, which would copy the first gradient, since the caller has it, too."""
    dw = dw.to(weight.dtype)
    is_as_grad = dw.stride() == weight.stride() and dw.dtype == weight.grad_dtype
    if weight.grad is None and is_as_grad and not _has_hooks(weight):
        weight.grad = dw
    else:
        torch.autograd.backward([weight], [dw])


_deferred: DeferredWgrads | None = None  # for all threads: autograd runs a GPU's backward passes in one of its own


@contextmanager
def defer_wgrads() -> Iterator[DeferredWgrads]:
    """Leave the weight gradients of backward passes that run inside for later.

    Not together with FSDP2 or DDP, which expect all gradients when a backward pass ends.
    """
    global _deferred
    outer, _deferred = _deferred, DeferredWgrads()
    try:
        yield _deferred
    finally:
        _deferred = outer


def parameters_of(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the weights, for `run_or_defer`, if all are leaves that autograd knows; otherwise an empty sequence."""
    if torch.compiler.is_compiling():
        return ()
    return weights if all(w.is_leaf and not isinstance(w, GatheredWeight) for w in weights) else ()


def _has_hooks(weight: Tensor) -> bool:
    """Whether a weight has hooks, which would be called without a gradient if it was deferred."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def run_or_defer(
    parameters: Sequence[Tensor], main_grads: MainGrads, compute: Callable[[MainGrads], Sequence[Tensor | None]]
) -> Sequence[Tensor | None]:
    """Return the weight gradients, or None for each inside `defer_wgrads`, which weights with hooks ignore.

    They are added to the `main_grad` that a weight has when its gradient is computed. In a pipeline the forward pass
    often precedes the first gradient, to which later ones are added in place.

    Args:
        parameters: what `parameters_of` returned for the weights.
        main_grads: those of the weights in the forward pass, used where gradients cannot be deferred; empty for layers
            that ignore them.
        compute: given the weights' main_grads, computes the gradient of each, in the dtype in which a backward pass
            adds those of several uses; None where it was added to main_grad.

    Raises:
        TypeError, ValueError: as `check_main_grad`, of a main_grad that a weight got after the forward pass.
    """
    drop_written_weights(parameters)
    if _deferred is None or not parameters or any(map(_has_hooks, parameters)):
        record_gradients(parameters)
        return compute(current_main_grads(parameters, main_grads))
    _deferred._pending.append((parameters, lambda: compute(current_main_grads(parameters, main_grads))))
    return [None for _ in parameters]


def current_main_grads(parameters: Sequence[Tensor], main_grads: MainGrads) -> MainGrads:
    """Return the main_grads that weights have now; arguments and exceptions are those of `run_or_defer`."""
    return main_grads_of(parameters) if parameters and main_grads else main_grads


class DeferrableLinears(TorchFunctionMode):
    """Context in which `torch.nn.functional.linear`, and so `torch.nn.Linear`, can have its weight gradient deferred.

    For forward passes whose backward pass runs inside `defer_wgrads`. Results and gradients have the same bits.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; a linear layer of a parameter by a function that can wait."""
        if func is F.linear and not kwargs and type(args[1]) is nn.Parameter and not torch.compiler.is_compiling():
            x, weight, bias = args if len(args) == 3 else (*args, None)
            if weight.requires_grad and torch.is_grad_enabled():
                return _Linear.apply(x, weight, bias)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """torch's linear layer, under autocast, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype), weight)
        ctx.x_dtype, ctx.b_dtype, ctx.parameters = x.dtype, bias is not None and bias.dtype, parameters_of((weight,))
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy_TN, x_TK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = (dy_TN @ weight.to(dy.dtype)).view(x.shape).to(ctx.x_dtype)
        (dw,) = run_or_defer(ctx.parameters, (), lambda _: [dy_TN.mT @ x_TK])
        if ctx.needs_input_grad[2]:
            db = dy_TN.sum(0).to(ctx.b_dtype)
        return dx, dw, db
