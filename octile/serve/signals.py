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


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Context manager that blocks Ctrl-C and SIGTERM in this thread; those that come meanwhile arrive afterwards.

    A process that is started inside inherits that for good, so that the signals, which a terminal or a service manager
    sends to all processes, cannot end it while it still imports, before it can ignore them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
