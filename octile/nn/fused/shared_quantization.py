"""Shared quantization: layers that read the same input quantize it once.

A SwiGLU's gate and up projections, and attention's two down-projections, multiply the same activation. If each layer
quantized it, it would be quantized twice and saved for backward twice. Delayed scaling is never shared: each layer has
an amax history of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Shared = dict[Hashable, Any]  # what was computed from an input, by how it was computed


class _Input(NamedTuple):
    """An input x that layers share.

    Attributes:
        x: the input; None: none is shared.
        version: version of x, which writing to x changes.
        shared: what was computed from x.
        module: whose layers they are, if it calls them itself.
        outer: the input that was shared before.
    """

    x: Tensor | None
    version: int
    shared: Shared
    module: nn.Module | None = None
    outer: _Input | None = None


_input: ContextVar[_Input | None] = ContextVar("_input", default=None)


def shared_quantization(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Return layer(x) of each layer, quantizing x once for all layers with the same format."""
    if torch.compiler.is_compiling():  # the compiler finds the common subexpression itself
        return [layer(x) for layer in layers]
    token = _input.set(_Input(x, _version(x), {}))
    try:
        return [layer(x) for layer in layers]
    finally:
        _input.reset(token)


def share_among_children(module: nn.Module) -> None:
    """Have the layers of a module quantize once what is an input of the module and of several of them.

    For a module of another library, whose forward pass calls these layers itself, such as attention's q, k and v. It
    gets two hooks, which do nothing while `torch.compile` traces it. A second call changes nothing.
    """
    if _begin not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_begin, with_kwargs=True)
        module.register_forward_hook(_end, always_call=True)


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    x = None if x is None or x.is_inference() else x  # whose writes are not counted
    _input.set(_Input(x, 0 if x is None else _version(x), {}, module, _input.get()))


def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    current = None if torch.compiler.is_compiling() else _input.get()
    if current is not None and current.module is module:
        _input.set(current.outer)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def shared_by_layers(x: Tensor) -> Shared | None:
    """Return what the layers share that are called on x by one module; None for any other x, or one written since."""
    if torch.compiler.is_compiling():
        return None
    current = _input.get()
    is_shared = current is not None and current.x is x and current.version == _version(x)
    return current.shared if current is not None and is_shared else None


def compute_once(shared: Shared | None, key: Hashable, compute: Callable[[], T]) -> T:
    """Return compute(), or what it returned the first time for this key."""
    if shared is None:
        return compute()
    if key not in shared:
        shared[key] = compute()
    return shared[key]
