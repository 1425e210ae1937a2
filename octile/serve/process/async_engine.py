"""An engine in a thread of its own, whose outputs an event loop reads.

The thread alone touches the engine: adding and canceling are commands that it carries out between two steps. A step's
outputs reach the event loop in one call. A reader that is slow never holds back the engine; it finds the outputs that
it has missed joined to one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from octile.serve.engine.request import FinishReason, Output, Request, Sampling
from octile.serve.engine.stats import Stats
from octile.serve.process.commands import Commands

STOP_SECONDS = 60.0  # for the step that runs; one that hangs does not keep the process


class StepEngine(Protocol):
    """What `AsyncEngine` needs of an engine; `octile.serve.engine.engine.Engine` has it.

    Attributes:
        idle_seconds: after which it must be stepped though nothing runs; None: it need not.
    """

    idle_seconds: float | None

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise ValueError if the model cannot continue a request; called by any thread."""
        ...

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Add a request that `check` accepts."""
        ...

    def cancel(self, request_id: int) -> bool:
        """End a request and free its pages."""
        ...

    def step(self) -> list[Output]:
        """Run one forward pass."""
        ...

    def stats(self) -> Stats:
        """Count."""
        ...

    def wake(self) -> None:
        """Have a step that waits for others return soon; called by any thread."""
        ...

    def close(self) -> None:
        """End what still runs; nothing is called afterwards."""
        ...


class Observer:
    """What happens to choices, for whoever counts it. This one counts nothing."""

    def first_token(self, seconds: float) -> None:
        """A choice has its first token, so many seconds after it was submitted."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """A choice has `count` further tokens, so many seconds after the last one."""

    def ended(self, seconds: float, reason: FinishReason) -> None:
        """A choice has ended."""


class EngineError(Exception):
    """The engine has failed or is stopped, and the choice will not be continued."""


class _Choice:
    """One request of the engine, and where its outputs go."""

    def __init__(self, stream: Stream, index: int, prompt: Sequence[int], sampling: Sampling):
        self.stream, self.index, self.prompt, self.sampling = stream, index, prompt, sampling
        self.request_id: int | None = None  # only the engine's thread reads and writes it
        self.submitted = time.perf_counter()
        self.last_token: float | None = None
        self.outputs: list[Output] = []  # that the reader has not seen yet
        self.is_finished = False

    def receive(self, output: Output, now: float, observer: Observer) -> None:
        """Record an output; called by the event loop."""
        self.outputs.append(output)
        if output.tokens:
            if self.last_token is None:
                observer.first_token(now - self.submitted)
            else:
                observer.next_tokens(now - self.last_token, len(output.tokens))
            self.last_token = now
        if output.finish_reason is not None:
            self.is_finished = True
            observer.ended(now - self.submitted, output.finish_reason)
        self.stream.is_ready.set()


class Stream:
    """The outputs of some choices, as they come. Close it to cancel what has not finished."""

    def __init__(self, engine: AsyncEngine, asked: Iterable[tuple[Sequence[int], Sampling]]):
        self.is_ready = asyncio.Event()
        self.error: Exception | None = None
        self._engine = engine
        self.choices = [_Choice(self, i, prompt, sampling) for i, (prompt, sampling) in enumerate(asked)]

    async def next(self) -> list[tuple[int, Output]]:
        """Wait for outputs.

        Returns:
            (index of the choice, everything that is new about it), at most once for each choice. An empty list after
            all choices have finished.

        Raises:
            EngineError: the engine has failed or is stopped.
        """
        while True:
            self.is_ready.clear()
            if self.error is not None:
                raise self.error
            new = [choice for choice in self.choices if choice.outputs]
            if new or all(choice.is_finished for choice in self.choices):
                return [(choice.index, _join(choice)) for choice in new]
            await self.is_ready.wait()

    def fail(self, error: Exception) -> None:
        """Have the reader raise an error; called by the event loop."""
        self.error = self.error or error
        self.is_ready.set()

    def close(self) -> None:
        """Cancel the choices that have not finished; their pages are free before the engine's next step."""
        self._engine.forget(self)


class AsyncEngine:
    """An engine in a thread of its own.

    Args:
        engine: from now on, only this object may use it.
        observer: is called by the event loop.
        on_failure: is called by the event loop when a step has raised an exception.

    Attributes:
        stats: of the engine, after its last step.
        has_stepped: whether a step has ended.
        failure: the exception that ended the engine, None while it works.
    """

    def __init__(self, engine: StepEngine, observer: Observer | None = None):
        self.stats = engine.stats()
        self.has_stepped = False
        self._is_busy = False  # until the engine has said that nothing runs: canceled requests wait for its step, too
        self._last_step = 0.0  # or when requests came after a rest
        self.failure: Exception | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._engine, self._observer = engine, observer or Observer()
        self._commands = Commands(engine.idle_seconds, engine.wake)
        self._running: dict[int, _Choice] = {}  # only the engine's thread uses it
        self._streams: set[Stream] = set()  # only the event loop uses it
        self._closed: str | None = None  # why nothing can be submitted
        self._thread: threading.Thread | None = None

    @property
    def step_age(self) -> float:
        """Seconds since the last step ended, or since requests came after a rest; 0 while the engine has no request."""
        return time.monotonic() - self._last_step if self._is_busy else 0.0

    def start(self) -> None:
        """Begin to step, on behalf of the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise ValueError if the model cannot continue a request; any thread may call it."""
        self._engine.check(prompt, sampling)

    def submit(self, asked: Iterable[tuple[Sequence[int], Sampling]]) -> Stream:
        """Add requests to the engine, each of which `check` has accepted.

        Raises:
            EngineError: the engine has failed or is stopped.
        """
        if self._closed is not None:
            raise EngineError(self._closed)
        stream = Stream(self, asked)
        if not self._is_busy:
            self._is_busy, self._last_step = True, time.monotonic()
        self._streams.add(stream)
        for choice in stream.choices:
            self._commands.add(partial(self._add, choice))
        return stream

    def forget(self, stream: Stream) -> None:
        """Cancel what has not finished of a stream; see `Stream.close`."""
        self._streams.discard(stream)
        for choice in stream.choices:
            if not choice.is_finished:
                choice.is_finished = True
                self._observer.ended(time.perf_counter() - choice.submitted, FinishReason.CANCELED)
                self._commands.add(partial(self._cancel, choice))

    def abort(self, reason: str) -> None:
        """Have the readers of all streams raise an EngineError, and every later `submit` too."""
        self._closed = reason
        for stream in list(self._streams):
            stream.fail(EngineError(reason))
            self.forget(stream)

    async def stop(self) -> None:
        """Abort what is left and end the thread."""
        self.abort("the server has stopped")
        self._commands.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    # the engine's thread

    def _work(self) -> None:
        try:
            while self._commands.carry_out(lambda: self._running, self._show_stats):
                outputs, now = self._engine.step(), time.perf_counter()
                pairs = [(self._running[o.request_id], o) for o in outputs if o.request_id in self._running]
                for choice, output in pairs:
                    if output.finish_reason is not None:
                        del self._running[output.request_id]
                        choice.request_id = None
                self._call(self._deliver, pairs, now, self._engine.stats())
        except Exception as error:
            self._call(self._fail, error)

    def _show_stats(self) -> None:
        self._call(self._deliver, [], 0.0, self._engine.stats())  # a canceled request has freed its pages

    def _add(self, choice: _Choice) -> None:
        request = self._engine.add(choice.prompt, choice.sampling)
        choice.request_id = request.id
        self._running[request.id] = choice

    def _cancel(self, choice: _Choice) -> None:
        if choice.request_id is not None:
            del self._running[choice.request_id]
            self._engine.cancel(choice.request_id)
            choice.request_id = None

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # the event loop

    def _deliver(self, pairs: Sequence[tuple[_Choice, Output]], now: float, stats: Stats) -> None:
        if stats.steps != self.stats.steps:
            self.has_stepped, self._last_step = True, time.monotonic()
        is_new, self.stats = stats is not self.stats, stats
        for choice, output in pairs:
            if choice.stream in self._streams:
                choice.receive(output, now, self._observer)
        if is_new and not stats.running and not stats.waiting:
            self._is_busy = any(not choice.is_finished for stream in self._streams for choice in stream.choices)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.abort(f"the engine has failed: {type(error).__name__}: {error}")
        self.on_failure()


def _join(choice: _Choice) -> Output:
    """Take the outputs that a reader has not seen, joined to one."""
    outputs, choice.outputs = choice.outputs, []
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    return Output(
        last.request_id,
        tuple(token for output in outputs for token in output.tokens),
        "".join(output.text for output in outputs),
        tuple(logprob for output in outputs for logprob in output.logprobs),
        last.finish_reason,
        last.error,
    )
