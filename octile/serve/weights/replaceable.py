"""The weights of a folder that an engine serves, and others of the same model that replace them in place.

New weights are checked before anything is written: configuration, recipe, names, shapes, formats, a folder's tokenizer,
and that all are finite. They are then written to the same addresses, so that CUDA graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from octile.checkpoint.fp8_layout import is_fp8, is_scale
from octile.checkpoint.hugging_face import OpenFolder, open_folder, opened
from octile.checkpoint.packed import PackedTensors, packed_size
from octile.models.config import ModelConfig
from octile.parallel.shared_buffer import open_buffer
from octile.recipe import Recipe
from octile.serve.weights.source import BufferSource, WeightsSource
from octile.serve.weights.weights import ALL_HEADS, ServedWeights, WeightReader, stored_weights, write_parts
from octile.tokenizer import Tokenizer

UNCOMPARED = ("extra", "aux_loss_alpha", "mtp_loss_weight", "initializer_range")  # that no forward pass reads
HIGH_PRECISION = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class NewWeights:
    """Weights that were checked and can be written.

    Attributes:
        folder: the weights.
        close: frees what they need to be read; called once.
    """

    folder: OpenFolder
    close: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return self.folder.shards.nbytes


class ReplaceableWeights:
    """The weights of a folder, for the `ModelRunner` of one engine.

    `Engine.update_weights` writes those that `new` has; nothing else changes them.

    Args:
        path: a Hugging Face folder or a run.
        dtype: dtype of the activations.
        device: device of the weights.
        drafts: whether to read the multi-token prediction layer, if the model has one.

    Attributes:
        weights: the weights; their tensors have the same addresses for good.
        new: what the next update writes.

    Raises:
        FileNotFoundError, ValueError: as in `octile.load`.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype, device: torch.device, drafts: bool):
        folder = open_folder(path)
        self.new: NewWeights | None = None
        self.weights = ServedWeights.of_folder(folder, dtype, device, drafts=drafts)
        self._config, self._recipe = folder.model_config(), _recipe_of(folder)
        self._is_fp8 = {name: is_fp8(spec) for name, spec in folder.shards.specs.items()}
        self._tokenizer = _tokenizer_of(folder.shards.folder)

    def open(self, source: WeightsSource) -> NewWeights:
        """Open new weights and check them; the engine may step meanwhile.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: the weights are not those of a model of the same configuration, recipe, formats and tokenizer,
                one is NaN or Inf, or a file or a buffer is damaged or cannot be opened.
        """
        if isinstance(source, BufferSource):
            memory = open_buffer(source.address, packed_size(source.layout), self.weights.device)
            close = memory.close
        else:
            close = _nothing
        try:
            if isinstance(source, BufferSource):
                folder = opened(PackedTensors(source.layout, memory), dict(source.config))
            else:
                folder = open_folder(source.path)
                self._check_tokenizer(folder.shards.folder)
            self._check(folder)
        except BaseException:
            close()
            raise
        return NewWeights(folder, close)

    def check(self) -> None:
        """Check that there are new weights.

        Raises:
            ValueError: there are none.
        """
        if self.new is None:
            raise ValueError("weights must be given by ReplaceableWeights.new before they are updated")

    @torch.no_grad()
    def update(self) -> None:
        """Write the new weights, after `check`; for `Engine.update_weights`.

        Raises:
            RuntimeError: they cannot be read any more. Some old weights are replaced then and others are not.
        """
        assert self.new is not None
        new, self.new = self.new, None
        read = stored_weights(new.folder.shards, self.weights.device, ALL_HEADS)
        try:
            write_parts(self.weights, WeightReader(self._config, self.weights.dtype, read))
            if self.weights.device.type == "cuda":
                torch.cuda.synchronize(self.weights.device)  # the caller measures the time
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"new weights have changed since they were checked, and the engine has only some of them: {error}"
            ) from error
        finally:
            new.close()

    def _check_tokenizer(self, folder: Path) -> None:
        """Raise ValueError if a folder has another tokenizer; one of weights alone has none."""
        found = _tokenizer_of(folder)
        if None not in (found, self._tokenizer) and found != self._tokenizer:
            raise ValueError(f"{folder} must have the tokenizer of the model that is served: texts have other tokens")

    def _check(self, folder: OpenFolder) -> None:
        """Raise ValueError unless a folder's weights can replace these."""
        shards = folder.shards
        _check_config(folder.model_config(), self._config, str(shards.folder))
        folder.meta_model()  # checks names, shapes and scales
        if (recipe := _recipe_of(folder)) != self._recipe:
            raise ValueError(
                f"{shards.folder} must have weights {_described(self._recipe)}, as the served ones, not "
                f"{_described(recipe)}"
            )
        for name, spec in shards.specs.items():
            if is_scale(name, shards.specs):
                continue
            if is_fp8(spec) != self._is_fp8.get(name, is_fp8(spec)) or not (
                is_fp8(spec) or spec.dtype in HIGH_PRECISION
            ):
                needed = "F8_E4M3" if self._is_fp8.get(name) else " or ".join(HIGH_PRECISION)
                raise ValueError(f"{name} in {shards.folder} must be {needed}, as the served one, not {spec.dtype}")
        for name in shards.specs:
            if not is_scale(name, shards.specs) and not _is_finite(shards.read(name)):
                raise ValueError(f"{name} in {shards.folder} must be finite, but it holds NaN or Inf")


def _check_config(found: ModelConfig, needed: ModelConfig, where: str) -> None:
    """Raise ValueError if two models compute something else, or have other sizes."""
    for each in fields(ModelConfig):
        values = getattr(found, each.name), getattr(needed, each.name)
        if each.name not in UNCOMPARED and values[0] != values[1]:
            raise ValueError(f"{each.name} in {where} must be {values[1]}, as the served model's, not {values[0]}")


def _tokenizer_of(folder: Path) -> str | None:
    """On what the tokens of a text depend; None if a folder has no tokenizer."""
    try:
        return Tokenizer.load(folder).fingerprint
    except FileNotFoundError:
        return None


def _recipe_of(folder: OpenFolder) -> Recipe | None:
    return folder.recipe() if folder.has_fp8_weights else None


def _described(recipe: Recipe | None) -> str:
    return "without FP8" if recipe is None else f"of the recipe {recipe.name!r} with latents {recipe.latents!r}"


def _is_finite(t: Tensor) -> bool:
    """Whether a stored tensor, which may be in FP8, holds neither NaN nor Inf."""
    if t.dtype == torch.float8_e4m3fn:  # NaN is S.1111.111, and there is no Inf
        return bool((t.view(torch.uint8) & 0x7F != 0x7F).all())
    return bool(torch.stack(t.aminmax()).isfinite().all())


def _nothing() -> None: ...
