"""How a process of a server lives: its signals, if another process ends it, and its garbage collections."""

from __future__ import annotations

import atexit
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Context manager in which Ctrl-C and SIGTERM are ignored."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_without_signals(process: BaseProcess) -> None:
    """Start a process in which Ctrl-C and SIGTERM are blocked for good; here they arrive when it has started.

    The signals, which a terminal or a service manager sends to all processes, cannot end it while it still imports,
    before it can ignore them.
    """
    resource_tracker.ensure_running()  # it would unblock the signals, if `start` had to begin it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def freeze_loaded() -> None:
    """Collect garbage, and exclude the objects that are left from later collections of this process.

    Python's full collections visit every object. After torch, Triton and a model have been loaded, one takes 0.2 s,
    in which a server answers nobody.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report what is never collected as leaks
