"""FLOPs of octile's GEMMs in torch's `FlopCounterMode`.

`torch.utils.flop_counter`, where formulas are registered, imports Triton, which takes longer than all of `octile.ops`.
So they are registered when somebody else imports it.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

MODULE = "torch.utils.flop_counter"
Formula = Callable[..., int]

_waiting: dict[Any, Formula] = {}  # by torch's operator


def register_formula(op: "torch._ops.OpOverloadPacket", formula: Formula) -> None:
    """Have `FlopCounterMode` count an operator; a formula that it has for the operator is replaced.

    Args:
        op: the operator.
        formula: returns the FLOPs of a call from its arguments.
    """
    if counter := sys.modules.get(MODULE):
        _register(counter, op, formula)
        return
    if not _waiting:
        sys.meta_path.insert(0, _Finder())
    _waiting[op] = formula


def _register(counter: ModuleType, op: Any, formula: Formula) -> None:
    def with_result(*args: Any, out_val: object = None, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    counter.flop_registry.pop(op, None)  # of a module that was reloaded
    counter.register_flop_formula(op, get_raw=True)(with_result)


class _Finder(MetaPathFinder):
    """Registers all formulas when the module is imported, and then is removed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            while _waiting:
                _register(module, *_waiting.popitem())

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
