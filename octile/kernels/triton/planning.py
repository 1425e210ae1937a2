"""Triton kernels of launches on the meta device, for `octile.kernels.planning` and `compile_all`."""

import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelParam


@dataclass(frozen=True)
class TritonLaunch:
    """A launch of a Triton kernel, with its arguments and options."""

    function: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return str(self.function.__name__)

    @property
    def key(self) -> Hashable:
        """What decides on the machine code for a GPU, as Triton specializes kernels."""
        parameters = {parameter.name: parameter for parameter in self.function.params}
        values = dict(zip(self.function.arg_names, self.args, strict=False)) | self.options
        return (self.function, *((k, _specialization(parameters.get(k), value)) for k, value in values.items()))

    def compile_ahead(self, pool: Executor, device: torch.device) -> "Future[Any]":
        """Have a pool compile the kernel for a GPU, or read it from Triton's cache on the disk, before it is launched.

        A launch finds it in Triton's cache of the process, or compiles it if it is not there yet.
        """
        return pool.submit(self._compile, device)

    def _compile(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.function.warmup(*self.args, grid=(1,), **self.options)


def _specialization(parameter: KernelParam | None, value: Any) -> Hashable:
    """Return what the machine code depends on: the dtype of a tensor, whether a number is 1 or a multiple of 16."""
    if isinstance(value, Tensor):
        return value.dtype
    if parameter is None or parameter.is_constexpr or not isinstance(value, int | float):
        return value
    if isinstance(value, float) or parameter.do_not_specialize:
        return type(value).__name__
    return value == 1, value % 16 == 0, value.bit_length() > 31


@contextmanager
def recorded_launches(record: Callable[[TritonLaunch], None]) -> Iterator[None]:
    """A context that records this thread's launches of Triton kernels instead of running them."""
    run, recorded = JITFunction.run, threading.get_ident()

    def run_or_record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != recorded:
            return run(self, *args, grid=grid, warmup=warmup, **options)
        return record(TritonLaunch(self, args, options))

    JITFunction.run = run_or_record
    try:
        yield
    finally:
        JITFunction.run = run
