"""Triton's interpreter without what it does again and again, which takes most of its time."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType, ModuleType

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Leave out what the interpreter repeats, and what nobody reads; kernels compute the same."""
    patch_languages_once(patch)
    find_dtypes_once(patch)
    describe_types_once(patch)
    describe_tensors_once(patch)
    compare_shapes_first(patch)
    leave_out_overflow_checks(patch)


def patch_languages_once(patch: pytest.MonkeyPatch) -> None:
    """Let a call of a device function leave the modules that are patched for the launch.

    The interpreter replaces the builtins of the modules that a function sees, for a launch and for each call in it. A
    launch gives them back at its end.
    """
    patch_languages: Callable = interpreter._patch_lang

    @cache
    def languages(function: FunctionType) -> list[ModuleType]:
        return [value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]

    def patch_builtins(function: FunctionType) -> object:
        if any(tl.core.is_builtin(language.load) for language in languages(function)):
            return patch_languages(function)
        return None  # the result of a call in a launch is not used

    patch.setattr(interpreter, "_patch_lang", patch_builtins)


def find_dtypes_once(patch: pytest.MonkeyPatch) -> None:
    """Keep NumPy's dtype of each of Triton's, for which the interpreter makes a table of all of them each time."""
    find: Callable[[tl.dtype], np.dtype] = interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}

    def find_once(dtype: tl.dtype) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    patch.setattr(interpreter, "_get_np_dtype", find_once)


def describe_types_once(patch: pytest.MonkeyPatch) -> None:
    """Check and name each shape of a block once: most operations make types of their operands and of their result."""
    describe: Callable[[tl.block_type, tl.dtype, Sequence], None] = tl.block_type.__init__
    known: dict[tuple, dict] = {}

    def describe_once(block: tl.block_type, element_ty: tl.dtype, shape: Sequence) -> None:
        key = (element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape))
        if key not in known:
            describe(block, element_ty, shape)
            known[key] = dict(block.__dict__)
        block.__dict__.update(known[key], element_ty=element_ty)

    patch.setattr(tl.block_type, "__init__", describe_once)


def describe_tensors_once(patch: pytest.MonkeyPatch) -> None:
    """Keep the shape that tensors of a type have for kernels, each of whose sizes is an object."""
    describe: Callable[[tl.tensor, object, tl.dtype], None] = tl.tensor.__init__
    known: dict[str, dict] = {}

    def describe_once(tensor: tl.tensor, handle: object, dtype: tl.dtype) -> None:
        if dtype.name not in known:
            describe(tensor, handle, dtype)
            known[dtype.name] = dict(tensor.__dict__)
        tensor.__dict__.update(known[dtype.name], handle=handle, type=dtype, dtype=dtype.scalar)

    patch.setattr(tl.tensor, "__init__", describe_once)


def compare_shapes_first(patch: pytest.MonkeyPatch) -> None:
    """Broadcast no operands that have the same shape: the interpreter compares objects that it makes for each size."""
    broadcast: Callable[..., tuple[tl.tensor, tl.tensor]] = TritonSemantic.broadcast_impl_value

    def sizes(operand: tl.tensor) -> list[int] | None:
        return operand.type.shape.values if operand.type.is_block() else None

    def broadcast_others(semantic: TritonSemantic, a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        return (a, b) if sizes(a) == sizes(b) else broadcast(semantic, a, b)

    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)


def leave_out_overflow_checks(patch: pytest.MonkeyPatch) -> None:
    """Compute no second sum of integers in 64 bits: only debug mode, which nobody uses, compares it with the first."""
    assert not interpreter.interpreter_builder.options.debug
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
