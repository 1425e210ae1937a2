"""Prepared kernels whose first arguments are tensor maps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from octile.kernels.cuda.jit import specialize, tensor_map
from octile.kernels.cuda.jit.prepared import PreparedKernel
from octile.kernels.cuda.jit.tensor_map import TensorMap


class MappedLaunch(NamedTuple):
    """A kernel and its launch for tensors of certain shapes and strides.

    Attributes:
        kernel, constants, headers: name, constants and headers of the kernel.
        grid, threads: thread blocks, and threads of each.
        maps: what the first addresses of a launch become.
        sizes: arguments after those of a launch.
    """

    kernel: str
    constants: Mapping[str, int | bool]
    headers: Mapping[str, str]
    grid: int
    threads: int
    maps: tuple[TensorMap, ...]
    sizes: tuple[int, ...] = ()


class MappedKernel(PreparedKernel):
    """A kernel with tensor maps, loaded on a GPU, with its launch shape."""

    def __init__(self, made: MappedLaunch, device: torch.device) -> None:
        kernel = specialize.load(made.kernel, made.constants, device, made.headers)
        super().__init__(kernel, made.grid, 1, made.threads, int(made.constants["shared_bytes"]))
        self._made = made

    def arguments(self, values: tuple[Any, ...]) -> list[Any]:
        """Return the kernel's arguments: the first addresses become tensor maps."""
        maps = self._made.maps
        with self.kernel.in_context():
            encoded = [tensor_map.encode(*described) for described in zip(maps, values, strict=False)]
        return [*encoded, *values[len(maps) :], *self._made.sizes]
