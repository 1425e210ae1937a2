"""Planning of the kernels of a model: its passes on the meta device, where operators plan launches for a GPU.

`planned_kernels` is a context for forward and backward passes of a model whose parameters and inputs are on meta. The
modules take the paths of a GPU, under autocast; each operator calls its CUDA kernel's launcher, and returns the result
of its fake.

torch computes many operations on meta by functions that import its compiler, in seconds. `octile.ops.meta_functions`
has others; where one is missing, the plan ends.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from octile.kernels.backends import ONLY_TORCH
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.gemm.num_sms import assume_chip
from octile.kernels.planning import PlannedKernel, record, recorded_kernels
from octile.ops.meta_functions import meta_function
from octile.ops.operator import OPERATORS, Operator

IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


@contextmanager
def planned_kernels(gpu: Chip, compute: torch.dtype) -> Iterator[Mapping[Hashable, PlannedKernel]]:
    """A context that records the kernels which passes on the meta device would launch on a Hopper GPU, by their keys.

    Call `torch.autograd.backward` in it, not `Tensor.backward`. Nothing is launched, and other threads may launch
    kernels meanwhile.

    Args:
        gpu: the GPU.
        compute: the dtype of autocast.
    """
    with (
        recorded_kernels() as kernels, assume_chip(gpu), _triton_recorded(gpu), _without_compiler(),
        _GpuPaths(compute), _Launchers(),
    ):  # fmt: skip
        yield kernels


@contextmanager
def _triton_recorded(gpu: Chip) -> Iterator[None]:
    try:
        from octile.kernels.triton.device import DeviceProperties, assume_device
        from octile.kernels.triton.planning import recorded_launches
    except ImportError:  # a machine without a GPU has no Triton
        yield
        return
    from octile.kernels.hopper import SHARED_BYTES

    with (
        assume_device(DeviceProperties(gpu.whole.multiprocessors, SHARED_BYTES, fp8=True, dependent_launch=True)),
        recorded_launches(record),
    ):
        yield


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Refuse to import torch's compiler in this thread: an operation that needs it ends the plan."""

    class Refusal(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "torch._dynamo" and get_ident() == planning:
                raise ImportError("a plan does not wait for torch's compiler")

    planning, refusal = get_ident(), Refusal()
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)


class _GpuPaths(TorchFunctionMode):
    """Have modules take the paths of a GPU, and compute what autocast computes in its dtype.

    An embedding is cast to that, as the model does it; so what is in FP32 is meant to be computed in FP32.
    """

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == IS_CUDA:
            return True
        if func is F.linear:
            args = tuple(t.to(args[0].dtype) if isinstance(t, Tensor) else t for t in args)
        result = func(*args, **(kwargs or {}))
        return result.to(self.compute) if func is F.embedding else result


class _Launchers(TorchDispatchMode):
    """Call the launchers of octile's operators, and compute shapes without torch's compiler."""

    def __init__(self) -> None:
        super().__init__()
        self._planned: set[Hashable] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or a call would import torch's compiler, to leave it out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (operator := OPERATORS.get(func)) is not None:
            self._plan(operator, args)
            if operator.fake is not None:
                with self:  # the fake's own operations
                    return operator.fake(*args, **kwargs)
        return (meta_function(func) or func)(*args, **kwargs)

    def _plan(self, operator: Operator, args: tuple[Any, ...]) -> None:
        launch, key = operator.kernels.get("cuda"), (operator.name, *map(_described, args))
        if launch is None or operator.name in ONLY_TORCH or key in self._planned:
            return
        self._planned.add(key)
        with suppress(Exception), self:  # NotLaunched; and what cannot be planned is compiled when it is launched
            launch(*args)


def _described(argument: Any) -> Hashable:
    """What a plan depends on."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return tuple(map(_described, argument)) if isinstance(argument, list | tuple) else argument
