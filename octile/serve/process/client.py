"""The engine for the event loop of another process, at the other end of a pipe, where `EngineServer` steps it.

What a step has added to requests reaches the streams of their readers in one call, and is written there if it can be:
to wake a task for each token takes longer. A reader that is slow never holds back the engine; it finds the outputs that
it has missed joined to one.
"""

from __future__ import annotations

import asyncio
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from multiprocessing.connection import Connection

from octile.serve.engine.request import FinishReason, Output, Request, check_id
from octile.serve.engine.stats import Stats
from octile.serve.process.messages import (
    Cancel,
    CancelUpdate,
    Drain,
    Failed,
    ProcessEndedError,
    Stepped,
    UpdateWeights,
    WeightsRefused,
    WeightsUpdated,
)

MAX_STEPS = 16  # whose messages are read before others of the event loop have their turn
SEND_SECONDS = 1.0  # for messages that wait when a sender is closed
CLOSE = None  # what ends the thread of a sender


class Observer:
    """What happens to choices, for whoever counts it. This one counts nothing."""

    def first_token(self, seconds: float, prefill_seconds: float, name: str) -> None:
        """A choice has its first token, so many seconds after it was submitted under a name.

        It was admitted `prefill_seconds` ago.
        """

    def next_tokens(self, seconds: float, count: int) -> None:
        """A choice has `count` further tokens, so many seconds after the last one."""

    def decoded(self, seconds: float) -> None:
        """A choice has its last token, so many seconds after its first one."""

    def ended(self, seconds: float, reason: FinishReason, name: str) -> None:
        """A choice has ended, so many seconds after it was submitted under a name."""


class EngineError(Exception):
    """The engine has failed or is stopped, and the choice will not be continued."""


class _Choice:
    """One request of the engine, and where its outputs go."""

    def __init__(self, stream: Stream, index: int, request: Request):
        self.stream, self.index, self.request_id = stream, index, request.id
        self.submitted = time.perf_counter()
        self.first_token: float | None = None
        self.last_token = 0.0
        self.outputs: list[Output] = []  # that the reader has not seen yet
        self.is_finished = False

    def receive(self, output: Output, now: float, observer: Observer) -> None:
        """Record an output."""
        self.outputs.append(output)
        if output.tokens:
            if self.first_token is None:
                self.first_token = now
                observer.first_token(now - self.submitted, output.prefill_seconds, self.stream.name)
            else:
                observer.next_tokens(now - self.last_token, len(output.tokens))
            self.last_token = now
        if output.finish_reason is not None:
            self.end(output.finish_reason, now, observer)
            self.stream.wake()

    def end(self, reason: FinishReason, now: float, observer: Observer) -> None:
        """Record the end."""
        self.is_finished = True
        if self.first_token is not None:
            observer.decoded(self.last_token - self.first_token)
        observer.ended(now - self.submitted, reason, self.stream.name)


class Stream:
    """The outputs of some choices, as they come. Close it to cancel what has not finished.

    Attributes:
        name: the name under which the observer sees the choices.
        write: is called with this stream when there is something new, the reader waits for it and no choice has ended.
            It may `take` and write it, and says whether it has. Otherwise the reader is woken, which takes longer.
    """

    def __init__(self, engine: EngineClient, requests: Iterable[Request], name: str):
        self.name = name
        self.error: Exception | None = None
        self.write: Callable[[Stream], bool] = lambda _: False
        self._engine = engine
        self._waiting: asyncio.Future[None] | None = None  # the reader, until it is woken
        self.choices = [_Choice(self, i, request) for i, request in enumerate(requests)]

    async def next(self) -> list[tuple[int, Output]]:
        """Wait for outputs.

        Returns:
            (index of the choice, everything new about it that weights of one version have chosen), once for each
            choice and version. An empty list after all choices have finished.

        Raises:
            EngineError: the engine has failed or is stopped, after the outputs before it.
        """
        while True:
            new = self.take()
            if not new and self.error is not None:
                raise self.error
            if new or all(choice.is_finished for choice in self.choices):
                return new
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None

    def take(self) -> list[tuple[int, Output]]:
        """Take what `next` would return, without waiting for it."""
        return [(choice.index, output) for choice in self.choices if choice.outputs for output in _join(choice)]

    def deliver(self) -> None:
        """Write what is new, or wake the reader, if it waits."""
        if self._is_waiting():
            try:
                if not self.write(self):
                    self.wake()
            except Exception as error:  # the reader's, not the engine's
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Have the reader raise an error."""
        self.error = self.error or error
        self.wake()

    def wake(self) -> None:
        """Have the reader go on, if it waits."""
        if self._is_waiting():
            assert self._waiting is not None
            self._waiting.set_result(None)

    def _is_waiting(self) -> bool:
        return self._waiting is not None and not self._waiting.done()

    def close(self) -> None:
        """Cancel the choices that have not finished; their pages are free before the engine's next step."""
        self._engine.forget(self)
        self.choices.clear()  # they refer to this stream, and a garbage collection would have to free both


class EngineClient:
    """An engine in another process. All is called by the event loop that has called `start`.

    Args:
        connection: to the process of the engine.
        stats: counts of the engine before its first step.

    Attributes:
        stats: counts of the engine after the last step that was received.
        has_stepped: whether a step has ended.
        failure: the exception that ended the engine, None while it works.
        has_ended: whether the process of the engine has ended without giving a reason.
        observer: sees what happens to choices.
        on_failure: is called when the engine has failed.
        on_drain: is called when the process of the engine asks this one to end.
    """

    def __init__(self, connection: Connection, stats: Stats):
        self.stats, self.observer = stats, Observer()
        self.has_stepped = self.has_ended = False
        self.failure: Exception | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self.on_drain: Callable[[], object] = lambda: None
        self._connection, self._sender = connection, Sender(connection, "commands")
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._is_busy = False  # until the engine has said that nothing runs: canceled requests wait for its step, too
        self._last_step = 0.0  # or when requests came after a rest
        self._choices: dict[int, _Choice] = {}  # that have not finished, by the ids of their requests
        self._streams: set[Stream] = set()
        self._update: asyncio.Future[WeightsUpdated | WeightsRefused] | None = None
        self._closed: str | None = None  # why nothing can be submitted

    @property
    def step_age(self) -> float:
        """Seconds since the last step ended, or since requests came after a rest; 0 while the engine has no request."""
        return time.monotonic() - self._last_step if self._is_busy else 0.0

    def start(self) -> None:
        """Begin to read what the engine sends."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._read)

    def submit(self, requests: Sequence[Request], name: str = "") -> Stream:
        """Send requests to the engine.

        Args:
            requests: the requests.
            name: the name under which the observer sees them.

        Raises:
            EngineError: the engine has failed or is stopped.
            ValueError: a request that waits or runs has the id of one of them.
        """
        if self._closed is not None:
            raise EngineError(self._closed)
        ids = set[int]()  # of those before it
        for request in requests:
            check_id(request, self._choices)
            check_id(request, ids)
            ids.add(request.id)
        stream = Stream(self, requests, name)
        if not self._is_busy:
            self._is_busy, self._last_step = True, time.monotonic()
        self._streams.add(stream)
        self._choices |= {choice.request_id: choice for choice in stream.choices}
        self._sender.send([*requests])  # together, so that one step has them all
        return stream

    def forget(self, stream: Stream) -> None:
        """Cancel what has not finished of a stream; see `Stream.close`."""
        self._streams.discard(stream)
        for choice in stream.choices:
            if not choice.is_finished:
                choice.end(FinishReason.CANCELED, time.perf_counter(), self.observer)
                del self._choices[choice.request_id]
                self._sender.send(Cancel(choice.request_id))

    @property
    def is_updating(self) -> bool:
        """Whether an update of the weights runs."""
        return self._update is not None and not self._update.done()

    async def update_weights(self, update: UpdateWeights) -> WeightsUpdated | WeightsRefused:
        """Have the engine replace its weights, while no other update runs.

        Leaving it early cancels the update unless it is being written: `update_end` waits for which of them it is.

        Raises:
            EngineError: the engine fails or is stopped.
        """
        if self._closed is not None:
            raise EngineError(self._closed)
        answer = self._update = self._loop.create_future()
        self._sender.send(update)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.done():  # otherwise the next update may run
                self._sender.send(CancelUpdate())
            raise

    async def update_end(self) -> WeightsUpdated | WeightsRefused:
        """Wait for the end of the last update, after which nothing of it is read or written.

        Raises:
            EngineError: the engine fails or is stopped.
        """
        assert self._update is not None
        return await asyncio.shield(self._update)

    def abort(self, reason: str) -> None:
        """Have the readers of all streams raise an EngineError, and every later `submit` too."""
        self._closed = reason
        if self._update is not None and not self._update.done():
            self._update.set_exception(EngineError(reason))
            self._update.exception()  # its reader may have left
        for stream in list(self._streams):
            stream.fail(EngineError(reason))
            self.forget(stream)

    async def stop(self) -> None:
        """Abort what is left and close the pipe, which has the other process end the engine."""
        self.abort("the server has stopped")
        self._loop.remove_reader(self._connection)
        await asyncio.to_thread(self._sender.close)
        self._connection.close()

    def _read(self) -> None:
        """Read what has come, of a few steps at most."""
        new = set[Stream]()
        try:
            for _ in range(MAX_STEPS):
                self._take(self._connection.recv(), new)
                if not self._readable.poll(0):
                    break
            for stream in new:
                stream.deliver()
        except (EOFError, ConnectionResetError):
            self.has_ended = True
            self._fail(ProcessEndedError("the process of the engine has ended"))
        except Exception as error:
            self._fail(error)

    def _take(self, message: object, new: set[Stream]) -> None:
        if isinstance(message, Stepped):
            self._receive(message.outputs, message.stats.after(self.stats), new)
        elif isinstance(message, WeightsUpdated | WeightsRefused):
            if self._update is not None and not self._update.done():
                self._update.set_result(message)
        elif isinstance(message, Failed):
            raise message.error
        elif isinstance(message, Drain):
            self.on_drain()
        else:
            raise TypeError(f"the process of the engine has sent {message!r}")

    def _receive(self, outputs: Sequence[Output], stats: Stats, new: set[Stream]) -> None:
        if stats.steps != self.stats.steps:
            self.has_stepped, self._last_step = True, time.monotonic()
        self.stats, now = stats, time.perf_counter()
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is not None:  # otherwise it was canceled
                choice.receive(output, now, self.observer)
                new.add(choice.stream)
                if choice.is_finished:
                    del self._choices[output.request_id]
        if not stats.running and not stats.waiting:
            self._is_busy = bool(self._choices)

    def _fail(self, error: Exception) -> None:
        self._loop.remove_reader(self._connection)
        self.failure = error
        self.abort(f"the engine has failed: {type(error).__name__}: {error}")
        self.on_failure()


class Sender:
    """Sends messages in a thread, so that those of the other process are read however many wait.

    If both processes sent while both pipes are full, neither would go on.

    Args:
        connection: to the other process.
        name: the name of the thread.
    """

    def __init__(self, connection: Connection, name: str):
        self._connection, self._waiting = connection, queue.SimpleQueue[object]()
        self._thread = threading.Thread(target=self._send_all, name=name, daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Send a message after those before it, unless the other process has ended; called by any thread."""
        self._waiting.put(message)

    def close(self) -> None:
        """Send what waits, in a second at most, and nothing more."""
        self._waiting.put(CLOSE)
        self._thread.join(SEND_SECONDS)

    def _send_all(self) -> None:
        try:
            while (message := self._waiting.get()) is not CLOSE:
                self._connection.send(message)
        except OSError:
            pass  # the other process has ended
        except TypeError:
            if not self._connection.closed:  # it has no handle if it was closed in the middle of a message
                raise


def _join(choice: _Choice) -> list[Output]:
    """Take the outputs that a reader has not seen, joined to one for each version of the weights."""
    unread, choice.outputs = choice.outputs, []
    if len(unread) == 1:
        return unread
    joined = []
    for _, group in groupby(unread, lambda output: (output.weights_version, output.has_old_latents)):
        outputs = list(group)
        last = outputs[-1]
        joined.append(
            last._replace(
                tokens=tuple(token for output in outputs for token in output.tokens),
                text="".join(output.text for output in outputs),
                logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
                prompt_logprobs=outputs[0].prompt_logprobs,
            )
        )
    return joined
