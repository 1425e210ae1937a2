"""The plan of a conversion: what happens to every tensor, decided from the headers before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octile.checkpoint.convert.tensor import Action, Target, choose_action, specs_after
from octile.checkpoint.fp8_layout import (
    check_scale_values,
    check_scales,
    is_fp8,
    is_fp8_config,
    with_quantization,
    without_quantization,
)
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TORCH_DTYPES, TensorSpec


@dataclass(frozen=True)
class ConversionPlan:
    """What happens to each tensor of a checkpoint, and the files that result.

    Attributes:
        source: the checkpoint to be converted.
        config: its config.json.
        to: "fp8", "bf16" or "float32".
        actions: tensor of the source → what happens to it.
        files: file → the tensors that it will hold.
    """

    source: Shards
    config: Mapping[str, Any]
    to: Target
    actions: Mapping[str, Action]
    files: Mapping[str, Mapping[str, TensorSpec]]

    @classmethod
    def make(cls, source: Shards, config: Mapping[str, Any], to: Target) -> "ConversionPlan":
        """Decide on every tensor of a checkpoint.

        Raises:
            ValueError: the checkpoint has the target format already, or is quantized in another way; a tensor has an
                unknown type; a scale is missing, belongs to no FP8 tensor, or is not positive.
        """
        announced = is_fp8_config(config)
        fp8 = announced or any(is_fp8(spec) for spec in source.specs.values())
        if fp8 == (to == "fp8"):
            holds = "FP8 weights already" if fp8 else "no FP8 weights"
            raise ValueError(f"{source.folder} holds {holds}: there is nothing to convert to {to}")
        for name, spec in source.specs.items():
            if spec.dtype not in TORCH_DTYPES:
                raise ValueError(f"{source.path_of(name)}: {name} is of type {spec.dtype}, which torch does not have")
        check_scales(source)
        check_scale_values(source)
        actions = {name: choose_action(name, source.specs, to) for name in source.specs}
        files: dict[str, dict[str, TensorSpec]] = {file: {} for file in source.files}
        for file, content in source.files.items():
            for name, spec in content.specs.items():
                files[file] |= specs_after(name, spec, actions[name])
        return cls(source, config, to, actions, files)

    @property
    def converted(self) -> list[str]:
        """The names of the tensors that change their format."""
        return [n for n, action in self.actions.items() if action not in (Action.COPY, Action.DROP)]

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
    def result_config(self) -> dict[str, Any]:
        """config.json of the result."""
        if self.to != "fp8":
            dtypes = ("torch_dtype", "dtype") if self.to == "float32" else ()  # the older name and the newer
            return without_quantization(self.config) | {name: "float32" for name in dtypes if name in self.config}
        return with_quantization(self.config, {name: self.source.specs[name] for name in self.unchanged})
