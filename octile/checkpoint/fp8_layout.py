"""The layout of published FP8 checkpoints: which weights are FP8, under which names, in which blocks.

    X.weight             F8_E4M3 [N, K]                        value = X.weight · X.weight_scale_inv
    X.weight_scale_inv   F32 [⌈N/128⌉, ⌈K/128⌉]                one scale for each block of 128×128

compressed-tensors, as llm-compressor writes it, calls the scales X.weight_scale; such folders are only converted.

With `scale_fmt: "ue8m0"` in `quantization_config`, as DeepSeek-V3.1 has it, every scale is a power of two.

The name decides, by the table in `octile.layer_roles`: 2-D weights of linear layers are FP8. They hold nearly all
parameters and FLOPs of a model. Embeddings, heads, norms and gates are small and sensitive and stay in high precision.
Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.1 and the weights published with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.checkpoint.packed import PackedTensors
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TensorSpec
from octile.formats import E4M3
from octile.layer_roles import ENCODER, ENCODERS, HEAD, role_of, why_high_precision
from octile.models.hf_config import MODEL_TYPES, check_extra
from octile.recipe import Recipe, ScaleRule
from octile.scaled import ScaledTensor, dequantize, quantize
from octile.validation import quoted

BLOCK = (128, 128)
SCALE_SUFFIX = "_scale_inv"
COMPRESSED_SUFFIX = "_scale"  # of compressed-tensors
COMPRESSED = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)}
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}
# Names of tied output heads other than lm_head: transformers' speech models.
TIED_HEADS = dict.fromkeys(("canary", "cohere_asr", "moonshine", "moonshine_streaming", "whisper"), "proj_out")
GRANITE_EXPERTS = ("input_linear", "output_linear")  # stacked experts in checkpoints of GraniteMoE
OTHER_METHODS = {  # what to do with weights that a quant_method has quantized
    "mxfp4": "load it in transformers with Mxfp4Config(dequantize=True), and take what save_pretrained writes",
}
WORDS = {key: QUANTIZATION_CONFIG[key] for key in ("activation_scheme", "fmt")}  # that have one value in this layout


def is_stored_in_fp8(name: str, shape: tuple[int, ...], keep: Sequence[str] = ()) -> bool:
    """Whether a tensor with this name and shape is stored in FP8: see `octile.layer_roles`.

    Args:
        name, shape: name and shape of the tensor.
        keep: patterns of the layers that stay in high precision besides those of the table.
    """
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and layer != "" and why_high_precision(layer, keep) is None


def is_stored_in_float32(name: str) -> bool:
    """Whether a tensor with this name is FP32 in checkpoints whose other high-precision tensors are BF16."""
    return name.endswith("e_score_correction_bias") or ".indexer.k_norm." in name


def fp8_specs(name: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
    """Return the specs of the two tensors that store a weight in FP8: its values and its scales."""
    blocks = tuple(-(-extent // side) for extent, side in zip(shape, BLOCK, strict=True))
    return {
        name: TensorSpec.of(torch.float8_e4m3fn, shape),
        name + SCALE_SUFFIX: TensorSpec.of(torch.float32, blocks),
    }


def quantize_weight(
    name: str, weight_NK: Tensor, scale: ScaleRule = "float32", stored: Tensor | None = None
) -> ScaledTensor:
    """Quantize a weight to E4M3 with one FP32 scale per 128×128 block.

    A block that has not changed since it was read from a checkpoint gets the scale and the encoded values that it had
    there, whatever rule they were made by.

    Args:
        name: name of the weight, for the error message.
        weight_NK: the weight, or rows of it that begin at a multiple of 128.
        scale: the rule for the scales of the other blocks.
        stored: float32 [⌈N/128⌉, ⌈K/128⌉], the scales that the weight had in a checkpoint.

    Raises:
        ValueError: it holds NaN or Inf, which would make a whole block NaN.
    """
    q = quantize(weight_NK, BLOCK, scale=scale)
    if not q.scale.isfinite().all():
        raise ValueError(f"{name} holds NaN or Inf and cannot be stored in FP8")
    return q if stored is None else _with_stored_scales(q, weight_NK, stored.to(q.device))


def _with_stored_scales(q: ScaledTensor, weight_NK: Tensor, stored: Tensor) -> ScaledTensor:
    """Replace the blocks of a quantized weight that the stored scales represent without an error."""
    expanded_NK = expand_scale(stored, weight_NK)
    data = (weight_NK.float() / expanded_NK).clamp(-E4M3.max, E4M3.max).to(q.data.dtype)
    changed_NK = dequantize_weight(data, stored, weight_NK.dtype) != weight_NK
    rows, cols = (-extent % side for extent, side in zip(weight_NK.shape, BLOCK, strict=True))
    blocks = F.pad(changed_NK, (0, cols, 0, rows)).unflatten(0, (-1, BLOCK[0])).unflatten(2, (-1, BLOCK[1]))
    changed = blocks.any(3).any(1)
    bytes_NK = torch.where(expand_scale(changed, weight_NK), q.data.view(torch.uint8), data.view(torch.uint8))
    return ScaledTensor(bytes_NK.view(q.data.dtype), torch.where(changed, q.scale, stored), BLOCK)


def expand_scale(scale: Tensor, values_NK: Tensor) -> Tensor:
    """Return the scale, or what else there is one of per block, for every element: [N, K]."""
    rows, cols = values_NK.shape
    return scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :cols]


def dequantize_weight(data_NK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize an FP8 weight, or rows of it that begin at a multiple of 128. Scales may have any dtype (UE8M0)."""
    return dequantize(ScaledTensor(data_NK, scale.float(), BLOCK), dtype)


def is_fp8(spec: TensorSpec) -> bool:
    """Whether a stored tensor is E4M3."""
    return spec.dtype == "F8_E4M3"


def is_scale(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a tensor is the scale of an FP8 weight among specs."""
    weight = name.removesuffix(SCALE_SUFFIX).removesuffix(COMPRESSED_SUFFIX)
    return weight != name and weight in specs and is_fp8(specs[weight])


def scale_name(weight: str, specs: Mapping[str, TensorSpec]) -> str:
    """Return the name of an FP8 weight's scale among specs, in which `check_scales` has found it."""
    return weight + (SCALE_SUFFIX if weight + SCALE_SUFFIX in specs else COMPRESSED_SUFFIX)


def check_scales(shards: Shards | PackedTensors, suffix: str = SCALE_SUFFIX) -> None:
    """Check that every FP8 tensor has a scale of the right shape and type, and every scale its FP8 tensor.

    Args:
        shards: the checkpoint.
        suffix: what the name of a scale has after that of its weight.

    Raises:
        ValueError: a scale is missing, has another shape or type, or belongs to no FP8 tensor.
    """
    specs = shards.specs
    for name, spec in specs.items():
        weight = name.removesuffix(suffix)
        is_other = suffix == COMPRESSED_SUFFIX and not weight.endswith(".weight")  # such as logit_scale
        if weight != name and not is_other and not is_scale(name, specs):
            what = f"is {specs[weight].dtype}, not F8_E4M3" if weight in specs else "is missing"
            raise ValueError(f"{shards.path_of(name)}: {name} is the scale of {weight}, which {what}")
        if not is_fp8(spec):
            continue
        file, scale = shards.path_of(name), name + suffix
        if scale not in specs:
            raise ValueError(f"{file}: {name} is FP8, but the checkpoint has no {scale}")
        if len(spec.shape) != 2:
            raise ValueError(
                f"{file}: {name} is FP8 of shape {list(spec.shape)}, but only matrices have blocks of 128×128"
            )
        needed = fp8_specs(name, spec.shape)[name + SCALE_SUFFIX].shape
        if specs[scale].shape != needed:
            raise ValueError(
                f"{shards.path_of(scale)}: {scale} must be {list(needed)} for {list(spec.shape)}, "
                f"not {list(specs[scale].shape)}"
            )
        if specs[scale].dtype not in SCALE_DTYPES:
            raise ValueError(
                f"{shards.path_of(scale)}: {scale} must be {' or '.join(SCALE_DTYPES)}, not {specs[scale].dtype}"
            )


def check_scale_values(shards: Shards | PackedTensors) -> None:
    """Check that every scale of an FP8 tensor is a positive number. Scales are 1/16384 of a checkpoint's values.

    Raises:
        ValueError: a scale is zero, negative, NaN or Inf.
    """
    for file in shards.files.values():
        for name in file.specs:
            if not is_scale(name, shards.specs):
                continue
            scale = file.read(name).float()
            wrong = scale[~(scale.isfinite() & (scale > 0))]
            if wrong.numel():
                raise ValueError(f"{file.path}: {name} must hold positive numbers, but {wrong[0].item()} is in it")


def is_fp8_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json announces FP8 weights in 128×128 blocks.

    Raises:
        ValueError: it announces another quantization, or one of its keys has another type.
    """
    check_extra(config)
    announced = config.get("quantization_config")
    if announced is None:
        return False
    scale_rule(config)  # raises where it is unknown
    method, block = announced.get("quant_method"), announced.get("weight_block_size")
    if method != "fp8" or block != list(BLOCK):
        remedy = "" if method == "fp8" else f": {OTHER_METHODS.get(method or '', 'take the weights in BF16 or FP16')}"
        raise ValueError(
            f"quantization_config must be 'fp8' with weight_block_size {list(BLOCK)}, not {quoted(method)} with "
            f"{quoted(block)}{remedy}"
        )
    for key, value in WORDS.items():
        if announced.get(key) not in (None, value):
            raise ValueError(f"quantization_config.{key} must be {value!r} or absent, not {quoted(announced[key])}")
    return True


def is_compressed_in_blocks(config: Mapping[str, Any]) -> bool:
    """Whether a config.json announces FP8 weights in 128×128 blocks in the format of compressed-tensors."""
    announced = config.get("quantization_config") or {}
    groups = announced.get("config_groups")
    if announced.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict) or not groups:
        return False
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
    return all(isinstance(each, dict) and {key: each.get(key) for key in COMPRESSED} == COMPRESSED for each in weights)


def scale_rule(config: Mapping[str, Any]) -> ScaleRule:
    """The rule by which a checkpoint's scales were made, as its config.json announces it in `scale_fmt`.

    Raises:
        ValueError: it announces an unknown one.
    """
    announced = config.get("quantization_config") or {}
    scale_fmt = announced.get("scale_fmt")
    if scale_fmt not in (None, "float32", "ue8m0"):
        raise ValueError(f"quantization_config.scale_fmt must be 'ue8m0' or absent, not {quoted(scale_fmt)}")
    return "power_of_2" if scale_fmt == "ue8m0" else "float32"


def with_scales_as_announced(recipe: Recipe, config: Mapping[str, Any]) -> Recipe:
    """Return a recipe whose weights have scales as those of a checkpoint, if its config.json announces powers of two.

    Raises:
        ValueError: it announces an unknown rule.
    """
    return recipe.with_weight_scale("power_of_2") if scale_rule(config) == "power_of_2" else recipe


def with_quantization(
    config: Mapping[str, Any], high_precision: Mapping[str, TensorSpec], scale: ScaleRule = "float32"
) -> dict[str, Any]:
    """Return a config.json that announces FP8 weights.

    `modules_to_not_convert` lists the output head, even if its weight is stored only as the embedding's, and all other
    linear layers and experts that are not FP8, unless no engine quantizes any of them anyway. vLLM and transformers
    have one module for the experts of a layer, so its name is listed besides those of the layers in it. Encoders of
    images and audio are listed as a whole, too, since SGLang has other names for some of their layers. Gates are
    listed, too, since vLLM makes those of Qwen3-MoE and PhiMoE FP8, but not DeepSeek's, as in its published
    configurations, which have no such list.

    Args:
        config: the config.json to be extended.
        high_precision: name → spec of the tensors that are not FP8.
        scale: the rule of the scales; powers of two are announced as `scale_fmt`.
    """
    layers = {
        n.removesuffix(".weight") for n, s in high_precision.items() if n.endswith(".weight") and len(s.shape) == 2
    }
    modules = layers | {n.removesuffix(".bias") for n in high_precision if n.endswith(".bias")}
    heads = {n for n in modules if (role := role_of(n)) is not None and role.name == HEAD}
    if not heads & layers or config.get("tie_word_embeddings"):
        # a head that shares the embedding's weight has no tensor of its own
        heads.add(TIED_HEADS.get(config.get("model_type") or "", "lm_head"))
    layers |= {module for name, spec in high_precision.items() if (module := _experts_of(name, spec)) is not None}
    layers |= {
        part for name in layers if (role := role_of(name)) and role.name == ENCODER for part in _encoders_of(name)
    }
    known_gates = config.get("model_type") in MODEL_TYPES
    is_unusual = any(
        (role := role_of(layer)) is None or not (role.is_known or (known_gates and layer.endswith(".gate")))
        for layer in layers
    )
    listed = sorted(heads | layers if is_unusual else heads)
    scale_fmt = {"scale_fmt": "ue8m0"} if scale == "power_of_2" else {}
    return {
        **config,
        "quantization_config": {**QUANTIZATION_CONFIG, **scale_fmt, "modules_to_not_convert": listed},
    }


def _experts_of(name: str, spec: TensorSpec) -> str | None:
    """Return the module of experts that a tensor in high precision is a weight of, as engines call it; or None."""
    layer, _, kind = name.rpartition(".")
    *parents, last = layer.split(".")
    if len(spec.shape) == 3 and last in GRANITE_EXPERTS:
        return ".".join((*parents, "experts"))
    is_weight = len(spec.shape) >= 2 and kind != "bias" and role_of(layer) is None
    before, experts, _ = f"{name}.".partition(".experts.")
    return f"{before}.experts" if is_weight and experts else None


def _encoders_of(layer: str) -> Iterator[str]:
    """Yield the parts of a name that are encoders of images or audio."""
    return (part for part in layer.split(".") if part in ENCODERS)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that announces no quantization."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
