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

from octile.recipe import ProductName
from octile.scaled import ScaledTensor


@dataclass(frozen=True, eq=False)
class Product:
    """One product a · bᵀ as it is made.

    Attributes:
        name: fprop (a: x, b: w), dgrad (dy, wᵀ) or wgrad (dyᵀ, xᵀ).
        before: what a was before its cast: x, dy or dyᵀ.
        a, b: the operands as they are multiplied, or None where the product is not made in 8 bits.
        offs: of experts, int32 [G]: the end of each group of tokens.
    """

    name: ProductName
    before: Tensor
    a: ScaledTensor | None = None
    b: ScaledTensor | None = None
    offs: Tensor | None = None


Backward = Callable[[Product], None]
Watcher = Callable[[Tensor, Product], Backward | None]
_watchers: list[Watcher] = []


@contextmanager
def watch_products(watcher: Watcher) -> Iterator[None]:
    """Calls watcher(weight, fprop) for every product made inside of operands that may have a gradient.

    weight is the layer's, [N, K] or of experts [G, N, K], before its cast. What the watcher returns, if anything, is
    called with the same layer's dgrad and wgrad, as far as they are made.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def begin(weight: Tensor, fprop: Product) -> list[Backward]:
    """Shows fprop to those who watch; returns who wants to see its dgrad and wgrad."""
    return [backward for watcher in _watchers if (backward := watcher(weight, fprop)) is not None]


def show(seen: list[Backward], product: Product) -> None:
    """Shows a dgrad or a wgrad."""
    for see in seen:
        see(product)


def watched() -> bool:
    """Whether anyone looks on. Inside `torch.compile` nobody does."""
    return bool(_watchers) and not torch.compiler.is_compiling()
