"""Ctrl-C and SIGTERM: end a command cleanly, with the exit code that a shell gives to the signal.

A process that imports modules ends at once (`end_at_signals`, `importing`). A training run saves its state first
(`stop_requests`); any other work is interrupted by an exception (`terminable`). A rank that waits to report its failure
ignores SIGTERM (`termination_ignored`). A step of an engine holds Ctrl-C back to its end (`held_interrupts`). While the
interpreter exits, nobody would catch that exception (`quiet_exit`).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, Self

from octile.torchrun import count_ranks, own_rank

SIGNALS = signal.SIGINT, signal.SIGTERM
GRACE = 5.0  # seconds in which a second signal may interrupt the main thread, which a kernel can keep longer


class Stopped(Exception):
    """A signal ended a run early; what is there to continue was written.

    Args:
        message: says when, and how to continue.
        number: number of the signal.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number
        self.exit_code = 128 + number

    @classmethod
    def by(cls, interrupt: KeyboardInterrupt, message: str) -> Self:
        """The exception for a signal that was raised as an interrupt."""
        return cls(message, signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as Ctrl-C is."""


def end_at_signals() -> None:
    """Have Ctrl-C and SIGTERM end the process at once with a line, until a context of this module handles them."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell has background processes ignore Ctrl-C
            signal.signal(number, _end)


@contextmanager
def importing() -> Iterator[None]:
    """Context manager in which Ctrl-C and SIGTERM end the process at once with a line.

    Nothing is to be cleaned up while modules are imported. A library may take an exception for an import that has
    failed and go on, and one in torch's C++ code aborts the process.
    """
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    end_at_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_main_thread() -> bool:
    """Whether this is the main thread, the only one that can handle signals."""
    import threading  # late: signals are handled before it is imported

    return threading.current_thread() is threading.main_thread()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if count_ranks() > 1 and own_rank():  # rank 0 says it, or has said why torchrun ends the others
        os._exit(128 + number)
    _end_with_line("terminated" if number == signal.SIGTERM else "interrupted", number)


def _end_with_line(line: str, number: int) -> NoReturn:
    """End the process at once, whatever its threads do."""
    with suppress(OSError):  # nobody reads it
        os.write(2, f"octile: {line}\n".encode())
    os._exit(128 + number)


@contextmanager
def terminable() -> Iterator[list[type[KeyboardInterrupt]]]:
    """Context manager in which SIGTERM raises `Terminated`, so that what is half done is cleaned up.

    It yields a list of what was raised, Ctrl-C's KeyboardInterrupt included: a library that is being imported may take
    that for an import that has failed, and go on to another error.
    """
    raised: list[type[KeyboardInterrupt]] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raised.append(Terminated if number == signal.SIGTERM else KeyboardInterrupt)
        raise raised[-1]

    if not _is_main_thread():
        yield raised
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _end):  # background processes ignore it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield raised
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def termination_ignored() -> Iterator[None]:
    """Context manager in which SIGTERM is ignored, for a process that is about to end anyway."""
    if not _is_main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Context manager that holds a Ctrl-C back to its end, in the main thread; a second one takes effect at once."""
    handler = signal.getsignal(signal.SIGINT)
    if not _is_main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            held.clear()
            handler(number, frame)
        else:
            held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for interrupt in held:
            handler(*interrupt)


@contextmanager
def quiet_exit() -> Iterator[None]:
    """Context manager after which the process is to exit, and Ctrl-C ends it at once, without a traceback.

    Python waits for threads and calls exit handlers first. What it destroys then is beyond Ctrl-C, which is ignored
    for that moment.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        with suppress(Exception):  # the signal may have interrupted a flush
            sys.stdout.flush()
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell begins a process in the background
        yield
        return
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # called last, since it is registered first
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, end)


@contextmanager
def stop_requests(acknowledge: Callable[[int], None]) -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list instead of being ended by them; a second one of either ends the process.

    The second is handled in the main thread as before the context, or raised there. Where a kernel keeps that thread
    for more than GRACE seconds, or a third signal comes, the process ends without it.

    Args:
        acknowledge: called once, at once, with the number of the first signal. It runs in a thread of its own, since
            Python calls a signal's handler only after the kernel that the main thread runs, which takes seconds on a
            CPU.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        for each, handler in before.items():
            signal.signal(each, handler if callable(handler) else signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        with _observed(acknowledge):
            yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _observed(acknowledge: Callable[[int], None]) -> Iterator[None]:
    """Call a function in another thread when the first signal arrives, and end the process some time after a second."""
    import socket
    import threading

    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def receive() -> int:
        """Wait for a signal, and return its number; 0 when the context ends."""
        while (received := reader.recv(1)) and received[0] not in SIGNALS:
            pass
        return received[0] if received else 0

    def wait() -> None:
        if number := receive():
            acknowledge(number)
        if number and (second := receive()):
            reader.settimeout(GRACE)
            with suppress(TimeoutError):
                if not receive():
                    return
            _end_with_line("stopped at once, within a step; what was saved before stays", second)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.shutdown(socket.SHUT_WR)  # closing it would not do while a forked process has it, too
        writer.close()
        thread.join()
        reader.close()
