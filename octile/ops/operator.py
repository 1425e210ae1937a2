"""Declaration of the operators of `octile::`: a reference, a fake for tracing, and a kernel for each device.

It is used as `torch.library.custom_op` is, but a call takes less host time. The dispatcher enters Python once and not
separately for autograd, version counters and the kernel; and an eager call on a GPU, which nothing in torch has to see,
calls the kernel without the dispatcher (`Operator._can_call_kernel`):

    this module, without the dispatcher               2 µs
    this module                                       5 µs
    torch.library.custom_op                          14 µs
    torch.library.custom_op that writes an argument  33 µs

(seven arguments, torch 2.13, one core of a server's CPU)
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_local_include_set,
    _increment_version,
    _len_torch_function_stack,
)
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import _profiler_enabled
from torch.compiler import is_dynamo_compiling

from octile.ops.flop_counter import register_formula

Function = Callable[..., Any]
# Without this, torch.compile would trace a kernel whose caller it left in Python. `torch.compiler.disable` prevents
# that too, but costs 1 µs at every call. The strategy is set once, for the function and for what it calls.
UNTRACED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
# What a thread adds to the dispatch keys of tensors, outside of inference mode and inside, if no mode (fake tensors,
# FLOP counters, …), transform or trace is active.
EAGER = (
    (DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)).raw_repr(),
    DispatchKeySet(DispatchKey.BackendSelect).raw_repr(),
)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
NUMBERS = {"float": float, "int": int, "bool": bool}  # by torch's names of types
LIBRARIES: dict[str, torch.library.Library] = {}  # by operator; dropping a library unregisters its operator
OPERATORS: "dict[torch._ops.OpOverload, Operator]" = {}


def operator(*, writes: tuple[str, ...] = (), pinned: tuple[str, ...] = ()) -> Callable[[Function], "Operator"]:
    """Decorate an operator's reference, whose arguments are annotated.

    Args:
        writes: names of the arguments that it writes.
        pinned: names of the tensors that may lie in the host's pinned memory where the others lie on a GPU.
    """
    return functools.partial(Operator, writes=writes, pinned=pinned)


class Operator:
    """An operator without a gradient.

    A call raises TypeError if an argument that must be a tensor is not one, and RuntimeError if grad mode is on and an
    argument requires a gradient. `overload` is for torch's own functions, such as `torch.library.opcheck`.
    """

    def __init__(self, reference: Function, writes: tuple[str, ...], pinned: tuple[str, ...]) -> None:
        functools.update_wrapper(self, reference)
        self.name, self.reference, self.writes, self.pinned = reference.__name__, reference, writes, pinned
        self.kernels: dict[str, Function] = {}  # by device
        self.fake: Function | None = None
        self._cuda_entry: Function | None = None
        # a reloaded module replaces its library
        LIBRARIES[self.name] = library = torch.library.Library("octile", "FRAGMENT")
        schema = torch.library.infer_schema(reference, mutates_args=writes, op_name=self.name)
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.octile, self.name).default
        OPERATORS[self.overload] = self
        self._tensors = [
            (i, argument.name, Tensor if isinstance(argument.type, torch.TensorType) else (Tensor, type(None)))
            for i, argument in enumerate(self.overload._schema.arguments)
            if argument.type.isSubtypeOf(torch.OptionalType.ofTensor())
        ]
        self._tensor_indices = [i for i, _, _ in self._tensors]
        self._list_indices = [
            i
            for i, argument in enumerate(self.overload._schema.arguments)
            if argument.type.isSubtypeOf(torch.ListType.ofTensors())
        ]
        self._numbers = [
            (i, NUMBERS[str(argument.real_type)])
            for i, argument in enumerate(self.overload._schema.arguments)
            if str(argument.real_type) in NUMBERS
        ]
        library.impl(self.name, self._entry(reference), "CompositeExplicitAutograd")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator through torch's dispatcher."""
        try:
            if not is_dynamo_compiling() and not kwargs and self._can_call_kernel(args):
                return self._cuda_entry(*args)  # type: ignore[misc]
            return self.overload(*args, **kwargs)
        except (RuntimeError, AttributeError, TypeError):  # torch's error for a non-tensor is a RuntimeError
            for i, name, kind in self._tensors:
                if not isinstance(t := args[i] if i < len(args) else kwargs.get(name), kind):
                    check_tensor(name, t)
            for i in self._list_indices:
                name = self.overload._schema.arguments[i].name
                check_tensors(name, args[i] if i < len(args) else kwargs.get(name))
            raise

    def _can_call_kernel(self, args: tuple[Any, ...]) -> bool:
        """Return whether there is a CUDA kernel, and the dispatcher would do nothing but call it.

        It would do more if a mode, transform, trace or profiler is active in this thread. It would, too, if an argument
        is of a subclass of Tensor, such as a fake or a distributed tensor, a lazily negated tensor, or a number to
        convert. Tensors in lists are left to the dispatcher.
        """
        if self._cuda_entry is None or self._list_indices or _len_torch_function_stack() or _profiler_enabled():
            return False
        if _dispatch_tls_local_include_set().raw_repr() not in EAGER:
            return False
        for i, kind in self._numbers:
            if i < len(args) and type(args[i]) is not kind:
                return False
        for i in self._tensor_indices:
            t = args[i] if i < len(args) else None
            if t is not None and not (type(t) in PLAIN_TENSORS and t.is_cuda and not t.is_neg()):
                return False
        return True

    def register_fake(self, function: Function) -> Function:
        """Decorate the fake: it returns empty tensors with the shapes, dtypes and strides of the results.

        For a tensor in `pinned` it accepts any memory of the host: a fake tensor does not know whether it is pinned.
        """

        def on_one_device(*args: Any) -> Any:
            # torch also calls a fake if only one tensor is on meta; its result would be on the others' device
            devices = [
                (name, args[i].device)
                for i, name, _ in self._tensors
                if i < len(args) and args[i] is not None and not (name in self.pinned and args[i].is_cpu)
            ]
            for i in self._list_indices:
                name = self.overload._schema.arguments[i].name
                devices += [(f"{name}[{j}]", t.device) for j, t in enumerate(args[i])]
            for name, device in devices[1:]:
                if device != devices[0][1]:
                    raise ValueError(f"{devices[0][0]} is on {devices[0][1]} but {name} on {device}")
            return function(*args)

        self.fake = function
        torch.library.register_fake(f"octile::{self.name}", self._entry(on_one_device), lib=LIBRARIES[self.name])
        return function

    def register_kernel(self, device: str) -> Callable[[Function], Function]:
        """Decorate the function that replaces the reference on a device, such as "cuda"."""

        def register(function: Function) -> Function:
            self.kernels[device], entry = function, self._entry(function)
            LIBRARIES[self.name].impl(self.name, entry, device.upper())
            if device == "cuda":
                self._cuda_entry = entry
            return function

        return register

    def register_flops(self, function: Function) -> Function:
        """Decorate the formula by which torch's `FlopCounterMode` counts calls: it returns their FLOPs."""
        register_formula(self.overload.overloadpacket, function)
        return function

    def _entry(self, function: Function) -> Function:
        """Return a function for torch's dispatcher, which checks gradients and increments version counters."""
        arguments = self.overload._schema.arguments
        tensors = [i for i, argument in enumerate(arguments) if isinstance(argument.type, torch.TensorType)]
        optional = [i for i, argument in enumerate(arguments) if str(argument.type) == "Optional[Tensor]"]
        lists = self._list_indices
        written = [i for i, argument in enumerate(arguments) if argument.name in self.writes]
        no_gradient = (
            f"octile::{self.name} has no gradient: octile.nn.Linear trains in FP8, and what torch.export has exported "
            "runs under torch.no_grad()"
        )

        def entry(*args: Any) -> Any:
            if torch.is_grad_enabled():
                for i in tensors:
                    if args[i].requires_grad:
                        raise RuntimeError(no_gradient)
                for i in optional:
                    if i < len(args) and args[i] is not None and args[i].requires_grad:
                        raise RuntimeError(no_gradient)
                for i in lists:
                    if any(t.requires_grad for t in args[i]):
                        raise RuntimeError(no_gradient)
            for i in written:
                written_tensors = args[i] if i in lists else (args[i],)
                _increment_version(written_tensors)  # torch.autograd.graph.increment_version takes 0.1 µs more
            return function(*args)

        set_code_exec_strategy(entry.__code__, UNTRACED)
        return entry


def check_tensor(name: str, t: object) -> None:
    """Raise TypeError if t is not a tensor."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(t).__name__}")


def check_tensors(name: str, tensors: object) -> None:
    """Raise TypeError if tensors is not a list or tuple of tensors."""
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"{name} must be a list of tensors, not {type(tensors).__name__}")
    for i, t in enumerate(tensors):
        check_tensor(f"{name}[{i}]", t)


def is_transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, …) is active, whose tensors wrap others."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
