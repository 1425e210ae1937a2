"""Triton's interpreter without what it does again and again: it takes half of its time to patch triton.language."""

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


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
