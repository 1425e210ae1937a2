"""Tables of positions that all layers and micro-batches of a step read, computed once in it."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_tables: ContextVar[dict[Hashable, Any] | None] = ContextVar("tables", default=None)  # None outside of `tables_once`


@contextmanager
def tables_once() -> Iterator[None]:
    """Context of several passes, in which `table` computes the table of a key once."""
    token = _tables.set({})
    try:
        yield
    finally:
        _tables.reset(token)


def table(key: Hashable, compute: Callable[[], T]) -> T:
    """Return what `compute` returns; inside `tables_once`, what it returned in an earlier call for an equal key."""
    tables = None if torch.compiler.is_compiling() else _tables.get()
    if tables is None:
        return compute()
    if key not in tables:
        tables[key] = compute()
    found: T = tables[key]
    return found
