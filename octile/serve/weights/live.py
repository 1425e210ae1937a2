"""The weights of a model in training as serving reads them, which are written anew after optimizer steps.

They are a copy: an engine goes on with the weights of one version while the optimizer writes the model's. `update`
writes the copy in place, so that CUDA graphs, which have its addresses, stay valid.

    FP8 weight     quantized as a training step does it, with the same bits, layer by layer
    kv_b_proj      dequantized for W_UK and W_UV, too
    other weights  cast to the activations' dtype; norms, gates and their biases as they are

A training step quantizes the weights for itself: in its first forward pass, into memory that is new in each step, or
that a CUDA graph uses for other tensors, too. It frees them when the optimizer has written the weights. So serving,
which comes after that, has tensors of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octile.formats import BLOCK
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.models.names import to_hf
from octile.nn.functional import result_dtype
from octile.scaled import quantize
from octile.serve.weights.block_weights import Weight
from octile.serve.weights.weights import (
    ReadWeight,
    WeightReader,
    assemble,
    has_power_of_2_scales,
    served_recipes,
    write_parts,
)


class LiveWeights:
    """The weights of a model that is trained in this process, for the `ModelRunner` of one engine.

    `Engine.update_weights` brings them up to date; nothing else changes them.

    Args:
        model: the model, whole and on its device.
        dtype: dtype of the activations and of weights that are not in FP8, bfloat16 or float32: that in which training
            computes. None: that of `model.log_probs`, which on a GPU is the `compute` dtype of the model's recipe.

    Attributes:
        weights: the weights; their tensors have the same addresses for good.

    Raises:
        TypeError: as `ServedWeights.of_model`, or dtype is another one.
        ValueError: as `check`.
    """

    def __init__(self, model: DeepseekV3, dtype: torch.dtype | None = None):
        self._recipes = served_recipes(model)
        self._model = model
        self._shapes = {name: whole.shape for name, whole in meta_model(model.config).state_dict().items()}
        self.check()
        power_of_2 = has_power_of_2_scales(self._recipes)
        with torch.inference_mode(False), torch.no_grad():
            read, read_experts = self._readers(copies=True)
            self.weights = assemble(
                model.config, dtype or _dtype_of(model), power_of_2, read, read_experts=read_experts
            )

    def check(self) -> None:
        """Check that the model can be served as it is now.

        Raises:
            ValueError: a weight is NaN or Inf, the model is spread over ranks, a layer was replaced, or one has a
                recipe that is not served or that it had not when this object was made.
        """
        tensors = self._model.state_dict()
        for name, shape in self._shapes.items():
            found = tensors.get(name)
            if type(found) is not Tensor or found.shape != shape:
                raise ValueError(f"model must be whole in this process, but {name} is spread over ranks or replaced")
        if served_recipes(self._model) != self._recipes:
            raise ValueError("model must have the recipes that it had when its LiveWeights were made")
        values = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        limits = torch.stack([torch.stack(tensor.aminmax()).float() for tensor in values.values()])
        are_finite = limits.isfinite().all(1).tolist()
        for name, is_finite in zip(values, are_finite, strict=True):
            if not is_finite:
                raise ValueError(f"model must have finite weights, but {name} holds NaN or Inf: its training diverged")

    @torch.no_grad()
    def update(self) -> None:
        """Write the weights that the model has now, after `check`; for `Engine.update_weights`."""
        read, read_experts = self._readers(copies=False)
        reader = WeightReader(self._model.config, self.weights.dtype, read, read_experts=read_experts)
        write_parts(self.weights, reader)

    def _readers(self, copies: bool) -> tuple[ReadWeight, ReadWeight]:
        """Return what reads a weight of the model by its name in a checkpoint, and those of all experts of a layer.

        Args:
            copies: whether results are tensors of their own, and none is a parameter's memory.
        """
        state = self._model.state_dict()
        tensors = to_hf(state, self._model.config)

        def quantized(layer: str, weight: Tensor) -> Weight:
            recipe = self._recipes.get(layer)
            if recipe is None or recipe.formats is None:
                return weight.clone() if copies else weight
            return quantize(weight, BLOCK, scale=recipe.formats.w.scale)

        def read(name: str) -> Weight:
            return quantized(name.removesuffix(".weight"), tensors[name])

        def read_experts(name: str) -> Weight:
            experts, _, layer = name.removesuffix(".weight").rpartition(".")
            if layer == "down_proj":
                stacked = state[f"{experts}.down"]
            else:
                gate, up = state[f"{experts}.gate_up"].chunk(2, dim=1)
                stacked = gate if layer == "gate_proj" else up
            return quantized(f"{experts}.0.{layer}", stacked)

        return read, read_experts


def _dtype_of(model: DeepseekV3) -> torch.dtype:
    """Return the dtype in which `model.log_probs` computes what is not quantized."""
    with model.training_precision():
        return result_dtype(model.lm_head.weight)
