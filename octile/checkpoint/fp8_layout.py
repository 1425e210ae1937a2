"""How published FP8 checkpoints store a model: which weights are FP8, under which names, in which blocks.

    X.weight             F8_E4M3 [N, K]                        value = X.weight · X.weight_scale_inv, a scale
    X.weight_scale_inv   F32 [⌈N/128⌉, ⌈K/128⌉]                for each block of 128×128

Which ones is decided by name: the 2-D weights of projections (`q_proj`, `kv_a_proj_with_mqa`, `gate_proj`, …) and of
experts. Those make up nearly all parameters and products of a model; embedding, head, norms and gates are small and
sensitive and stay, and so does `eh_proj` of multi-token prediction.  Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.1
and the weights published with it.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octile.checkpoint.tensor_file import TensorSpec
from octile.scaled import ScaledTensor, dequantize, quantize

RULE = (
    "2-D weights of projections (…_proj…) and of experts become FP8; embeddings, heads, norms, gates, routers, "
    "eh_proj and weights_proj stay, as does every other tensor"
)
BLOCK = (128, 128)
SCALE_SUFFIX = "_scale_inv"
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}

_STAYS = re.compile(r"embed|norm|head|^gate$|router|_gate$|^eh_proj$|^weights_proj$")
_USUAL = re.compile(r"embed|norm|head|^gate$|^eh_proj$")  # what every engine leaves alone without being told


def is_stored_in_fp8(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a BF16 checkpoint is stored in FP8: see RULE."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    projection = "_proj" in layer or "experts" in module.split(".")
    return kind == "weight" and len(shape) == 2 and projection and not _STAYS.search(layer)


def fp8_specs(name: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
    """The two tensors that store a weight in FP8."""
    blocks = tuple(-(-extent // side) for extent, side in zip(shape, BLOCK, strict=True))
    return {
        name: TensorSpec.of(torch.float8_e4m3fn, shape),
        name + SCALE_SUFFIX: TensorSpec.of(torch.float32, blocks),
    }


def quantize_weight(name: str, weight_NK: Tensor) -> ScaledTensor:
    """A weight, or rows of it that begin at a multiple of 128, in E4M3 with one FP32 scale a block.

    Raises:
        ValueError: it holds NaN or Inf, which would make a whole block NaN.
    """
    q = quantize(weight_NK, BLOCK)
    if not q.scale.isfinite().all():
        raise ValueError(f"{name} holds NaN or Inf and cannot be stored in FP8")
    return q


def dequantize_weight(data_NK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a weight, or of rows of it that begin at a multiple of 128. Scales of any type (UE8M0) will do."""
    return dequantize(ScaledTensor(data_NK, scale.float(), BLOCK), dtype)


def is_fp8(spec: TensorSpec) -> bool:
    return spec.dtype == "F8_E4M3"


def is_scale(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a tensor is the scale of an FP8 weight among specs."""
    weight = name.removesuffix(SCALE_SUFFIX)
    return weight != name and weight in specs and is_fp8(specs[weight])


def check_scales(specs: Mapping[str, TensorSpec]) -> None:
    """Every FP8 tensor must have a scale of the right shape.

    Raises:
        ValueError: one has none, or of another shape.
    """
    for name, spec in specs.items():
        if not is_fp8(spec):
            continue
        scale = name + SCALE_SUFFIX
        if scale not in specs:
            raise ValueError(f"{name} is FP8, but the checkpoint has no {scale}")
        if len(spec.shape) != 2:
            raise ValueError(f"{name} is FP8 of shape {list(spec.shape)}, but only matrices have blocks of 128×128")
        needed = fp8_specs(name, spec.shape)[scale].shape
        if specs[scale].shape != needed:
            raise ValueError(f"{scale} must be {list(needed)} for {list(spec.shape)}, not {list(specs[scale].shape)}")


def is_fp8_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json announces FP8 weights in this layout.

    Raises:
        ValueError: it announces another quantisation.
    """
    announced = config.get("quantization_config")
    if announced is None:
        return False
    method, block = announced.get("quant_method"), announced.get("weight_block_size")
    if method != "fp8" or block != list(BLOCK):
        raise ValueError(
            f"quantization_config must be 'fp8' with weight_block_size {list(BLOCK)}, not {method!r} with {block}"
        )
    return True


def with_quantization(config: Mapping[str, Any], kept: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """config.json for FP8 weights.

    Layers that stay are listed as `modules_to_not_convert` if some of them are not those that every engine leaves
    alone by itself; DeepSeek's have no such list.

    Args:
        kept: the tensors that are not FP8.
    """
    layers = [n.removesuffix(".weight") for n, s in kept.items() if n.endswith(".weight") and len(s.shape) == 2]
    unusual = any(not _USUAL.search(layer.rpartition(".")[2]) for layer in layers)
    listed = {"modules_to_not_convert": sorted(layers)} if unusual else {}
    return {**config, "quantization_config": {**QUANTIZATION_CONFIG, **listed}}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json for weights that are not quantised."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
