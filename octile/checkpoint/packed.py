"""The tensors of a checkpoint in one buffer of memory, laid out as the data of a safetensors file, without a file.

The layout has the form of that file's header: {name: {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from octile.checkpoint.tensor_file import TORCH_DTYPES, TensorSpec, encode_header

LABEL = Path("the sent checkpoint")  # in messages, where those about a folder name it


class ReadBytes(Protocol):
    """Memory that can be read."""

    def read(self, begin: int, end: int) -> Tensor:
        """Return bytes begin … end − 1, uint8."""
        ...


def layout_of(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the layout of tensors, each aligned to its element size."""
    header, _ = encode_header(specs, {})
    layout: dict[str, Any] = json.loads(header[8:])
    del layout["__metadata__"]
    return layout


def packed_size(layout: Mapping[str, Any]) -> int:
    """Return the bytes of a layout's buffer."""
    return max((entry["data_offsets"][1] for entry in layout.values()), default=0)


class PackedTensors:
    """Tensors in a buffer, read one at a time; it has what `Shards` has to be read as a folder.

    Args:
        layout: their layout; sizes are whole numbers from 0.
        memory: the buffer.

    Attributes:
        folder, path: what messages call it.
        files: itself, as the only file.
        specs: tensor name → TensorSpec.

    Raises:
        ValueError: a tensor has a dtype that torch lacks, its bytes do not fit its shape or its dtype, or two tensors
            overlap.
    """

    def __init__(self, layout: Mapping[str, Any], memory: ReadBytes):
        self.folder = self.path = LABEL
        self.files = {"": self}
        self.specs: dict[str, TensorSpec] = {}
        self._layout, self._memory = layout, memory
        filled = 0
        for name, entry in sorted(layout.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if dtype not in TORCH_DTYPES:
                raise ValueError(f"{LABEL}: {name} must have a dtype of {', '.join(TORCH_DTYPES)}, not {dtype!r}")
            spec = TensorSpec.of(TORCH_DTYPES[dtype], shape)
            if end - begin != spec.nbytes or begin % TORCH_DTYPES[dtype].itemsize:
                raise ValueError(
                    f"{LABEL}: {name} must have {spec.nbytes} bytes, which begin at a multiple of its element size, "
                    f"not {begin} to {end}"
                )
            if begin < filled:
                raise ValueError(
                    f"{LABEL}: {name} must begin after the tensor before it, from {filled}, not at {begin}"
                )
            self.specs[name], filled = spec, end

    def path_of(self, tensor: str) -> Path:
        """Return what messages call the file that holds a tensor."""
        return self.path

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    def read(self, tensor: str) -> Tensor:
        """Read a whole tensor, on the buffer's device."""
        spec = self.specs[tensor]
        data = self._memory.read(*self._layout[tensor]["data_offsets"])
        return data.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
