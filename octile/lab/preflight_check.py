"""Check a preflight: the errors of the GEMMs of a real step in 8 bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from octile.lab.capture import CapturedGemm, capturing
from octile.lab.layers import layer_weights
from octile.lab.preflight import NOT_FINITE, GemmKey, Loss, error_by_channel, model_loss
from octile.lab.what_if import SAMPLE, Error, SampledGemm
from octile.nn.conversion import apply_recipe
from octile.nn.observer import Backward, ObservedGemm, observe_gemms
from octile.ops.quantize import decode
from octile.recipe import Recipe
from octile.scaled import ScaledTensor


def observe_batch(
    model: nn.Module, batch: Any, recipe: Recipe, loss: Loss | None = None, sample: int = SAMPLE, seed: int = 0
) -> dict[GemmKey, Error]:
    """Compare the GEMMs of a step under the recipe, on a copy of the model, with exact ones, as `observe_step` does."""
    converted = apply_recipe(copy.deepcopy(model), recipe)
    with observe_step(converted, sample, seed) as errors:
        (loss or model_loss)(converted, batch).backward()
    return errors


@contextmanager
def observe_step(model: nn.Module, sample: int = SAMPLE, seed: int = 0) -> Iterator[dict[GemmKey, Error]]:
    """Compare the GEMMs of the first step inside the context with exact ones; the errors are filled in at its end.

    The operands are those that the step itself quantized, also in fused functions and for every expert. GEMMs that are
    not in 8 bits are left out. The operands are multiplied in FP64, so the errors are those of quantization.

    Args:
        model: its layers are `octile.nn.Linear` or experts, as `octile.convert` makes them.
        sample: rows of each operand that are compared, chosen at random with `seed`.

    Yields:
        the errors by layer and GEMM ("fprop", "dgrad" or "wgrad"), empty until the context ends.
    """
    layers, errors = layer_weights(model), dict[GemmKey, Error]()
    observed: dict[GemmKey, ObservedGemm] = {}

    def observe(weight: Tensor, fprop: ObservedGemm) -> Backward | None:
        name = layers.name_of(weight)
        if name is None:
            return None
        _store(observed, name, fprop)
        return partial(_store, observed, name)

    with capturing(model) as recorder, observe_gemms(observe):
        yield errors
    for captured in recorder.gemms():
        weight = captured.layer if captured.expert is None else captured.layer.rpartition(".")[0]
        gemm = observed.get((weight, captured.gemm))
        sampled = SampledGemm.draw(captured, sample, seed, NOT_FINITE)
        if gemm is not None and sampled.exact.any():
            errors[captured.layer, captured.gemm] = error_by_channel(_multiply(gemm, sampled), sampled.exact)


def _store(observed: dict[GemmKey, ObservedGemm], name: str, gemm: ObservedGemm) -> None:
    """Store copies of a GEMM's operands on the CPU, unless the layer has some already."""
    if gemm.a is not None and gemm.b is not None and (name, gemm.name) not in observed:
        a, b = (ScaledTensor(q.data.clone(), q.scale.clone(), q.block) for q in (gemm.a, gemm.b))
        offs = None if gemm.offs is None else gemm.offs.cpu()
        observed[name, gemm.name] = ObservedGemm(gemm.name, gemm.before, a.cpu(), b.cpu(), offs)


def _multiply(gemm: ObservedGemm, sampled: SampledGemm) -> Tensor:
    """Return the sampled outputs [R, S] of a GEMM's 8-bit operands, float64."""
    a, b = gemm.a, gemm.b
    assert a is not None
    assert b is not None
    tokens = _own_tokens(gemm, sampled.captured)
    all_columns = range(a.shape[-1])
    if gemm.name == "wgrad":
        return _values(a, sampled.rows_a, tokens) @ _values(b, sampled.rows_b, tokens).mT
    if sampled.captured.expert is not None:
        b = ScaledTensor(b.data[sampled.captured.expert], b.scale[sampled.captured.expert], b.block)
    return _values(a, sampled.rows_a + tokens.start, all_columns) @ _values(b, sampled.rows_b, all_columns).mT


def _own_tokens(gemm: ObservedGemm, captured: CapturedGemm) -> range:
    """Return the rows of x and dy that belong to the layer: all, or those of an expert."""
    if captured.expert is None or gemm.offs is None:
        return range(gemm.before.shape[-1 if gemm.name == "wgrad" else -2])
    return [range(start, end) for start, end in pairwise([0, *gemm.offs.tolist()])][captured.expert]


def _values(q: ScaledTensor, rows: Tensor, columns: range) -> Tensor:
    """Return the dequantized values of some rows and columns, float64."""
    data = q.data.view(torch.uint8)[rows][:, columns.start : columns.stop].view(q.data.dtype)
    blocks = torch.arange(columns.start, columns.stop) // q.block[1]
    return decode(data).double() * q.scale[rows // q.block[0]][:, blocks].double()
