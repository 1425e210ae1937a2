"""Fused kernels for the RMSNorm layers and the rotary embeddings of other people's models, in eager mode.

Written in torch's functions, as transformers has them, an RMSNorm is six kernels forward and a dozen backward, and a
rotary embedding five for each of queries and keys. `use_fused_kernels` has octile's kernels compute them, one each way.
Under `torch.compile` the model's own code is traced, which the compiler fuses itself.

A module that is recognized by what it computes (`octile.nn.structure`) gets a subclass of its class, of the same name,
with another `forward` (`octile.nn.made_class`). Nothing of the other library is changed, and other modules of the class
are not.

A rotary embedding is a function that attention's forward pass calls by its global name. The subclass has this forward
pass with another function under that name, and with the same decorators: transformers renames arguments by some.

octile's kernels compute in FP32 and round once. Llama's RMSNorm rounds x / √(mean(x²) + eps) to x's dtype before it is
multiplied by the weight, and its rotary embedding rounds both products before their sum; in BF16 results differ by such
roundings. Where the kernels cannot be used (in transforms, on subclasses of Tensor, on several dtypes, as with FP32
weights under autocast) the model's own code runs.
"""

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octile.nn.fused.elementwise import can_use_operators, rms_norm
from octile.nn.fused.fusion import is_forward_replaced
from octile.nn.fused.rotary import rotate_halves, why_not_rotate_halves
from octile.nn.made_class import MadeClass, make_subclass
from octile.nn.norm import RMSNorm
from octile.nn.structure import RotaryFunction, eps_of_rms_norm, rotary_functions
from octile.ops.norm import MAX_COLUMNS


class FusedKernels(NamedTuple):
    """How many modules of a model have octile's kernels in eager mode."""

    norms: int = 0
    rotary_embeddings: int = 0


def use_fused_kernels(model: nn.Module) -> FusedKernels:
    """Have octile's kernels compute a model's RMSNorm layers and rotary embeddings in eager mode.

    Modules of octile, torch's own RMSNorm, which has such a kernel, modules of TorchScript, and modules whose `forward`
    was replaced on the instance are left as they are. A second call changes nothing.

    Returns:
        how many modules of the model have them now.
    """
    norms = rotary_embeddings = 0
    for module in model.modules():
        cls: Any = type(module)
        if not issubclass(cls, _WithFusedKernel):
            if is_forward_replaced(module) or isinstance(module, RMSNorm | nn.RMSNorm | torch.jit.ScriptModule):
                continue
            if (eps := eps_of_rms_norm(module)) is not None:
                module.__class__ = _norm_class(cls, eps)
            elif (made := _attention_class(cls)) is not None:
                module.__class__ = made
        maker = getattr(type(module), "made_by", (None,))[0]
        norms += maker is _norm_class
        rotary_embeddings += maker is _attention_class
    return FusedKernels(norms, rotary_embeddings)


class _WithFusedKernel(MadeClass):
    """Mixin of the classes that are made here."""


def _subclass(cls: type[nn.Module], forward: Callable[..., Any], *made_by: Any) -> type[nn.Module]:
    return make_subclass(cls, (_WithFusedKernel,), {"forward": forward}, *made_by)


@functools.cache
def _norm_class(cls: type[nn.Module], eps: str) -> type[nn.Module]:
    """Make the subclass of an RMSNorm whose attribute `eps` is added to the mean of the squares."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs or len(args) != 1 or not _can_normalize(args[0], self.weight):
            return cls.forward(self, *args, **kwargs)
        return rms_norm(args[0], self.weight, getattr(self, eps))[0]

    return _subclass(cls, forward, _norm_class, cls, eps)


def _can_normalize(x: Tensor, weight: Tensor) -> bool:
    if not can_use_operators(x, weight) or x.dtype != weight.dtype:
        return False
    return x.shape[-1:] == weight.shape and len(weight) <= MAX_COLUMNS


@functools.cache
def _attention_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Make the subclass of a module that calls rotary embeddings; None if it calls none that octile computes."""
    own, inner = cls.forward, inspect.unwrap(cls.forward)
    rotary = rotary_functions(inner)
    if not rotary or not isinstance(inner, FunctionType):
        return None
    names = inner.__globals__
    replaced = {name: _rotate(names, name, function) for name, function in rotary}
    fused = _decorated_as(own, _copy(inner, _Globals(names, replaced), inner.__closure__))
    if fused is None:
        return None

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (own if torch.compiler.is_compiling() else fused)(self, *args, **kwargs)

    return _subclass(cls, forward, _attention_class, cls)


def _decorated_as(function: Any, inner: FunctionType) -> FunctionType | None:
    """Copy the decorators of a function around another; None if one does not hold what it decorates in a closure."""
    if not isinstance(function, FunctionType):
        return None
    decorated = getattr(function, "__wrapped__", None)
    if decorated is None:
        return inner
    copied, cells = _decorated_as(decorated, inner), function.__closure__ or ()
    holds = [_content(cell) is decorated for cell in cells]
    if copied is None or not any(holds):
        return None
    closure = tuple(CellType(copied) if holds_it else cell for cell, holds_it in zip(cells, holds, strict=True))
    return _copy(function, function.__globals__, closure)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _copy(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class _Globals(dict[str, Any]):
    """The global names of a function: some of its own, the others as they are in its module at the time."""

    def __init__(self, module_globals: dict[str, Any], own: dict[str, Any]):
        super().__init__(own)
        self.module_globals = module_globals

    def __missing__(self, name: str) -> Any:
        return self.module_globals[name]


def _rotate(module_globals: dict[str, Any], name: str, rotary: RotaryFunction) -> Callable[..., Any]:
    """Return what takes the place of a module's rotary embedding, until the module gets another one."""
    recognized = module_globals[name]

    def rotate(*args: Any, **kwargs: Any) -> Any:
        own = module_globals[name]
        if own is not recognized or kwargs or len(args) != 4 or why_not_rotate_halves(*args) is not None:
            return own(*args, **kwargs)
        is_partial = args[2].shape[-1] < args[0].shape[-1]
        if not (rotary.rotates_part if is_partial else rotary.rotates_all):
            return own(*args)
        return rotate_halves(*args)

    return rotate
