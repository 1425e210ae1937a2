"""Calls in a process of their own, so that a kernel that hangs or corrupts memory ends only that process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")


def call_in_subprocess(function: Callable[..., Result], *arguments: object, seconds: float) -> Result:
    """Return function(*arguments), called in a new process, which is killed when the time is over.

    Args:
        function: defined in a module, so that the other process can import it.
        arguments: can be pickled, as the result can.
        seconds: the time limit.

    Raises:
        TimeoutError: the call took longer.
        RuntimeError: the call raised an exception, whose message this one has, or the process died.
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(f"it has not ended within {seconds:g} s")
        worked, result = receiver.recv()
    except EOFError:
        process.join(10)
        raise RuntimeError(f"its process died with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join(10)
    if not worked:
        raise RuntimeError(result)
    return result


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send((True, function(*arguments)))
    except Exception as error:
        sender.send((False, f"{type(error).__name__}: {error}"))
