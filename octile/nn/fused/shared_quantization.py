"""Shared quantization: layers that read the same input quantize it once.

A SwiGLU's gate and up projections, and attention's two down-projections, multiply the same activation. If each layer
quantized it, it would be quantized twice and saved for backward twice. Delayed scaling is never shared: each layer has
an amax history of its own.
"""

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Shared = dict[Hashable, Any]  # what was computed from an input, by how it was computed

_input: ContextVar[tuple[Tensor, Shared] | None] = ContextVar("_input", default=None)


def shared_quantization(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Return layer(x) of each layer, quantizing x once for all layers with the same format."""
    if torch.compiler.is_compiling():  # the compiler finds the common subexpression itself
        return [layer(x) for layer in layers]
    token = _input.set((x, {}))
    try:
        return [layer(x) for layer in layers]
    finally:
        _input.reset(token)


def shared_by_layers(x: Tensor) -> Shared | None:
    """Return the results that the layers which `shared_quantization` calls on x share; None for any other x."""
    if torch.compiler.is_compiling():
        return None
    current = _input.get()
    return current[1] if current is not None and current[0] is x else None


def compute_once(shared: Shared | None, key: Hashable, compute: Callable[[], T]) -> T:
    """Return compute(), or what it returned the first time for this key."""
    if shared is None:
        return compute()
    if key not in shared:
        shared[key] = compute()
    return shared[key]
