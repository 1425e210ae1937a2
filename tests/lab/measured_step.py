"""The errors of a real step by what its layers return: a reference for `octile.lab.preflight_check.observe_step`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from octile.lab.capture import capturing
from octile.lab.layers import layer_weights
from octile.lab.preflight import GemmKey, error_by_channel, model_loss
from octile.lab.what_if import SAMPLE, Error, SampledGemm
from octile.nn.conversion import apply_recipe
from octile.nn.linear import Linear
from octile.recipe import Recipe


def measure_step(model: nn.Module, batch: Any, recipe: Recipe) -> dict[GemmKey, Error]:
    """Compare the results of a real step under the recipe with exact GEMMs of the same operands.

    Results are the outputs of layers, the gradients of their inputs, and the gradients of their weights; for experts,
    only the last. The operands come from a model that computes in 8 bits throughout, so they carry all earlier errors.
    """
    converted = apply_recipe(copy.deepcopy(model), recipe)
    results: dict[GemmKey, Tensor] = {}
    for name, module in converted.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(partial(_record_output, results, name))
            module.register_full_backward_hook(partial(_record_gradient, results, name))
    with capturing(converted) as recorder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # of a layer whose input has no gradient
        model_loss(converted, batch).backward()
    weights = layer_weights(converted).weights
    errors: dict[GemmKey, Error] = {}
    for captured in recorder.gemms():
        expert, key = captured.expert, (captured.layer, captured.gemm)
        if captured.gemm == "wgrad":
            gradient = weights[captured.layer if expert is None else captured.layer.rpartition(".")[0]].grad
            result = gradient if expert is None or gradient is None else gradient[expert]
        else:
            result = results.get(key)
        sampled = SampledGemm.draw(captured, SAMPLE, 0)
        if result is not None and sampled.exact.any():
            rows = result.detach().flatten(0, -2)[sampled.rows_a.to(result.device)].cpu().double()
            errors[key] = error_by_channel(rows[:, sampled.rows_b], sampled.exact)
    return errors


def _record_output(results: dict[GemmKey, Tensor], name: str, module: Linear, _: Any, output: Tensor) -> None:
    bias = 0 if module.bias is None else module.bias.detach().to(output.dtype)
    results[name, "fprop"] = output.detach() - bias


def _record_gradient(
    results: dict[GemmKey, Tensor], name: str, _: nn.Module, gradients: Sequence[Tensor], __: Any
) -> None:
    if gradients[0] is not None:
        results[name, "dgrad"] = gradients[0].detach()
