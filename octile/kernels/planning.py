"""Planning on the meta device: which kernels launches need, before there is data for them.

A launcher takes tensors of the meta device as it takes those of a GPU, up to the kernel, which is recorded and not
launched. Then other threads compile what was recorded (`octile.kernels.compile_ahead`), each kernel with its own
function, while the data of a run is prepared.
"""

from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch


class PlannedKernel(Protocol):
    """A kernel that a launch needs."""

    @property
    def name(self) -> str:
        """The name of the kernel."""
        ...

    @property
    def key(self) -> Hashable:
        """What decides on the machine code."""
        ...

    def compile_ahead(self, pool: Executor, device: torch.device) -> Future[Any]:
        """Have a pool compile it where its launch on a GPU will find it."""
        ...


class NotLaunched(Exception):
    """A launch on the meta device ends here: its kernel is recorded."""


_recorded: ContextVar[dict[Hashable, PlannedKernel] | None] = ContextVar("recorded kernels", default=None)


@contextmanager
def recorded_kernels() -> Iterator[Mapping[Hashable, PlannedKernel]]:
    """Record the kernels that launches of this thread on the meta device need: each once, in their order."""
    kernels: dict[Hashable, PlannedKernel] = {}
    token = _recorded.set(kernels)
    try:
        yield kernels
    finally:
        _recorded.reset(token)


def record(kernel: PlannedKernel) -> None:
    """Record a kernel whose launch was planned.

    Raises:
        ValueError: no kernels are recorded here, so that the meta device cannot stand for a GPU.
    """
    kernels = _recorded.get()
    if kernels is None:
        raise ValueError(f"{kernel.name} cannot be launched on the meta device: nothing records its launch")
    kernels.setdefault(kernel.key, kernel)
