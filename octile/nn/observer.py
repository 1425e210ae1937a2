"""Observers: functions that see what layers quantize and multiply, for `octile.lab`, reports of a run and tests.

There are two events, and one list of observers:

    quantization    an operand was quantized; nothing is returned
    GEMM            fprop of a layer is about to run; the observer may return a function for the layer's dgrad and wgrad

Because fprop's observer returns the function that sees the other two GEMMs, it can hold whatever it needs of fprop in a
closure. For a forward pass that has no backward pass (a validation, the first pass of a checkpointed block) that
function is never called.

Usually there is no observer, and an event costs one check of an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.recipe import GemmName
from octile.scaled import ScaledTensor


@dataclass(frozen=True, eq=False)
class ObservedGemm:
    """One GEMM a · bᵀ of a layer.

    Attributes:
        name: fprop (a: x, b: w), dgrad (dy, wᵀ) or wgrad (dyᵀ, xᵀ).
        before: a before it was quantized: x, dy or dyᵀ.
        a, b: the quantized operands, or None where the GEMM runs in high precision.
        offs: int32 [G], for a grouped GEMM: the end of each group of tokens in a, for wgrad of its columns.
        tiles: int32 [P/128, 2], where a and b of wgrad are [N, P] and [K, P]: the tokens of each 128 of their columns,
            see `octile.ops.groups`; None: their columns are the tokens of `before`.
    """

    name: GemmName
    before: Tensor
    a: ScaledTensor | None = None
    b: ScaledTensor | None = None
    offs: Tensor | None = None
    tiles: Tensor | None = None


Backward = Callable[[ObservedGemm], None]


@dataclass(frozen=True, eq=False)
class Observer:
    """What is called at each of the two events; None: nothing.

    Attributes:
        gemm: called with a layer's weight, [N, K] or of experts [G, N, K] in high precision, and its fprop. What it
            returns, if anything, is called with the same layer's dgrad and wgrad, as far as they run.
        quantization: called with the name of an operand, "x", "w", "dy", "wgrad_x" or "wgrad_dy", and its quantized
            values.
    """

    gemm: Callable[[Tensor, ObservedGemm], Backward | None] | None = None
    quantization: Callable[[str, ScaledTensor], None] | None = None


_observers: list[Observer] = []


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Report to the observer what runs inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def has_observers() -> bool:
    """Whether an observer sees what runs now."""
    return bool(_observers)


def observe_gemms(gemm: Callable[[Tensor, ObservedGemm], Backward | None]) -> AbstractContextManager[None]:
    """Call gemm(weight, fprop) for every layer that runs inside, if its operands require gradients; see `Observer`."""
    return observe(Observer(gemm=gemm))


def observe_quantization(quantization: Callable[[str, ScaledTensor], None]) -> AbstractContextManager[None]:
    """Call quantization(operand, quantized) for everything that layers quantize inside; see `Observer`."""
    return observe(Observer(quantization=quantization))


def has_gemm_observers() -> bool:
    """Whether GEMMs are reported to anyone. Inside `torch.compile` they are not."""
    if not _observers or torch.compiler.is_compiling():
        return False
    return any(observer.gemm is not None for observer in _observers)


def report_quantization(operand: str, quantized: ScaledTensor) -> ScaledTensor:
    """Report a quantized operand to the observers, and return it."""
    for observer in _observers:
        if observer.quantization is not None:
            observer.quantization(operand, quantized)
    return quantized


def report_fprop(weight: Tensor, fprop: ObservedGemm) -> list[Backward]:
    """Report fprop to the observers, and return those functions that want to see its dgrad and wgrad."""
    called = [observer.gemm(weight, fprop) for observer in _observers if observer.gemm is not None]
    return [backward for backward in called if backward is not None]


def report_backward(backwards: list[Backward], gemm: ObservedGemm) -> None:
    """Report a dgrad or a wgrad to what `report_fprop` returned."""
    for backward in backwards:
        backward(gemm)
