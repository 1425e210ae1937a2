"""Interleaving of two passes at the exchanges between ranks, so that one computes while the rows of the other travel.

Each pass runs in a thread of its own, and only one at a time: where it needs the result of an exchange that it has
begun (`octile.nn.dispatcher.InFlight.wait`), the other one continues. For the forward pass of one micro-batch and the
backward pass of another, in layers that exchange rows, this gives the order of DeepSeek-V3's overlapped pair:

    computation      MLP(B) MLP(W)   MLP(F)        attention(B, W)   attention(F)
    communication    dispatch(F)     dispatch(B)   combine(F)        combine(B)

Both passes launch on one stream, and exchanges on another one, in the order in which they are begun. The autograd
graphs are those of passes that run one after the other, and so are all bits. All ranks that exchange rows come to the
same exchanges in the same order if they interleave the same passes.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.2.1, figure 4.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

FIRST, SECOND = 0, 1
_pair: _Pair | None = None  # for all threads: autograd runs a GPU's backward passes in one of its own


class _Abandoned(RuntimeError):
    """Raised in a pass whose other pass has failed."""


class _Pair:
    """Which of two passes may run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.active = FIRST
        self._has_ended = [False, False]
        self._error: BaseException | None = None

    def switch(self) -> None:
        """Let the other pass run until it switches or ends. Called by the active one."""
        own = self.active
        if not self._has_ended[1 - own]:
            self._activate(1 - own)
            self.wait_for(own)
        self._check()

    def wait_for(self, own: int) -> None:
        """Wait until a pass is the active one."""
        with self._changed:
            self._changed.wait_for(lambda: self.active == own)

    def run(self, own: int, work: Callable[[], object]) -> None:
        """Run a pass, and then let the other one run."""
        try:
            self.wait_for(own)
            self._check()
            work()
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._has_ended[own] = True
            self._activate(1 - own)

    def raise_error(self) -> None:
        """Raise what the pass that failed first has raised."""
        if self._error is not None:
            raise self._error

    def _activate(self, other: int) -> None:
        with self._changed:
            self.active = other
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise _Abandoned("the other pass of an interleaved pair has failed")


def run_interleaved(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Run two functions, each of which continues where the other one waits for an exchange; `first` begins.

    `first` runs in a thread of its own, on the current stream and with the caller's context variables; it does not see
    autocast or torch's other modes of the caller's thread. If one function raises, the other one is abandoned at its
    next exchange, and the error is raised here.

    Raises:
        RuntimeError: it is called inside one of two such functions.
    """
    global _pair
    if _pair is not None:
        raise RuntimeError("interleaved passes cannot be interleaved again")
    pair, context, stream = _Pair(), contextvars.copy_context(), _current_stream()

    def run_first() -> None:
        with stream:
            pair.run(FIRST, lambda: context.run(first))

    thread = threading.Thread(target=run_first, name="octile-interleaved")
    _pair = pair
    try:
        thread.start()
        pair.run(SECOND, second)
        thread.join()
    finally:
        _pair = None
    pair.raise_error()


def is_interleaved() -> bool:
    """Whether a pass runs that is interleaved with another one."""
    return _pair is not None


def is_first() -> bool:
    """Whether the caller is the first of two interleaved passes."""
    return _pair is not None and _pair.active == FIRST


def switch() -> None:
    """Let the other one of two interleaved passes run, if there is one, until it switches or ends."""
    if _pair is not None:
        _pair.switch()


def _current_stream() -> AbstractContextManager[Any]:
    """Return a context of the current stream, for another thread."""
    if not torch.cuda.is_initialized():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream())
