"""How the operators of `octile::` are declared: by their reference, a fake for tracing, and a kernel for each device.

It reads as `torch.library.custom_op` does, of which a call costs 14 µs of host time, and 33 µs where an argument is
written: its dispatch enters Python for autograd, for version counters and for the kernel. Here it enters Python once,
which costs 5 µs (seven arguments, torch 2.13, one core of a server's CPU).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Function = Callable[..., Any]
# Where torch.compile left a caller in Python, it would trace the kernel by itself. `torch.compiler.disable` forbids it,
# too, but costs 1 µs at every call; this is said once: neither the function, nor what it calls.
UNTRACED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
LIBRARIES: dict[str, torch.library.Library] = {}  # by operator; what is dropped here is no operator any more


def operator(*, writes: tuple[str, ...] = ()) -> Callable[[Function], "Operator"]:
    """Decorates an operator's reference, whose arguments are annotated; `writes` names those that it writes."""
    return functools.partial(Operator, writes=writes)


class Operator:
    """An operator without a gradient; `overload` is what torch's own functions take, `torch.library.opcheck` say.

    A call raises TypeError where something else is given for a tensor, and RuntimeError where grad mode is on and an
    argument requires a gradient.
    """

    def __init__(self, reference: Function, writes: tuple[str, ...]) -> None:
        functools.update_wrapper(self, reference)
        self.name, self.reference, self.writes = reference.__name__, reference, writes
        self.kernels: dict[str, Function] = {}  # by device
        LIBRARIES[self.name] = library = torch.library.Library("octile", "FRAGMENT")  # drops a reloaded module's
        schema = torch.library.infer_schema(reference, mutates_args=writes, op_name=self.name)
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.octile, self.name).default
        self._tensors = [
            (i, argument.name, Tensor if isinstance(argument.type, torch.TensorType) else (Tensor, type(None)))
            for i, argument in enumerate(self.overload._schema.arguments)
            if argument.type.isSubtypeOf(torch.OptionalType.ofTensor())
        ]
        library.impl(self.name, self._entry(reference), "CompositeExplicitAutograd")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.overload(*args, **kwargs)
        except (RuntimeError, AttributeError, TypeError):  # torch's own error is a RuntimeError, and None passes
            for i, name, kind in self._tensors:
                if not isinstance(t := args[i] if i < len(args) else kwargs.get(name), kind):
                    check_tensor(name, t)
            raise

    def register_fake(self, function: Function) -> Function:
        """Decorates what returns the shapes, dtypes and strides of the reference's results, without numbers."""

        def on_one_device(*args: Any) -> Any:
            # torch calls it, too, where a single tensor lies on meta: the result would be of the others' device
            places = [(name, args[i].device) for i, name, _ in self._tensors if i < len(args) and args[i] is not None]
            for name, device in places[1:]:
                if device != places[0][1]:
                    raise ValueError(f"{places[0][0]} lies on {places[0][1]} but {name} on {device}")
            return function(*args)

        torch.library.register_fake(f"octile::{self.name}", self._entry(on_one_device), lib=LIBRARIES[self.name])
        return function

    def register_kernel(self, device: str) -> Callable[[Function], Function]:
        """Decorates what replaces the reference on a device, "cuda" say."""

        def register(function: Function) -> Function:
            self.kernels[device] = function
            LIBRARIES[self.name].impl(self.name, self._entry(function), device.upper())
            return function

        return register

    def _entry(self, function: Function) -> Function:
        """The function as torch's dispatcher calls it."""
        arguments = self.overload._schema.arguments
        tensors = [i for i, argument in enumerate(arguments) if isinstance(argument.type, torch.TensorType)]
        written = [i for i, argument in enumerate(arguments) if argument.name in self.writes]

        def entry(*args: Any) -> Any:
            if torch.is_grad_enabled():
                for i in tensors:
                    if args[i].requires_grad:
                        raise RuntimeError(f"octile::{self.name} has no gradient: octile.nn.Linear trains in 8 bits")
            for i in written:
                torch.autograd.graph.increment_version(args[i])
            return function(*args)

        set_code_exec_strategy(entry.__code__, UNTRACED)
        return entry


def check_tensor(name: str, t: object) -> None:
    """Refuses what is no tensor."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(t).__name__}")
