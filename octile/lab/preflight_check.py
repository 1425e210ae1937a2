"""Whether a preflight was right: how far the products of a real step in 8 bits are from the exact ones.

`measured` makes a step on a copy and compares what layers return; `watched` looks on while a run makes a step itself.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from octile.lab.capture import CapturedGemm, capturing
from octile.lab.layers import layer_weights
from octile.lab.preflight import Loss, Place, error_by_channel, model_loss
from octile.lab.what_if import SAMPLE, Error, SampledGemm
from octile.nn.conversion import apply_recipe
from octile.nn.linear import Linear
from octile.nn.observer import Backward, ObservedGemm, observe_gemms
from octile.ops.quantize import decode
from octile.recipe import Recipe
from octile.scaled import ScaledTensor


def measured(
    model: nn.Module, batch: Any, recipe: Recipe, loss: Loss | None = None, sample: int = SAMPLE, seed: int = 0
) -> dict[Place, Error]:
    """How far the results of a real step in the recipe are from exact products of the same operands.

    Results are what layers return, the gradients that leave them, and the gradients of weights; of experts only the
    last. The operands are those of a model that computes in 8 bits throughout, so all earlier errors are in them.
    """
    converted = apply_recipe(copy.deepcopy(model), recipe)
    seen: dict[Place, Tensor] = {}
    for name, module in converted.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(partial(_see_output, seen, name))
            module.register_full_backward_hook(partial(_see_gradient, seen, name))
    with capturing(converted) as recorder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # of a layer whose input has no gradient
        (loss or model_loss)(converted, batch).backward()
    weights = layer_weights(converted).weights
    found: dict[Place, Error] = {}
    for captured in recorder.products():
        expert, place = captured.expert, (captured.layer, captured.product)
        if captured.product == "wgrad":
            gradient = weights[captured.layer if expert is None else captured.layer.rpartition(".")[0]].grad
            result = gradient if expert is None or gradient is None else gradient[expert]
        else:
            result = seen.get(place)
        at = SampledGemm.of(captured, sample, seed)
        if result is not None and at.exact.any():
            rows = result.detach().flatten(0, -2)[at.rows_a.to(result.device)].cpu().double()
            found[place] = error_by_channel(rows[:, at.rows_b], at.exact)
    return found


def _see_output(seen: dict[Place, Tensor], name: str, module: Linear, _: Any, output: Tensor) -> None:
    bias = 0 if module.bias is None else module.bias.detach().to(output.dtype)
    seen[name, "fprop"] = output.detach() - bias


def _see_gradient(seen: dict[Place, Tensor], name: str, _: nn.Module, gradients: Sequence[Tensor], __: Any) -> None:
    if gradients[0] is not None:
        seen[name, "dgrad"] = gradients[0].detach()


@contextmanager
def watched(model: nn.Module, sample: int = SAMPLE, seed: int = 0) -> Iterator[dict[Place, Error]]:
    """How far the products of the first step made inside are from the exact ones; filled in when it ends.

    The operands are the step's own, as it cast them, also where several layers are one function and of every expert;
    products that are not made in 8 bits are left out. They are multiplied in FP64 here, so the error is the casts'.
    """
    layers, found = layer_weights(model), dict[Place, Error]()
    made: dict[Place, ObservedGemm] = {}

    def watch(weight: Tensor, fprop: ObservedGemm) -> Backward | None:
        name = layers.name_of(weight)
        if name is None:
            return None
        _keep(made, name, fprop)
        return partial(_keep, made, name)

    with capturing(model) as recorder, observe_gemms(watch):
        yield found
    for captured in recorder.products():
        weight = captured.layer if captured.expert is None else captured.layer.rpartition(".")[0]
        product = made.get((weight, captured.product))
        at = SampledGemm.of(captured, sample, seed)
        if product is not None and at.exact.any():
            found[captured.layer, captured.product] = error_by_channel(_multiplied(product, at), at.exact)


def _keep(made: dict[Place, ObservedGemm], name: str, product: ObservedGemm) -> None:
    if product.a is not None and product.b is not None and (name, product.name) not in made:
        a, b = (ScaledTensor(q.data.clone(), q.scale.clone(), q.block) for q in (product.a, product.b))
        offs = None if product.offs is None else product.offs.cpu()
        made[name, product.name] = ObservedGemm(product.name, product.before, a.cpu(), b.cpu(), offs)


def _multiplied(product: ObservedGemm, at: SampledGemm) -> Tensor:
    """The sampled outputs [R, S] of a product's 8-bit operands, float64."""
    a, b = product.a, product.b
    assert a is not None
    assert b is not None
    own = _own_tokens(product, at.captured)
    everything = range(a.shape[-1])
    if product.name == "wgrad":
        return _values(a, at.rows_a, own) @ _values(b, at.rows_b, own).mT
    if at.captured.expert is not None:
        b = ScaledTensor(b.data[at.captured.expert], b.scale[at.captured.expert], b.block)
    return _values(a, at.rows_a + own.start, everything) @ _values(b, at.rows_b, everything).mT


def _own_tokens(product: ObservedGemm, captured: CapturedGemm) -> range:
    """The rows of x and dy that are this layer's: all, or an expert's."""
    if captured.expert is None or product.offs is None:
        return range(product.before.shape[-1 if product.name == "wgrad" else -2])
    return [range(start, end) for start, end in pairwise([0, *product.offs.tolist()])][captured.expert]


def _values(q: ScaledTensor, rows: Tensor, columns: range) -> Tensor:
    """q[rows][:, columns], float64."""
    data = q.data.view(torch.uint8)[rows][:, columns.start : columns.stop].view(q.data.dtype)
    blocks = torch.arange(columns.start, columns.stop) // q.block[1]
    return decode(data).double() * q.scale[rows // q.block[0]][:, blocks].double()
