"""Whether a preflight was right: how far the products of a real step in 8 bits are from the exact ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from octile.lab.capture import capturing
from octile.lab.layers import layer_weights
from octile.lab.preflight import Loss, Place, by_channel, own_loss
from octile.lab.what_if import SAMPLE, Error, SampledProduct
from octile.nn.conversion import apply_recipe
from octile.nn.linear import Linear
from octile.recipe import Recipe


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
        (loss or own_loss)(converted, batch).backward()
    weights = layer_weights(converted).weights
    found: dict[Place, Error] = {}
    for captured in recorder.products():
        expert, place = captured.expert, (captured.layer, captured.product)
        if captured.product == "wgrad":
            gradient = weights[captured.layer if expert is None else captured.layer.rpartition(".")[0]].grad
            result = gradient if expert is None or gradient is None else gradient[expert]
        else:
            result = seen.get(place)
        at = SampledProduct.of(captured, sample, seed)
        if result is not None and at.exact.any():
            rows = result.detach().flatten(0, -2)[at.rows_a.to(result.device)].cpu().double()
            found[place] = by_channel(rows[:, at.rows_b], at.exact)
    return found


def _see_output(seen: dict[Place, Tensor], name: str, module: Linear, _: Any, output: Tensor) -> None:
    bias = 0 if module.bias is None else module.bias.detach().to(output.dtype)
    seen[name, "fprop"] = output.detach() - bias


def _see_gradient(seen: dict[Place, Tensor], name: str, _: nn.Module, gradients: Sequence[Tensor], __: Any) -> None:
    if gradients[0] is not None:
        seen[name, "dgrad"] = gradients[0].detach()
