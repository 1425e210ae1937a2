"""Export of the weights in a training checkpoint, of any number of ranks, as a Hugging Face folder.

One process reads one weight of that folder after another, an expert's at a time, from wherever its rows lie, and writes
it. It needs no process group, no model and no memory for more than the largest weight.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from octile.checkpoint.hugging_face import Weights, write_folder
from octile.checkpoint.sharded import Chunk, ShardedCheckpoint, Sizes
from octile.models.config import ModelConfig
from octile.models.meta import meta_model
from octile.models.names import to_hf
from octile.recipe import Recipe


def export_hugging_face(
    checkpoint: str | Path,
    folder: str | Path,
    config: ModelConfig,
    weights: Weights = "fp8",
    files: Iterable[str | Path] = (),
    prefixes: Sequence[str] = ("model.",),
    check: bool = True,
    recipe: Recipe | None = None,
) -> None:
    """Write the weights of a training checkpoint as a Hugging Face folder, with the bytes that `octile.save` writes.

    Args:
        checkpoint: the checkpoint's folder, a path or URL; of any number of ranks, or of `save_checkpoint`.
        folder, weights, files: as in `octile.save`.
        config: configuration of the model.
        prefixes: what precedes the model's names in the checkpoint; where there are several, the first under which
            there is a tensor: ("ema.", "model.") exports averaged weights with the model's biases of gates.
        check: whether to compare the checksum of each file before its first tensor is read.
        recipe: that of the model, which config.json names if it is batch-invariant and weights are in FP8.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it or of `files` is missing.
        ValueError: a file of the checkpoint is damaged; it lacks a tensor of the model or has it in another shape; a
            weight holds NaN or Inf and cannot be quantized; or weights is unknown. An earlier checkpoint in the folder
            is unchanged.
        OSError: the disk is full. An earlier checkpoint in the folder is unchanged.
    """
    opened = ShardedCheckpoint(checkpoint, check)
    state = meta_model(config).state_dict()
    stored = {name: _stored_name(opened, name, tuple(tensor.shape), prefixes) for name, tensor in state.items()}
    parts = to_hf(state, config)  # views, from which the offsets are taken
    whole_of = _wholes(state, parts)

    def read(name: str) -> Tensor:
        part, whole = parts[name], stored[whole_of[name]]
        shape = opened.specs[whole].shape
        sizes = (1,) * (len(shape) - part.ndim) + tuple(part.shape)
        local = torch.empty(sizes, dtype=opened.dtype(whole))
        opened.fill({whole: Chunk(local, shape, _unravel(int(part.storage_offset()), shape))})
        return local.view(part.shape)

    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    write_folder(folder, config, shapes, read, weights, files, recipe=recipe)


def _stored_name(checkpoint: ShardedCheckpoint, name: str, shape: Sizes, prefixes: Sequence[str]) -> str:
    for stored in (prefix + name for prefix in prefixes):
        if stored in checkpoint.specs:
            if (found := checkpoint.specs[stored].shape) != shape:
                raise ValueError(
                    f"{stored} is {list(found)} in the checkpoint {checkpoint.folder.url}, "
                    f"but {list(shape)} by the model's configuration"
                )
            return stored
    raise ValueError(
        f"the checkpoint {checkpoint.folder.url} lacks {' and '.join(prefix + name for prefix in prefixes)}"
    )


def _wholes(state: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the name of each part to the name of the tensor whose memory it shares."""
    own = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    return {name: own[part.untyped_storage()._cdata] for name, part in parts.items()}


def _unravel(index: int, shape: Sizes) -> Sizes:
    """The position of an element of a contiguous tensor."""
    return tuple(index // math.prod(shape[dim + 1 :]) % shape[dim] for dim in range(len(shape)))
