"""A model as a Hugging Face folder, as transformers, vLLM and SGLang read it, and back.

    config.json                  the model's shape, and `quantization_config` where weights are FP8
    model.safetensors            the weights, or several files and model.safetensors.index.json
    octile.json                  checksums of the weight files
    tokenizer.json, …            what the caller adds

In FP8 the projections take one byte a parameter (`fp8_layout.py`) and everything else is BF16; the gates' correction
bias, which moves in steps of 0.001, is always FP32. transformers writes no multi-token prediction layer, and a model
loaded from such a folder has none.
"""

import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from octile.checkpoint.files import finish_interrupted, read_json, staged, write_json
from octile.checkpoint.fp8_layout import (
    SCALE_SUFFIX,
    check_scales,
    dequantize_weight,
    fp8_specs,
    is_fp8,
    is_fp8_config,
    is_scale,
    is_stored_in_fp8,
    quantize_weight,
    with_quantization,
    without_quantization,
)
from octile.checkpoint.shards import Shards, plan_shards, write_index
from octile.checkpoint.tensor_file import TORCH_DTYPES, TensorFileWriter, TensorSpec, writing
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.names import to_hf
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe

CONFIG = "config.json"
Weights = Literal["fp8", "bf16", "float32"]
WIDE = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32}  # of what is not FP8


def save(model: DeepseekV3, folder: str | Path, weights: Weights = "fp8", files: Iterable[str | Path] = ()) -> None:
    """Writes a model that other engines load.

    What stood in the folder before is replaced at once and as a whole; files of other names stay.

    Args:
        model: on any device, its layers converted to FP8 or not.
        folder: made if it is not there.
        weights: "fp8", "bf16" or "float32". FP8 and BF16 round; "float32" keeps FP32 parameters as they are.
        files: tokenizer and the like, copied under their names.

    Raises:
        TypeError: model is another class: only this model's names are known in Hugging Face's layout.
        ValueError: weights is none of these, or a weight holds NaN or Inf and cannot be quantised.
        FileNotFoundError: one of files is missing.
        OSError: the disk is full. What stood in the folder before is untouched.
    """
    if not isinstance(model, DeepseekV3):
        raise TypeError(f"model must be a DeepseekV3, not {type(model).__name__}")
    if weights not in WIDE:
        raise ValueError(f"weights must be {', '.join(map(repr, WIDE))}, not {weights!r}")
    others = [Path(file) for file in files]
    for other in others:
        if not other.is_file():
            raise FileNotFoundError(f"files names {other}, which does not exist")

    tensors = to_hf(model.state_dict(), model.config)
    specs = {name: storage_specs(name, tuple(tensor.shape), weights) for name, tensor in tensors.items()}
    plan = plan_shards({name: sum(spec.nbytes for spec in stored.values()) for name, stored in specs.items()})
    with staged(Path(folder)) as staging:
        for file, names in plan.items():
            with writing(staging / file, {n: spec for name in names for n, spec in specs[name].items()}) as out:
                for name in names:
                    _write(out, name, tensors[name], specs[name])
        weight_map = {file: [n for name in names for n in specs[name]] for file, names in plan.items()}
        write_index(staging, weight_map, sum(s.nbytes for stored in specs.values() for s in stored.values()))
        write_json(staging / CONFIG, _config_json(model.config, weights, specs))
        for other in others:
            shutil.copyfile(other, staging / other.name)


def load(path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> DeepseekV3:
    """Reads a model from a Hugging Face folder or from the folder of a training run, which holds one as `model/`.

    From FP8 weights it computes in FP8 too: its layers are converted to `Recipe.deepseek_v3()`.

    Args:
        path: a folder written by octile, transformers, or published; weights in FP8, BF16, FP16 or FP32.
        dtype: of the parameters; FP8 weights are dequantised to it.
        device: where the parameters shall lie.

    Returns:
        The model in evaluation mode.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is missing.
        ValueError: a file is damaged; config.json is not of a DeepSeek model; a tensor is missing, of another shape
            than config.json says, or unknown.
    """
    shards = _open(path)
    config = _config(shards)
    with torch.device("meta"):
        model = DeepseekV3(config).to(dtype)
    _check_shapes(model, shards, f"by its {CONFIG}")

    model = model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    _fill(model, shards)
    if any(is_fp8(spec) for spec in shards.specs.values()):
        apply_recipe(model, Recipe.deepseek_v3())
    return model.eval()


def load_weights(model: DeepseekV3, path: str | Path) -> None:
    """Overwrites a model's parameters and buffers with those that a folder holds, one tensor at a time.

    FP8 weights are dequantised to the parameters' dtype. To FP32 that is exact up to FP32's own rounding, and blocks of
    128×128 that are quantised again become the same FP8 numbers and scales where the scales are amax / 448 in FP32,
    as octile and DeepSeek write them (a power of two is another scale and makes other numbers).

    Args:
        model: on any device, converted or not; its recipe stays as it is.
        path: as in `load`.

    Raises:
        FileNotFoundError, ValueError: as in `load`; a tensor has another shape than the model's. Nothing was changed
            then, unless a file fails its checksum on the way.
    """
    shards = _open(path)
    _check_shapes(model, shards, "in the model")
    _fill(model, shards)


def read_model_config(path: str | Path) -> ModelConfig:
    """The shape of the model in a folder that `load` reads; without multi-token prediction where its weights are not.

    Raises:
        FileNotFoundError, ValueError: as in `load`.
    """
    return _config(_open(path))


def has_fp8_weights(path: str | Path) -> bool:
    """Whether a folder that `load` reads has weights in FP8. Raises as `load` does."""
    return any(is_fp8(spec) for spec in _open(path).specs.values())


def storage_specs(name: str, shape: tuple[int, ...], weights: Weights) -> dict[str, TensorSpec]:
    """The tensors that store one of a model's under its Hugging Face name: itself, and in FP8 its scale."""
    if weights == "fp8" and is_stored_in_fp8(name, shape):
        return fp8_specs(name, shape)
    exact = name.endswith("e_score_correction_bias")
    return {name: TensorSpec.of(torch.float32 if exact else WIDE[weights], shape)}


def _write(out: TensorFileWriter, name: str, tensor: Tensor, stored: Mapping[str, TensorSpec]) -> None:
    if name + SCALE_SUFFIX in stored:
        q = quantize_weight(name, tensor)
        out.write(name, q.data)
        out.write(name + SCALE_SUFFIX, q.scale)
    else:
        out.write(name, tensor.to(TORCH_DTYPES[stored[name].dtype]))


def _config_json(
    config: ModelConfig, weights: Weights, specs: Mapping[str, Mapping[str, TensorSpec]]
) -> dict[str, Any]:
    said = without_quantization(config.to_hf())
    said.pop("dtype", None)  # transformers' newer name for the next line, as it may have been read
    said["torch_dtype"] = str(WIDE[weights]).removeprefix("torch.")
    if weights != "fp8":
        return said
    return with_quantization(said, {name: s[name] for name, s in specs.items() if name + SCALE_SUFFIX not in s})


def checkpoint_folder(path: str | Path) -> Path:
    """The Hugging Face folder that a path names: its own or, of a training run, that of its model.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    for folder in (path / "model", path):
        finish_interrupted(folder)
        if (folder / CONFIG).exists() and not (folder / "metrics.jsonl").exists():  # that one is a run's own
            return folder
    if (path / "metrics.jsonl").exists():
        raise FileNotFoundError(f"the run at {path} has no model yet: octile train --resume --out {path} finishes it")
    raise FileNotFoundError(f"no checkpoint at {path}: neither {CONFIG} nor model/{CONFIG} is there")


def _open(path: str | Path) -> Shards:
    """The weights that a path names, their quantisation checked."""
    shards = Shards(checkpoint_folder(path))
    is_fp8_config(read_json(shards.folder / CONFIG))
    check_scales(shards.specs)
    return shards


def _config(shards: Shards) -> ModelConfig:
    return _without_absent_mtp(ModelConfig.from_hf(read_json(shards.folder / CONFIG)), shards)


def _without_absent_mtp(config: ModelConfig, shards: Shards) -> ModelConfig:
    layer = f"model.layers.{config.num_hidden_layers}."
    if config.num_nextn_predict_layers == 0 or any(name.startswith(layer) for name in shards.specs):
        return config
    warnings.warn(f"{shards.folder} has no multi-token prediction layer: the model is loaded without it", stacklevel=4)
    return replace(config, num_nextn_predict_layers=0)


def _own_tensors(model: DeepseekV3) -> dict[str, Tensor]:
    """Views of the model's tensors under their Hugging Face names; each once, though a checkpoint repeats some."""
    own: dict[int, str] = {}
    tensors = to_hf(model.state_dict(), model.config)
    return {name: tensor for name, tensor in tensors.items() if own.setdefault(id(tensor), name) == name}


def _check_shapes(model: DeepseekV3, shards: Shards, where: str) -> None:
    """Refuses a folder whose tensors are not exactly the model's; `where` says whose shapes those are."""
    found = shards.specs
    for name, tensor in _own_tensors(model).items():
        if name not in found:
            raise ValueError(f"{shards.folder} lacks {name}, {list(tensor.shape)} {where}")
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{name} in {shards.folder} is {list(found[name].shape)}, but {list(tensor.shape)} {where}"
            )
    for name in found.keys() - to_hf(model.state_dict(), model.config).keys():
        if not is_scale(name, found):
            raise ValueError(f"{shards.folder} holds {name}, which the model of its {CONFIG} does not have")


def _fill(model: DeepseekV3, shards: Shards) -> None:
    for name, target in _own_tensors(model).items():
        target.copy_(_read(shards, name, target.dtype))


def _read(shards: Shards, name: str, dtype: torch.dtype) -> Tensor:
    tensor = shards.read(name)
    if not is_fp8(shards.specs[name]):
        return tensor
    return dequantize_weight(tensor, shards.read(name + SCALE_SUFFIX), dtype)
