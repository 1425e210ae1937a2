"""How large a checkpoint will be, known before there are weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from octile.checkpoint.convert.share import Share, share_of
from octile.checkpoint.convert.tensor import Target, choose_action, specs_after
from octile.checkpoint.files import read_json
from octile.checkpoint.fp8_layout import is_fp8
from octile.checkpoint.hugging_face import CONFIG, storage_specs
from octile.checkpoint.shards import INDEX, SINGLE, Shards
from octile.checkpoint.tensor_file import TensorSpec
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.names import to_hf


@dataclass(frozen=True)
class SizePrediction:
    """The size of a checkpoint.

    Attributes:
        to: "fp8", "bf16" or "float32".
        nbytes: of all tensors, scales included (an index calls it total_size); the files' headers add some 0.01%.
        share: of the weights that are FP8. Its parameters count what a checkpoint repeats.
        repeats: it does: it has a multi-token prediction layer, which brings the embedding and the head once more.
    """

    to: Target
    nbytes: int
    share: Share
    repeats: bool


def predict_size(config: str | Path | ModelConfig, to: Target = "fp8") -> SizePrediction:
    """Predicts what `save` or `convert_checkpoint` writes. From a configuration 671B parameters take a second.

    Args:
        config: a config.json of a DeepSeek model, or a folder with one; a folder with weights, of any model, whose
            files' headers are used instead; or a `ModelConfig`.
        to: "fp8", with BF16 for what is not quantised, "bf16" or "float32".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: to is none of these; the configuration is not of a DeepSeek model; a weight file is damaged.
    """
    if to not in get_args(Target):
        raise ValueError(f"to must be 'fp8', 'bf16' or 'float32', not {to!r}")
    if isinstance(config, ModelConfig):
        return _from_config(config, to)
    path = Path(config)
    if (path / SINGLE).exists() or (path / INDEX).exists():
        return _from_headers(Shards(path).specs, read_json(path / CONFIG), to)
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"config must be a config.json or a folder with one: {file} does not exist")
    return _from_config(ModelConfig.from_hf(read_json(file)), to)


def _from_config(config: ModelConfig, to: Target) -> SizePrediction:
    with torch.device("meta"):
        model = DeepseekV3(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in to_hf(model.state_dict(), config).items()}
    specs = {name: TensorSpec.of(torch.bfloat16, shape) for name, shape in shapes.items()}
    stored = {name: storage_specs(name, shape, to) for name, shape in shapes.items()}
    return _prediction(to, specs, stored, config.to_hf())


def _from_headers(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], to: Target) -> SizePrediction:
    stored = {name: specs_after(name, spec, choose_action(name, specs, to)) for name, spec in specs.items()}
    return _prediction(to, specs, stored, config)


def _prediction(
    to: Target,
    before: Mapping[str, TensorSpec],
    stored: Mapping[str, Mapping[str, TensorSpec]],
    config: Mapping[str, Any],
) -> SizePrediction:
    fp8 = [name for name, specs in stored.items() if name in specs and is_fp8(specs[name])]
    nbytes = sum(spec.nbytes for specs in stored.values() for spec in specs.values())
    return SizePrediction(to, nbytes, share_of(fp8, before, config), bool(config.get("num_nextn_predict_layers")))
