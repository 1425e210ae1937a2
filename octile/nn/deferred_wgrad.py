"""Weight gradients that are computed after the backward pass, when a pipeline schedule has time for them.

Inside `defer_wgrads` the backward pass of octile's linear layers and experts, fused or not, computes no weight
gradient: it stores the operands of wgrad, and `DeferredWgrads.compute` runs the GEMMs. The gradients are the same bits,
since those of one weight are added up in the order in which the backward pass would have done so.

Everything else gets its gradient in the backward pass: biases, norms, gates, embeddings, layers of torch itself,
weights that were computed from a parameter, such as those of `smooth_swiglu`, and weights with hooks.

torch splits a backward pass at the nodes of the autograd graph (`torch.distributed.pipelining`), and runs the nodes
where input and weight gradients meet in both halves. A layer of octile is one such node, whose backward pass has both.

Sources: the backward passes for weights in DeepSeek-V3 (arXiv 2412.19437) §3.2.1, and ZeroBubble (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from octile.nn.gathered_weight import GatheredWeight

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
        while pending:
            weights, compute = pending.pop()
            for weight, dw in zip(weights, compute(), strict=True):
                if dw is not None:
                    before = found.get(id(weight))
                    found[id(weight)] = weight, dw if before is None else before[1] + dw
        if found:
            weights, gradients = zip(*found.values(), strict=True)
            torch.autograd.backward(weights, gradients)


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
    """Return the weights if their gradients can be deferred, for `run_or_defer`; otherwise an empty sequence."""
    if torch.compiler.is_compiling():
        return ()
    return weights if all(map(_can_wait, weights)) else ()


def _can_wait(weight: Tensor) -> bool:
    has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks  # they would be called without a gradient
    return weight.is_leaf and not has_hooks and not isinstance(weight, GatheredWeight)


def run_or_defer(parameters: Sequence[Tensor], compute: Wgrads) -> Sequence[Tensor | None]:
    """Return the weight gradients, or None for each inside `defer_wgrads`.

    Args:
        parameters: what `parameters_of` returned for the weights.
        compute: computes the gradient of each; None where it was added to main_grad.
    """
    if _deferred is None or not parameters:
        return compute()
    _deferred._pending.append((parameters, compute))
    return [None for _ in parameters]
