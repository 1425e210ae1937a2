"""Saving and loading a model as a Hugging Face folder, which transformers, vLLM and SGLang read.

    config.json                  the model's shape, and `quantization_config` where weights are FP8
    model.safetensors            the weights, or several files and model.safetensors.index.json
    tokenizer.json, …            files that the caller adds
    octile.json                  checksums of the weight files, config.json and tokenizer.json

With weights="fp8" the projections take one byte per parameter (`fp8_layout.py`) and everything else is BF16. The gates'
correction bias, which changes by 0.001 per step, is always FP32. transformers writes no multi-token prediction layer,
and a model loaded from such a folder has none.

The norm of the keys of DeepSeek-V3.2's indexer is FP32, too.

Moonlight and Kimi-K2 were published with the rotary frequencies of each layer. They follow from config.json: they are
not read, as in transformers, and not written.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octile.atomic_files import write_json
from octile.checkpoint import recipe_entry
from octile.checkpoint.files import CONFIG, copy, finish_interrupted, staged
from octile.checkpoint.fp8_layout import (
    SCALE_SUFFIX,
    check_scale_values,
    check_scales,
    dequantize_weight,
    fp8_specs,
    is_fp8,
    is_fp8_config,
    is_scale,
    is_stored_in_float32,
    is_stored_in_fp8,
    quantize_weight,
    scale_rule,
    with_quantization,
    without_quantization,
)
from octile.checkpoint.other_models import check_model_type
from octile.checkpoint.packed import PackedTensors
from octile.checkpoint.recipe_entry import with_recipe
from octile.checkpoint.shards import Shards, check_no_adapter, has_weights, plan_shards, write_index
from octile.checkpoint.tensor_file import TORCH_DTYPES, TensorSpec, writing
from octile.command_text import how_to_download, quoted_path, train_command
from octile.layer_roles import why_high_precision
from octile.models import hf_config
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.models.names import to_hf
from octile.nn.conversion import apply_recipe
from octile.nn.linear import recipe_of
from octile.nn.moe import Experts
from octile.recipe import Recipe, ScaleRule
from octile.validation import read_json, warn_caller

MAX_NAMED = 5  # checkpoints in a message
ROTARY_FREQUENCIES = ".self_attn.rotary_emb.inv_freq"  # follow from config.json
Weights = Literal["fp8", "bf16", "float32"]
HIGH_PRECISION = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32}  # dtype if not FP8


def save(model: DeepseekV3, folder: str | Path, weights: Weights = "fp8", files: Iterable[str | Path] = ()) -> None:
    """Write a model as a Hugging Face folder.

    A checkpoint that the folder holds already is replaced atomically; files of other names stay. Blocks of FP8 weights
    that have not changed since they were read from a checkpoint keep its encoded values and scales. Scales of other
    blocks are powers of two if that checkpoint's are. Where some layers of the model are converted to FP8, or some
    weights were FP8 in that checkpoint, other weights are stored in BF16, so that `load` computes each layer as it was.

    Args:
        model: on any device, its layers converted to FP8, some of them, or none.
        folder: created if it does not exist.
        weights: "fp8", "bf16" or "float32". FP8 and BF16 round; "float32" stores FP32 parameters exactly.
        files: further files and folders, such as the tokenizer's files, copied under their names.

    Raises:
        TypeError: model is of another class, whose names in Hugging Face's layout are unknown.
        FileExistsError: folder is that of a run, whose config.json would be replaced.
        NotADirectoryError: folder is a file.
        ValueError: weights is none of the three, or a weight holds NaN or Inf and cannot be quantized.
        FileNotFoundError: one of files is missing.
        OSError: the disk is full. An earlier checkpoint in the folder is unchanged.
    """
    if not isinstance(model, DeepseekV3):
        raise TypeError(f"model must be a DeepseekV3, not {type(model).__name__}")
    if (Path(folder) / "metrics.jsonl").exists():
        raise FileExistsError(f"folder {str(folder)!r} holds a run, whose config.json would be replaced: name another")
    tensors = to_hf(model.state_dict(), model.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_folder(
        folder,
        model.config,
        shapes,
        tensors.__getitem__,
        weights,
        files,
        model.stored_scales,
        recipe_of(model),
        _layers_left_out(model, shapes),
    )


def _layers_left_out(model: DeepseekV3, tensors: Iterable[str]) -> tuple[str, ...]:
    """Return the linear layers, by their names in a checkpoint, whose weights a conversion of the model has left out.

    Weights that were FP8 in the folder from which the model was read are stored so again, also if they are of experts
    of which another weight was not.
    """
    if recipe_of(model) is None and not model.stored_scales:
        return ()
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Experts))
    in_high_precision = {name for name, module in modules if getattr(module, "recipe", None) is None}
    left_out = (name for name in tensors if _module_of(name) in in_high_precision and name not in model.stored_scales)
    layers = (name.removesuffix(".weight") for name in left_out)
    return tuple(layer for layer in layers if why_high_precision(layer) is None)


def write_folder(
    folder: str | Path,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    weights: Weights,
    files: Iterable[str | Path] = (),
    stored_scales: Mapping[str, Tensor] | None = None,
    recipe: Recipe | None = None,
    keep: Sequence[str] = (),
) -> None:
    """Write the tensors of a model, one at a time, as a Hugging Face folder.

    Args:
        folder, weights, files: as in `save`.
        config: configuration of the model.
        shapes: Hugging Face name → shape of each tensor.
        read: returns the tensor of a name, on any device.
        stored_scales: the scales of the FP8 weights of the folder from which the model was read, if any.
        recipe: that of the model, which config.json names if it is batch-invariant and weights are in FP8.
        keep: patterns of the layers that stay in high precision besides those that do so in every model.

    Raises:
        ValueError, FileNotFoundError, OSError: as in `save`.
    """
    check_weights_format(weights)
    others = [Path(file) for file in files]
    for other in others:
        if not other.exists():
            raise FileNotFoundError(f"files names {other}, which does not exist")

    scale = scale_rule(config.extra)
    specs = {name: storage_specs(name, shape, weights, keep) for name, shape in shapes.items()}
    plan = plan_shards({name: sum(spec.nbytes for spec in stored.values()) for name, stored in specs.items()})
    with staged(Path(folder)) as staging:
        for file, names in plan.items():
            with writing(staging / file, {n: spec for name in names for n, spec in specs[name].items()}) as out:
                for name in names:
                    stored_scale = (stored_scales or {}).get(name)
                    for stored, tensor in stored_tensors(name, read(name), specs[name], scale, stored_scale).items():
                        out.write(stored, tensor)
        weight_map = {file: [n for name in names for n in specs[name]] for file, names in plan.items()}
        write_index(staging, weight_map, sum(s.nbytes for stored in specs.values() for s in stored.values()))
        write_json(staging / CONFIG, config_json(config, weights, specs, recipe))
        for other in others:
            copy(other, staging / other.name)


def load(path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> DeepseekV3:
    """Read a model from a Hugging Face folder, or from the folder of a training run, which holds one as `model/`.

    Layers whose weights are FP8 in the folder are converted to `Recipe.deepseek_v3()`, or to `Recipe.exact()` if they
    were trained so (`octile.checkpoint.recipe_entry`), and compute in FP8. All others compute in high precision. The
    experts of a layer have one recipe: they are in high precision if a weight of theirs is, and `octile serve` refuses
    such a folder. Where config.json announces scales that are powers of two (`scale_fmt: "ue8m0"`), the recipe has them
    for weights, too, so that the layers compute with the values of the checkpoint.

    Args:
        path: a folder written by octile or transformers, or published; weights in FP8, BF16, FP16 or FP32.
        dtype: dtype of the parameters; FP8 weights are dequantized to it.
        device: device of the parameters.

    Returns:
        The model in evaluation mode.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is missing.
        ValueError: a file is damaged; config.json is of a model that octile does not load; a tensor is missing,
            unknown, or of another shape than config.json says; a linear weight of the recipe exact is not FP8.
    """
    folder = open_folder(path)
    fp8_layers = folder.fp8_layers()
    recipe = folder.recipe() if fp8_layers else None
    if recipe is not None and recipe.batch_invariant:
        _check_all_fp8(folder, recipe)
    model = folder.meta_model().to(dtype).to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    _fill(model, folder)
    if recipe is not None:
        filter = None if recipe.batch_invariant else lambda name, _: name in fp8_layers
        apply_recipe(model, recipe.with_weight_scale(scale_rule(folder.config)), filter)
    return model.eval()


def load_weights(model: DeepseekV3, path: str | Path) -> None:
    """Overwrite a model's parameters and buffers with those of a folder, one tensor at a time.

    FP8 weights are dequantized to the parameters' dtype. In FP32 that is exact up to FP32's rounding. 128×128 blocks
    that are quantized again then have the same values: with FP32 scales if the scales are amax / 448, which octile and
    DeepSeek-V3 write, and with power-of-two scales (`Recipe.with_weight_scale`) if the scales are powers of two.

    The indexers of a model keep their values where the folder is of a model with dense attention.

    Args:
        model: on any device, converted or not; its recipe does not change.
        path: as in `load`.

    Raises:
        FileNotFoundError, ValueError: as in `load`, or a tensor has another shape than the model's. The model is
            unchanged then, unless a file fails its checksum while it is read.
    """
    folder = open_folder(path)
    _check_shapes(model, folder, "in the model")
    check_scale_values(folder.shards)
    _fill(model, folder)


def read_model_config(path: str | Path) -> ModelConfig:
    """Read the configuration of the model in a folder that `load` reads.

    It has no multi-token prediction layer if the folder has no weights for one.

    Raises:
        FileNotFoundError, ValueError: as in `load`.
    """
    return open_folder(path).model_config()


def has_fp8_weights(path: str | Path) -> bool:
    """Whether a folder that `load` reads has FP8 weights.

    Raises:
        FileNotFoundError, ValueError: as in `load`.
    """
    return open_folder(path).has_fp8_weights


def check_weights_format(weights: str) -> None:
    """Raise ValueError if weights cannot be stored in a format."""
    if weights not in HIGH_PRECISION:
        raise ValueError(f"weights must be {', '.join(map(repr, HIGH_PRECISION))}, not {weights!r}")


def storage_specs(
    name: str, shape: tuple[int, ...], weights: Weights, keep: Sequence[str] = ()
) -> dict[str, TensorSpec]:
    """Return the specs of the tensors that store a tensor of a model: its own, and in FP8 that of its scale.

    Args:
        name: its Hugging Face name.
        shape: its shape.
        weights: as in `save`.
        keep: as in `write_folder`.
    """
    if weights == "fp8" and is_stored_in_fp8(name, shape, keep):
        return fp8_specs(name, shape)
    dtype = torch.float32 if is_stored_in_float32(name) else HIGH_PRECISION[weights]
    return {name: TensorSpec.of(dtype, shape)}


def stored_tensors(
    name: str, tensor: Tensor, stored: Mapping[str, TensorSpec], scale: ScaleRule, stored_scale: Tensor | None
) -> dict[str, Tensor]:
    """Return the tensors that store a tensor of a model, by name.

    Args:
        name, tensor: the tensor and its Hugging Face name.
        stored: their specs, of `storage_specs`.
        scale, stored_scale: arguments of `quantize_weight`, for FP8.

    Raises:
        ValueError: as `quantize_weight`.
    """
    if name + SCALE_SUFFIX in stored:
        q = quantize_weight(name, tensor, scale, stored_scale)
        return {name: q.data, name + SCALE_SUFFIX: q.scale}
    return {name: tensor.to(TORCH_DTYPES[stored[name].dtype])}


def config_json(
    config: ModelConfig, weights: Weights, specs: Mapping[str, Mapping[str, TensorSpec]], recipe: Recipe | None
) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Args:
        config, weights, recipe: arguments of `write_folder`.
        specs: `storage_specs` of each tensor by its name.
    """
    return with_recipe(_quantized_config(config, weights, specs), recipe if weights == "fp8" else None)


def _quantized_config(
    config: ModelConfig, weights: Weights, specs: Mapping[str, Mapping[str, TensorSpec]]
) -> dict[str, Any]:
    result = without_quantization(config.to_hf())
    result.pop("dtype", None)  # transformers' newer name of torch_dtype; the configuration may have been read with it
    result["torch_dtype"] = str(HIGH_PRECISION[weights]).removeprefix("torch.")
    if weights != "fp8":
        return result
    high_precision = {name: s[name] for name, s in specs.items() if name + SCALE_SUFFIX not in s}
    return with_quantization(result, high_precision, scale_rule(config.extra))


def checkpoint_folder(path: str | Path) -> Path:
    """Return the Hugging Face folder that a path names: itself or, if it is a training run, its `model/`.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: its save was interrupted, and it is not writable.
        ValueError: it is a LoRA adapter.
    """
    path = Path(path)
    check_no_adapter(path)
    for folder in (path / "model", path):
        finish_interrupted(folder)
        if _configures_model(folder):
            return folder
    if (path / "metrics.jsonl").exists():
        command = f"{_command_of(path)} --resume --out {quoted_path(path)}"
        if (path / "summary.json").exists():  # of a run that has finished
            file = path / "model" / CONFIG
            raise FileNotFoundError(
                f"the run at {path} is damaged: {file} is missing; {command} writes the model again"
            )
        raise FileNotFoundError(f"the run at {path} has no model yet: {command} finishes it")
    why = f"neither {CONFIG} nor model/{CONFIG} is there"
    if not path.is_dir():
        why = "it is a file, not a folder" if path.exists() else "there is no such folder"
    others = ", ".join(_checkpoints_near(path)[:MAX_NAMED])
    here = others and f"; checkpoints here: {others}"
    raise FileNotFoundError(f"no checkpoint at {path}: {why}{here}{how_to_download(path)}")


def _configures_model(folder: Path) -> bool:
    """Whether a folder has the configuration of a model, not that of a run."""
    return (folder / CONFIG).exists() and not (folder / "metrics.jsonl").exists()


def _checkpoints_near(path: Path) -> list[str]:
    """Checkpoints in the folder above a path, and runs under runs/, where octile puts them: the newest first."""
    found: dict[Path, float] = {}
    for parent in (path.parent, Path("runs")):
        for each in parent.iterdir() if parent.is_dir() and os.access(parent, os.R_OK) else ():
            with suppress(OSError):  # it cannot be read
                if inside := next(filter(has_weights, filter(_configures_model, (each / "model", each))), None):
                    found[each] = (inside / CONFIG).stat().st_mtime
    return [str(each) for each in sorted(found, key=lambda each: -found[each])]


def _command_of(run: Path) -> str:
    """The command that a run's config.json names, or `octile train`, by as many ranks as it names; one if it cannot be
    read.
    """
    try:
        config = read_json(run / CONFIG)
        return str(config["command"]) if "command" in config else train_command(int(config["parallel"]["dp"]))
    except (OSError, ValueError, KeyError, TypeError):
        return train_command(1)


@dataclass(frozen=True)
class OpenFolder:
    """A Hugging Face folder whose headers and config.json have been read, once.

    Attributes:
        shards: the weights; those of `opened` may be in memory.
        config: config.json.
    """

    shards: Shards | PackedTensors
    config: dict[str, Any]

    @property
    def has_fp8_weights(self) -> bool:
        """Whether a weight is in FP8."""
        return any(is_fp8(spec) for spec in self.shards.specs.values())

    def fp8_layers(self) -> frozenset[str]:
        """Return the names of the linear layers, and of the modules of experts, all of whose weights are in FP8."""
        weights = {name: spec for name, spec in self.shards.specs.items() if name.endswith(".weight")}
        fp8, others = (
            {_module_of(name) for name, spec in weights.items() if is_fp8(spec) is wanted} for wanted in (True, False)
        )
        return frozenset(fp8 - others)

    def recipe(self) -> Recipe:
        """Return the recipe of the FP8 weights.

        Raises:
            ValueError: config.json names one that octile does not write.
        """
        with _naming(self.shards.folder / CONFIG):
            return recipe_entry.recipe_of(self.config)

    @property
    def has_indexer(self) -> bool:
        """Whether config.json announces sparse attention."""
        return self.config.get("model_type") in hf_config.SPARSE

    def model_config(self) -> ModelConfig:
        """Return the model's configuration, without a multi-token prediction layer that has no weights.

        Raises:
            ValueError: a key of config.json is missing, has another type or is outside its range.
        """
        with _naming(self.shards.folder / CONFIG):
            config = ModelConfig.from_hf(self.config)
        if config.num_nextn_predict_layers == 0 or has_mtp_weights(config, self.shards.specs):
            return config
        warn_caller(f"{self.shards.folder} has no multi-token prediction layer: the model is loaded without it")
        return replace(config, num_nextn_predict_layers=0)

    def meta_model(self) -> DeepseekV3:
        """Return the model on the meta device, after checking that the folder has its tensors, and their scales.

        Raises:
            ValueError: a tensor is missing, unknown, or of another shape than config.json says; a scale is damaged.
        """
        model = meta_model(self.model_config())
        _check_shapes(model, self, f"by its {CONFIG}")
        check_scale_values(self.shards)
        return model


def has_mtp_weights(config: ModelConfig, names: Iterable[str]) -> bool:
    """Whether there are weights of the multi-token prediction layer among tensors with these names."""
    layer = f"model.layers.{config.num_hidden_layers}."
    return any(name.startswith(layer) for name in names)


def open_folder(path: str | Path) -> OpenFolder:
    """Open the folder that a path names, and check its model type, its quantization and its files without tensors."""
    folder = checkpoint_folder(path)
    config = read_json(folder / CONFIG)
    check_model_type(folder, config)  # first: other models may have other files
    shards = Shards(folder)
    shards.verify_other_files()
    return opened(shards, config)


def opened(shards: Shards | PackedTensors, config: dict[str, Any]) -> OpenFolder:
    """Check the quantization of tensors with the content of their config.json, and return both as a folder."""
    with _naming(shards.folder / CONFIG):
        is_fp8_config(config)  # raises where it announces another quantization
    check_scales(shards)
    return OpenFolder(shards, config)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Context manager in which a ValueError names the file that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _own_tensors(model: DeepseekV3, folder: OpenFolder) -> dict[str, Tensor]:
    """Return views of the model's tensors under their Hugging Face names, without those that a checkpoint repeats.

    Those of indexers are left out where the folder's model has none.
    """
    own: dict[int, str] = {}
    here = next((m.here for m in model.modules() if isinstance(m, Experts)), slice(0, 0))
    tensors = to_hf(model.state_dict(), model.config, here.start)
    if not folder.has_indexer:
        tensors = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    return {name: tensor for name, tensor in tensors.items() if own.setdefault(id(tensor), name) == name}


def _check_shapes(model: DeepseekV3, folder: OpenFolder, where: str) -> None:
    """Check that a folder has exactly the model's tensors; `where` says in the message whose shapes are needed."""
    shards, found = folder.shards, folder.shards.specs
    for name, tensor in _own_tensors(model, folder).items():
        if name not in found:
            raise ValueError(f"{shards.folder} lacks {name}, {list(tensor.shape)} {where}")
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{name} in {shards.folder} is {list(found[name].shape)}, but {list(tensor.shape)} {where}"
            )
    for name in found.keys() - to_hf(meta_model(model.config).state_dict(), model.config).keys():
        if not is_scale(name, found) and not name.endswith(ROTARY_FREQUENCIES):
            raise ValueError(f"{shards.folder} holds {name}, which the model of its {CONFIG} does not have")


def _module_of(weight: str) -> str:
    """Return the module that computes with a weight, by the weight's name in a checkpoint: its layer, or experts."""
    layer = weight.removesuffix(".weight")
    before, experts, _ = layer.partition(".experts.")
    return f"{before}.experts" if experts else layer


def _check_all_fp8(folder: OpenFolder, recipe: Recipe) -> None:
    """Refuse a folder of a batch-invariant recipe that has a weight in high precision which the recipe quantizes."""
    for name, spec in folder.shards.specs.items():
        if is_stored_in_fp8(name, spec.shape) and not is_fp8(spec):
            raise ValueError(
                f"{folder.shards.folder / CONFIG} names the recipe {recipe.name!r}, which needs all linear weights of "
                f"blocks in FP8, but {name} is {spec.dtype}"
            )


def _fill(model: DeepseekV3, folder: OpenFolder) -> None:
    model.stored_scales = {}
    for name, target in _own_tensors(model, folder).items():
        target.copy_(_read(folder.shards, name, model.stored_scales, target.dtype))


def _read(shards: Shards | PackedTensors, name: str, stored_scales: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Read a tensor as it is stored or, if it is in FP8, dequantized to dtype; its scale goes to stored_scales."""
    tensor = shards.read(name)
    if not is_fp8(shards.specs[name]):
        return tensor
    scale = stored_scales[name] = shards.read(name + SCALE_SUFFIX).float()
    return dequantize_weight(tensor, scale, dtype)
