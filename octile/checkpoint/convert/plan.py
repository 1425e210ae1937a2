"""The plan of a conversion: what happens to every tensor, decided from the headers before anything is written."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octile.checkpoint.convert.config_check import check_config
from octile.checkpoint.convert.engines import dequantization_warnings, engine_warnings
from octile.checkpoint.convert.tensor import Action, Target, choose_action, specs_after
from octile.checkpoint.fp8_layout import (
    COMPRESSED_SUFFIX,
    SCALE_SUFFIX,
    check_scale_values,
    check_scales,
    is_compressed_in_blocks,
    is_fp8,
    is_fp8_config,
    is_stored_in_float32,
    with_quantization,
    without_quantization,
)
from octile.checkpoint.recipe_entry import with_recipe
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TORCH_DTYPES, TensorSpec
from octile.layer_roles import MODELS_WITH_OTHER_LAYERS, check_keep, why_high_precision
from octile.models.hf_config import check_extra

DTYPES = ("torch_dtype", "dtype")  # the older name and the newer of a model's dtype in its config.json
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3")  # of the matrices of a model


@dataclass(frozen=True)
class ConversionPlan:
    """What happens to each tensor of a checkpoint, and the files that result.

    Attributes:
        source: the checkpoint to be converted.
        config: its config.json.
        to: "fp8", "bf16" or "float32".
        actions: tensor of the source → what happens to it.
        files: file → the tensors that it will hold.
        keep: patterns of the layers that stay in high precision besides those of the table.
    """

    source: Shards
    config: Mapping[str, Any]
    to: Target
    actions: Mapping[str, Action]
    files: Mapping[str, Mapping[str, TensorSpec]]
    keep: tuple[str, ...] = ()

    @classmethod
    def make(cls, source: Shards, config: Mapping[str, Any], to: Target, keep: Sequence[str] = ()) -> "ConversionPlan":
        """Decide on every tensor of a checkpoint.

        Args:
            source, config, to, keep: see the attributes.

        Raises:
            TypeError: keep is not a list of patterns.
            ValueError: the checkpoint has the target format already, or is quantized in another way. A key of config
                has another type or is out of range. A tensor has an unknown type. A scale is missing, belongs to no FP8
                tensor, or is not positive. No weight would become FP8. keep has a pattern that matches none, or is
                given for another target.
        """
        check_source(source, config, to)
        if to == "fp8" and _holds_fp8(source, config):
            raise ValueError(f"{source.folder} holds FP8 weights already: there is nothing to convert to fp8")
        check_scale_values(source)
        actions = choose_actions(source.specs, config, to, keep)
        files: dict[str, dict[str, TensorSpec]] = {file: {} for file in source.files}
        for file, content in source.files.items():
            for name, spec in content.specs.items():
                files[file] |= specs_after(name, spec, actions[name])
        return cls(source, config, to, actions, files, tuple(keep))

    @property
    def converted(self) -> list[str]:
        """The names of the weights that are quantized or dequantized."""
        return [n for n, action in self.actions.items() if action not in (Action.CAST, Action.COPY, Action.DROP)]

    @property
    def cast(self) -> list[str]:
        """The names of the tensors in FP32 or FP16 that become BF16."""
        return [n for n, action in self.actions.items() if action is Action.CAST]

    @property
    def unchanged(self) -> list[str]:
        """The names of the tensors that are copied."""
        return [n for n, action in self.actions.items() if action is Action.COPY]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """All tensors of the result."""
        return {name: spec for content in self.files.values() for name, spec in content.items()}

    @property
    def converted_bytes(self) -> int:
        """Bytes of the converted tensors in the result, scales included."""
        before, actions = self.source.specs, self.actions
        return sum(s.nbytes for n in self.converted for s in specs_after(n, before[n], actions[n]).values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What vLLM, SGLang and transformers refuse of the result, or load wrongly."""
        fp8 = [name for name, spec in self.specs.items() if is_fp8(spec)]
        shapes = {name: spec.shape for name, spec in self.specs.items()}
        return (*engine_warnings(shapes, fp8, self.config), *dequantization_warnings(shapes, fp8))

    @property
    def result_config(self) -> dict[str, Any]:
        """config.json of the result. It names no recipe of FP8 weights, unless all that the recipe quantizes are.

        With FP8 weights it announces BF16 in place of FP32, which vLLM refuses for models in FP8. With weights that
        were dequantized to BF16 it announces BF16 in place of FP16, since what was FP16 becomes BF16, too.
        """
        config = with_recipe(self.config, None) if self.to != "fp8" or self.keep else self.config
        if self.to != "fp8":
            dtypes = DTYPES if self.to == "float32" else ()
            config = _with_bfloat16(config, "float16") if self.to == "bf16" else config
            return without_quantization(config) | {name: "float32" for name in dtypes if name in config}
        high_precision = {name: self.source.specs[name] for name in (*self.unchanged, *self.cast)}
        return with_quantization(_with_bfloat16(config, "float32"), high_precision)


def check_source(source: Shards, config: Mapping[str, Any], to: Target) -> None:
    """Check what the headers of a checkpoint and its config.json say of the weights' format.

    Raises:
        ValueError: the checkpoint holds no FP8 weights and to is another format, or it is quantized in another way.
            `quantization_config` has another type. A tensor has an unknown type. A scale is missing, or belongs to no
            FP8 tensor.
    """
    if not _holds_fp8(source, config) and to != "fp8":
        raise ValueError(f"{source.folder} holds no FP8 weights: there is nothing to convert to {to}")
    for name, spec in source.specs.items():
        if spec.dtype not in TORCH_DTYPES:
            raise ValueError(f"{source.path_of(name)}: {name} is of type {spec.dtype}, which torch does not have")
        if name.endswith(".weight") and len(spec.shape) == 2 and spec.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{source.path_of(name)}: {name} is of type {spec.dtype}; weights must be of one of "
                f"{', '.join(WEIGHT_DTYPES)}"
            )
    check_scales(source, COMPRESSED_SUFFIX if is_compressed_in_blocks(config) else SCALE_SUFFIX)


def _holds_fp8(source: Shards, config: Mapping[str, Any]) -> bool:
    return announces_fp8(config) or any(is_fp8(spec) for spec in source.specs.values())


def announces_fp8(config: Mapping[str, Any]) -> bool:
    """Whether a config.json announces FP8 weights in 128×128 blocks, also in the format of compressed-tensors.

    Raises:
        ValueError: it announces another quantization, or `quantization_config` or a key of it has another type.
    """
    check_extra(config)
    return is_compressed_in_blocks(config) or is_fp8_config(config)


def choose_actions(
    specs: Mapping[str, TensorSpec], config: Mapping[str, Any], to: Target, keep: Sequence[str] = ()
) -> dict[str, Action]:
    """Decide what happens to each tensor of a checkpoint.

    Args:
        specs: name → spec of all tensors.
        config: the config.json.
        to: the target format.
        keep: patterns of the layers that stay in high precision besides those of the table.

    Raises:
        TypeError: keep is not a list of patterns.
        ValueError: a key of the configuration has another type, is out of range, or does not fit the others or the
            tensors; no weight would become FP8; keep has a pattern that matches none, or is given for another target.
    """
    check_config(config, specs)
    if keep and to != "fp8":
        raise ValueError(f"keep must be left out of a conversion to {to}: it names layers that do not become FP8")
    kind = config.get("model_type")
    if to == "fp8" and kind in MODELS_WITH_OTHER_LAYERS:
        raise ValueError(f"no weight of a {kind} model can become FP8: its layers are {MODELS_WITH_OTHER_LAYERS[kind]}")
    actions = {name: choose_action(name, specs, to) for name in specs}
    check_keep(keep, [name.rpartition(".")[0] for name, action in actions.items() if action is Action.QUANTIZE])
    if keep:
        actions = {name: choose_action(name, specs, to, keep) for name in specs}
    is_nothing = Action.QUANTIZE not in actions.values() and not any(map(is_fp8, specs.values()))
    if to == "fp8" and is_nothing:
        raise ValueError(f"no weight would become FP8: {_why_nothing(specs, keep)}")
    if to == "fp8" and _is_in_float32(specs):
        copied = [name for name, action in actions.items() if action is Action.COPY and specs[name].dtype == "F32"]
        actions |= {name: Action.CAST for name in copied if not is_stored_in_float32(name)}
    if to == "bf16":
        copied = [name for name, action in actions.items() if action is Action.COPY and specs[name].dtype == "F16"]
        actions |= dict.fromkeys(copied, Action.CAST)
    return actions


def _is_in_float32(specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a checkpoint is FP32 as a whole, such as one of the weights that an optimizer updates."""
    dtypes = {spec.dtype for spec in specs.values()}
    return "F32" in dtypes and dtypes.isdisjoint(("BF16", "F16"))


def _with_bfloat16(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json with BF16 in place of another dtype, of the model and of each part of it."""
    return {
        key: "bfloat16"
        if key in DTYPES and value == dtype
        else _with_bfloat16(value, dtype)
        if key.endswith("_config") and isinstance(value, dict)
        else value
        for key, value in config.items()
    }


def _why_nothing(specs: Mapping[str, TensorSpec], keep: Sequence[str]) -> str:
    reasons = Counter[str]()
    for name, spec in specs.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and len(spec.shape) == 2:
            reasons[why_high_precision(layer, keep) or f"of type {spec.dtype}"] += 1
        else:
            reasons["no weight of a linear layer"] += 1
    return ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common()) or "there are no tensors"
