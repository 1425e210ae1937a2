"""Layers that read the same input share one cast of it.

A SwiGLU's gate and up projections, and attention's two down-projections, multiply the same activation.  Cast by each
for itself, it would be quantised twice and kept twice for the backward pass.  Delayed scales are each layer's own, so
there is nothing to share.
"""

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Shared = dict[Hashable, Any]  # what was made of an input, by how it was made

_input: ContextVar[tuple[Tensor, Shared] | None] = ContextVar("_input", default=None)


def shared_quantization(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """layer(x) of each layer, with x cast once for all that cast it alike."""
    if torch.compiler.is_compiling():  # the compiler sees that the casts are the same
        return [layer(x) for layer in layers]
    token = _input.set((x, {}))
    try:
        return [layer(x) for layer in layers]
    finally:
        _input.reset(token)


def shared_by_layers(x: Tensor) -> Shared | None:
    """Where layers called `shared_quantization` on x keep what they made of it, for `once`; None for any other x."""
    if torch.compiler.is_compiling():
        return None
    current = _input.get()
    return current[1] if current is not None and current[0] is x else None


def once(shared: Shared | None, key: Hashable, make: Callable[[], T]) -> T:
    """make(), or what it gave the first time."""
    if shared is None:
        return make()
    if key not in shared:
        shared[key] = make()
    return shared[key]
