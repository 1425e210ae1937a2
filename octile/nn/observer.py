"""Where one may look on while products are made: what `octile.lab` measures and captures.

Nobody looks on as a rule, and then a product costs one look at an empty list.

A layer's three products belong together: what watches fprop gives back a function for the other two, which can so
keep of fprop whatever it needs and no more. A forward pass that is never followed by a backward pass (a validation,
the first pass of a checkpointed block) is told apart by that function not being called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.recipe import GemmName
from octile.scaled import ScaledTensor


@dataclass(frozen=True, eq=False)
class ObservedGemm:
    """One product a · bᵀ as it is made.

    Attributes:
        name: fprop (a: x, b: w), dgrad (dy, wᵀ) or wgrad (dyᵀ, xᵀ).
        before: what a was before its cast: x, dy or dyᵀ.
        a, b: the operands as they are multiplied, or None where the product is not made in 8 bits.
        offs: of experts, int32 [G]: the end of each group of tokens.
    """

    name: GemmName
    before: Tensor
    a: ScaledTensor | None = None
    b: ScaledTensor | None = None
    offs: Tensor | None = None


Backward = Callable[[ObservedGemm], None]
Observer = Callable[[Tensor, ObservedGemm], Backward | None]
_watchers: list[Observer] = []


@contextmanager
def observe_gemms(watcher: Observer) -> Iterator[None]:
    """Calls watcher(weight, fprop) for every product made inside of operands that may have a gradient.

    weight is the layer's, [N, K] or of experts [G, N, K], before its cast. What the watcher returns, if anything, is
    called with the same layer's dgrad and wgrad, as far as they are made.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def report_fprop(weight: Tensor, fprop: ObservedGemm) -> list[Backward]:
    """Shows fprop to those who watch; returns who wants to see its dgrad and wgrad."""
    return [backward for watcher in _watchers if (backward := watcher(weight, fprop)) is not None]


def report(seen: list[Backward], product: ObservedGemm) -> None:
    """Shows a dgrad or a wgrad."""
    for see in seen:
        see(product)


def is_observed() -> bool:
    """Whether anyone looks on. Inside `torch.compile` nobody does."""
    return bool(_watchers) and not torch.compiler.is_compiling()
