"""Prediction of a checkpoint's size from its configuration or from the headers of its files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from octile.checkpoint.convert.architectures import Architecture, ModelType
from octile.checkpoint.convert.config_check import check_config
from octile.checkpoint.convert.engines import dequantization_warnings, engine_warnings
from octile.checkpoint.convert.plan import announces_fp8, check_source, choose_actions
from octile.checkpoint.convert.share import Share, share_of
from octile.checkpoint.convert.tensor import Action, Target, specs_after
from octile.checkpoint.files import CONFIG
from octile.checkpoint.fp8_layout import is_fp8
from octile.checkpoint.hugging_face import storage_specs
from octile.checkpoint.shards import INDEX, SINGLE, Shards
from octile.checkpoint.tensor_file import TensorSpec
from octile.command_text import how_to_download
from octile.models.config import ModelConfig
from octile.models.hf_config import MODEL_TYPES as DEEPSEEK
from octile.models.meta import checkpoint_shapes
from octile.validation import quoted, read_json

MAX_EXPERTS = 65_536  # in all layers, each of three tensors that are named one by one; DeepSeek-V3 has 15,104


@dataclass(frozen=True)
class SizePrediction:
    """The predicted size of a checkpoint.

    Attributes:
        to: "fp8", "bf16" or "float32".
        nbytes: bytes of all tensors including scales, `total_size` in an index; the files' headers add some 0.01%.
        share: the share of the FP8 weights. Tensors that a checkpoint repeats count twice.
        repeats: whether the checkpoint repeats the embedding and the head, for a multi-token prediction layer.
        warnings: what vLLM, SGLang and transformers refuse of the checkpoint, or load wrongly.
    """

    to: Target
    nbytes: int
    share: Share
    repeats: bool
    warnings: tuple[str, ...]


def predict_size(config: str | Path | ModelConfig, to: Target = "fp8", keep: Sequence[str] = ()) -> SizePrediction:
    """Predict the size of what `save` or `convert_checkpoint` writes.

    For a configuration of 671B parameters it takes a second.

    Args:
        config: a `ModelConfig`; a config.json of a DeepSeek, Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE model,
            or a folder with one; or a folder with weights of any model, whose headers are used then.
        to: "fp8" (BF16 for the weights that are not FP8), "bf16" or "float32".
        keep: patterns of the layers that stay in high precision, as for `convert_checkpoint`.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: keep is not a list of patterns.
        ValueError: to is none of the three. The configuration is of another model, wrong, or of more than MAX_EXPERTS
            experts. A weight file is damaged. The folder has no FP8 weights to dequantize, or is quantized in another
            way. No weight would become FP8. keep has a pattern that matches none, or is given for another target.
    """
    if to not in get_args(Target):
        raise ValueError(f"to must be 'fp8', 'bf16' or 'float32', not {to!r}")
    if isinstance(config, ModelConfig):
        return _from_config(config, to, keep)
    path = Path(config)
    if (path / SINGLE).exists() or (path / INDEX).exists():
        return _from_headers(Shards(path), read_json(path / CONFIG), to, keep)
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(
            f"config must be a config.json or a folder with one: {file} does not exist{how_to_download(path)}"
        )
    content = read_json(file)
    check_config(content)
    announces_fp8(content)  # raises where it announces another quantization
    kind = content.get("model_type", "deepseek_v3")
    if kind in get_args(ModelType):
        architecture = Architecture.from_hf(content)
        moe_layers = sum(map(architecture.is_moe, range(architecture.num_hidden_layers)))
        key = "num_local_experts" if "num_local_experts" in content else "num_experts"
        _check_experts(moe_layers, architecture.num_experts or 0, key)
        return _from_shapes(architecture.shapes(), content, to, keep)
    if kind not in DEEPSEEK:
        known = ", ".join((*DEEPSEEK, *get_args(ModelType)))
        raise ValueError(
            f"model_type is {quoted(kind)}: from a configuration alone the size is known for {known}; "
            "of any other model the folder must hold the weights, too"
        )
    return _from_config(ModelConfig.from_hf(content), to, keep)


def _check_experts(moe_layers: int, experts: int, key: str) -> None:
    if moe_layers * experts > MAX_EXPERTS:
        raise ValueError(
            f"num_hidden_layers, {key}: a size is predicted for at most {MAX_EXPERTS:,} experts in all layers, "
            f"not for {moe_layers:,} layers of {experts:,}"
        )


def _from_config(config: ModelConfig, to: Target, keep: Sequence[str]) -> SizePrediction:
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    _check_experts(layers - config.first_k_dense_replace, config.n_routed_experts, "n_routed_experts")
    return _from_shapes(checkpoint_shapes(config), config.to_hf(), to, keep)


def _from_shapes(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], to: Target, keep: Sequence[str]
) -> SizePrediction:
    specs = {name: TensorSpec.of(torch.bfloat16, shape) for name, shape in shapes.items()}
    actions = choose_actions(specs, config, to, keep)
    other: Target = "bf16" if to == "fp8" else to
    stored = {
        name: storage_specs(name, shape, to if actions[name] is Action.QUANTIZE else other)
        for name, shape in shapes.items()
    }
    return _prediction(to, specs, stored, config)


def _from_headers(source: Shards, config: Mapping[str, Any], to: Target, keep: Sequence[str]) -> SizePrediction:
    check_source(source, config, to)
    specs = source.specs
    actions = choose_actions(specs, config, to, keep)
    stored = {name: specs_after(name, spec, actions[name]) for name, spec in specs.items()}
    return _prediction(to, specs, stored, config)


def _prediction(
    to: Target,
    before: Mapping[str, TensorSpec],
    stored: Mapping[str, Mapping[str, TensorSpec]],
    config: Mapping[str, Any],
) -> SizePrediction:
    fp8 = [name for name, specs in stored.items() if name in specs and is_fp8(specs[name])]
    nbytes = sum(spec.nbytes for specs in stored.values() for spec in specs.values())
    shapes = {name: spec.shape for name, spec in before.items()}
    warnings = (*engine_warnings(shapes, fp8, config), *dequantization_warnings(shapes, fp8))
    repeats = any(".layers." in name and name.endswith(".embed_tokens.weight") for name in before)
    return SizePrediction(to, nbytes, share_of(fp8, before, config), repeats, warnings)
