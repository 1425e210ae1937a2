"""Signals of processes that another process of the server ends, which has them, too, and drains first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Context manager in which Ctrl-C and SIGTERM are ignored."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
