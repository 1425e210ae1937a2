"""Linear layers that another library's module calls one after the other on one input, computed as one GEMM.

Attention in transformers calls its layers for queries, keys and values itself, each as a module. The first call
computes all of them (`octile.nn.fused.projections`) and the others return what was stored, so that the module's forward
pass and its parameters stay as they are. Which layers these are is read from the source of the forward pass
(`octile.nn.structure.called_on_one_input`).

A layer runs alone where the layers are not of one recipe that can be fused, have hooks or were replaced, or where its
input is another tensor than the first layer's. So it does where the input or a parameter was written since the first
call, or gradients or autocast were switched. A compiler does not show whether they were: compiled, the layers are one
GEMM only where the source shows that nothing between the calls can do so (`octile.nn.structure.is_called_in_a_row`),
and the compiler finds that the others quantize one input. The results are then stored as an attribute of the input: in
activation checkpointing a compiler refuses writes to objects that were made outside of it, such as these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.nn.functional import result_dtype
from octile.nn.fused.block_input import quantize_block_input
from octile.nn.fused.fusion import has_hooks
from octile.nn.fused.projections import projections
from octile.nn.linear import Linear
from octile.ops.quantize import INPUT_DTYPES


class _Pending(NamedTuple):
    """An input, the conditions of the results (`JoinedLinear._conditions`), and those that were not asked for yet."""

    x: Tensor
    conditions: tuple[object, ...]
    results: list[Tensor]


class JoinedLinear:
    """Layers that are called in this order on one input, at least two.

    Args:
        layers: these layers.
        in_a_row: whether nothing can be written or switched between their calls.
    """

    def __init__(self, layers: Sequence[Linear], in_a_row: bool):
        self.layers, self.in_a_row = list(layers), in_a_row
        self._pending: _Pending | None = None

    def __call__(self, layer: Linear, x: Tensor) -> Tensor | None:
        """Return layer(x), or None where the layer has to compute it alone."""
        if torch.compiler.is_compiling():
            return self._traced(layer, x) if self.in_a_row else None
        if layer is self.layers[0]:
            self._pending = None
            if not self._can_join(x):
                return None
            y, *results = self._compute(x)
            self._pending = _Pending(x, self._conditions(x), results)
            return y
        pending = self._pending  # another thread may replace it, which leaves this one as it is
        if pending is None or x is not pending.x or self._conditions(x) != pending.conditions:
            return None
        if layer is not self.layers[len(self.layers) - len(pending.results)]:
            return None
        y, *results = pending.results
        self._pending = pending._replace(results=results) if results else None
        return y

    def _traced(self, layer: Linear, x: Any) -> Tensor | None:
        """Do what a call does while a compiler traces it."""
        if layer is self.layers[0]:
            if not self._can_join(x):
                return None
            results = self._compute(x)
        else:
            owner, results = getattr(x, "_joined_results", (None, []))
            if owner is not self or not results or layer is not self.layers[len(self.layers) - len(results)]:
                return None
        y, *rest = results
        x._joined_results = self, rest
        return y

    def __getstate__(self) -> dict[str, object]:
        """Return what is copied and saved with a model: the layers without results."""
        return {"layers": self.layers, "in_a_row": self.in_a_row, "_pending": None}

    def _conditions(self, x: Tensor) -> tuple[object, ...]:
        """What a result depends on besides the tensors themselves; writing to a tensor changes its version."""
        parameters = [t for layer in self.layers for t in (layer.weight, layer.bias) if t is not None]
        state = [(id(t), _version(t)) for t in parameters]
        return torch.is_grad_enabled(), result_dtype(x), _version(x), *state

    def _can_join(self, x: Tensor) -> bool:
        first = self.layers[0]
        for layer in self.layers:
            is_alike = type(layer) is Linear and layer.recipe == first.recipe and not has_hooks(layer)
            if not is_alike or layer.weight.device != x.device or layer.weight.dtype not in INPUT_DTYPES:
                return False
        fits = x.dim() > 0 and x.shape[-1] == first.in_features and x.dtype in INPUT_DTYPES
        return fits and first.recipe.can_fuse_projections

    def _compute(self, x: Tensor) -> list[Tensor]:
        layers, dtype = self.layers, result_dtype(x)
        weights = [layer.weight for layer in layers]
        sizes = [[layer.out_features] for layer in layers]
        # contiguous, as a layer's result is: attention saves v, and a view of it would hold the memory of all
        adds_bias = any(layer.bias is not None for layer in layers)
        outputs = projections(quantize_block_input(x, layers[0].recipe), weights, sizes, dtype, not adds_bias)
        results = []
        for y, layer in zip(outputs, layers, strict=True):
            y = y.contiguous() if layer.bias is None else y + layer.bias.to(dtype)
            results.append(y.view(*x.shape[:-1], y.shape[-1]))
        return results


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
