"""The router: an engine for the server, whose steps are those of prefill and decode processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

import torch

from octile.serve.disaggregated import worker
from octile.serve.disaggregated.worker import (
    Adopt,
    Copied,
    Free,
    OpenPools,
    Ping,
    Pong,
    Prefilled,
    Ready,
    WorkerOptions,
)
from octile.serve.engine.config import CacheConfig, EngineConfig, ParallelConfig, ProcessesConfig
from octile.serve.engine.request import Output, Request, check_id
from octile.serve.engine.stats import Stats
from octile.serve.process.client import Sender
from octile.serve.process.messages import Cancel, Failed, ProcessEndedError, Stepped
from octile.serve.process.signals import start_without_signals

END_SECONDS = 10.0  # for a process to end after its pipe was closed
PING_SECONDS = 1.0  # after which a process that has sent nothing is asked whether it hangs
LATE_SECONDS = 1.0  # after which a step that begins late shows that this process was stopped


class Waker:
    """A file that is ready to be read since `wake` was called, until `clear`."""

    def __init__(self) -> None:
        self._writer, self._reader = socket.socketpair()
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the file ready; called by any thread."""
        with suppress(BlockingIOError):  # it is ready
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Make the file not ready, which it must be."""
        self._reader.recv(4096)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
        self._reader.close()


class _Process:
    """A prefill or decode process.

    Args:
        name: for messages.
        target, arguments: what it calls after the pipe to the router.
        timeout: seconds after which it hangs if it has sent nothing since it was asked to.

    Attributes:
        name: for messages.
        load: tokens that it has to prefill, or that its requests can have.
        stats: after its last step.
    """

    def __init__(self, name: str, target: Callable[..., None], arguments: tuple[object, ...], timeout: float):
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
        self.connection, other = context.Pipe()
        self.name, self.load, self.stats = name, 0, Stats()
        self._timeout, self._ping_seconds = timeout, min(PING_SECONDS, timeout / 2)
        self._heard = time.monotonic()  # when it sent something, and
        self._asked: float | None = None  # when it was then asked whether it hangs
        self._due = math.inf  # when `ping` is called next
        self.process: BaseProcess = context.Process(target=target, args=(other, *arguments), name=name, daemon=True)
        start_without_signals(self.process)  # its end is the router's
        other.close()
        self._sender = Sender(self.connection, f"commands of {name}")

    def receive(self) -> object:
        """Wait for a message.

        Raises:
            ProcessEndedError: the process has ended.
        """
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended() from None
        self._heard, self._asked = time.monotonic(), None
        return message

    @property
    def silent_seconds(self) -> float:
        """Seconds for which it has sent nothing, though it was asked to; 0 in its first step, which may take long."""
        if self._asked is None or (self.load and not self.stats.steps):
            return 0.0
        return time.monotonic() - self._heard

    def ping(self) -> float:
        """Ask whether it hangs if it has sent nothing for a while; return the seconds until this is called again.

        Raises:
            ProcessEndedError: it has not answered in time, and is killed.
        """
        now = time.monotonic()
        if now > self._due + LATE_SECONDS:  # the router was stopped, and so perhaps was the process
            self._asked = None
        seconds = self._ping(now)
        self._due = now + seconds
        return seconds

    def _ping(self, now: float) -> float:
        if self._asked is None and now >= self._heard + self._ping_seconds:
            self._asked = now
            self.send(Ping())
        if self._asked is None:
            return self._heard + self._ping_seconds - now
        if now < self._asked + self._timeout:
            return self._asked + self._timeout - now
        if self.connection.poll():  # what it has sent was not received
            return 0.0
        self.process.kill()
        raise ProcessEndedError(f"the {self.name} has not answered for {self._timeout:g} s, and was killed")

    def send(self, command: object) -> None:
        """Send a command after those before it. If the process has ended, the next `receive` says so."""
        self._sender.send(command)

    def loaded(self) -> Ready:
        """Wait until the model is loaded.

        Raises:
            ValueError, OSError, MemoryError, ProcessEndedError: it cannot be, or the process has ended.
        """
        message = self.receive()
        if isinstance(message, Failed):
            raise message.error
        assert isinstance(message, Ready)
        return message

    def close(self) -> None:
        """Have the process end, and send it nothing more."""
        self._sender.close()
        self.connection.close()

    def end(self) -> None:
        """Wait until the process has ended, which is closed; by force if it takes long."""
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _ended(self) -> ProcessEndedError:
        self.process.join(END_SECONDS)
        return ProcessEndedError(f"the {self.name} has ended with exit status {self.process.exitcode}")


class _Running(NamedTuple):
    """A request, the process that has it, and the tokens by which it loads that process."""

    request: Request
    process: _Process
    load: int


class Router:
    """Sends requests to processes and returns what they generate; an engine for `EngineServer`.

    Args:
        run: the folder of the model.
        processes: how many there are.
        device: device of all processes; on "cuda" they take the GPUs in turn, the prefill processes first.
        engine, cache: options of each process.
        timeout: seconds after which a process that has loaded the model and does not answer, as it does between two
            steps, hangs.

    Attributes:
        max_position: positions of a request at most.
        n_pages, cache_bytes: size of the smallest cache of a process.
        idle_seconds: after which a step waits though nothing runs, so that it notices a process that has ended or
            hangs.

    Raises:
        ValueError: several processes share a GPU, and `cache.gib` does not divide its memory among them; or some caches
            can hold texts that need the model's indexer, and others have not.
        ValueError, OSError, MemoryError, ProcessEndedError: a process cannot load the model.
    """

    idle_seconds: float | None = 0.0

    def __init__(
        self,
        run: Path,
        processes: ProcessesConfig,
        device: torch.device,
        engine: EngineConfig,
        cache: CacheConfig,
        timeout: float = ParallelConfig.timeout,
    ):
        n_prefill, n_decode = processes.prefill, processes.decode
        devices = _devices(device, n_prefill + n_decode, cache)
        threads = max(1, (os.cpu_count() or 1) // len(devices))
        options = [WorkerOptions(run, each, threads, engine, cache) for each in devices]
        self._prefill: list[_Process] = []
        self._decode: list[_Process] = []
        self._running: dict[int, _Running] = {}
        self._n_requests = self._canceled = self._generated = 0
        self._waker = Waker()
        # processes that are still there at exit are waited for, and end when their pipes are closed
        self._at_exit = Finalize(None, self._close, exitpriority=10)
        try:
            for i, option in enumerate(options[:n_prefill]):
                self._prefill.append(_Process(f"prefill process {i}", worker.prefill, (option, n_decode), timeout))
            for i, option in enumerate(options[n_prefill:]):
                self._decode.append(_Process(f"decode process {i}", worker.decode, (option,), timeout))
            ready = [process.loaded() for process in self._all]
            if len({r.bytes_per_page for r in ready}) > 1:
                raise ValueError(
                    "cache.gib must be given: the caches have texts of "
                    f"{', '.join(f'{r.max_position:,}' for r in ready)} tokens, and not all of these need an indexer"
                )
            for i, process in enumerate(self._decode):
                process.send(OpenPools([filling.shared[i] for filling in ready[:n_prefill]]))
        except BaseException:
            self.close()
            raise
        self.max_position = min(r.max_position for r in ready)
        self.n_pages = min(r.n_pages for r in ready)
        self.cache_bytes = self.n_pages * ready[0].bytes_per_page

    @property
    def _all(self) -> list[_Process]:
        return self._prefill + self._decode

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._running)

    def submit(self, request: Request) -> None:
        """Send a request to the prefill process with the fewest tokens to prefill.

        Raises:
            ValueError: a request that waits or runs has its id.
        """
        check_id(request, self._running)
        self._n_requests += 1
        process = min(self._prefill, key=lambda process: process.load)
        self._start(request, process, len(request.prompt), request)

    def cancel(self, request_id: int) -> bool:
        """End a request; say whether it was there."""
        running = self._end(request_id)
        if running is not None:
            self._canceled += 1
            running.process.send(Cancel(request_id))
        return running is not None

    def step(self) -> list[Output]:
        """Wait for messages of the processes, or for `wake`, and return what is new about the requests.

        Raises:
            ProcessEndedError: a process has ended, or hangs.
        """
        outputs: list[Output] = []
        seconds = min(PING_SECONDS, *(process.ping() for process in self._all))  # `stats` says which are silent
        ready = wait([*(process.connection for process in self._all), self._waker.fileno()], seconds)
        if self._waker.fileno() in ready:
            self._waker.clear()
        for process in self._all:
            if process.connection in ready:
                self._take(process, process.receive(), outputs)
        return outputs

    def wake(self) -> None:
        """Have a step that waits return; called by any thread."""
        self._waker.wake()

    def stats(self) -> Stats:
        """Return the sums over all processes; prefill processes count prompts, decode processes texts."""
        parts = [process.stats for process in self._all]
        prompts = Stats.of_ranks([process.stats for process in self._prefill])
        return replace(
            Stats.of_ranks(parts),
            steps=sum(stats.steps for stats in parts),
            steps_ahead=sum(stats.steps_ahead for stats in parts),
            requests=self._n_requests,
            canceled=self._canceled,  # for a prefill process, what it hands over is canceled, too
            generated_tokens=self._generated,  # both processes count the first token
            prompt_tokens=prompts.prompt_tokens,
            shared_tokens=prompts.shared_tokens,
            silent_seconds=max(process.silent_seconds for process in self._all),
        )

    def close(self) -> None:
        """End the processes, unless they were closed before."""
        self._at_exit()

    def _close(self) -> None:
        for process in self._all:
            process.close()
        for process in self._all:
            process.end()
        self._waker.close()

    def _take(self, process: _Process, message: object, outputs: list[Output]) -> None:
        if isinstance(message, Stepped):
            process.stats = message.stats.after(process.stats)
            for output in message.outputs:
                if output.request_id in self._running:  # it was not canceled meanwhile
                    outputs.append(output)
                    self._generated += len(output.tokens)
                    if output.finish_reason is not None:
                        self._end(output.request_id)
        elif isinstance(message, Prefilled):
            self._hand_over(process, message)
        elif isinstance(message, Copied):
            self._prefill[message.process].send(Free(message.pages))
        elif not isinstance(message, Pong):
            raise TypeError(f"the {process.name} has sent {message!r}")

    def _hand_over(self, process: _Process, prefilled: Prefilled) -> None:
        """Send what was prefilled to the decode process with the fewest tokens in flight."""
        running = self._end(prefilled.request_id)
        if running is None:  # canceled meanwhile
            process.send(Free(prefilled.pages))
            return
        request = running.request
        number = self._prefill.index(process)
        adopt = Adopt(request, prefilled.first, number, prefilled.pages)
        self._start(request, min(self._decode, key=lambda process: process.load), request.max_length, adopt)

    def _start(self, request: Request, process: _Process, load: int, command: object) -> None:
        self._running[request.id] = _Running(request, process, load)
        process.load += load
        process.send(command)

    def _end(self, request_id: int) -> _Running | None:
        running = self._running.pop(request_id, None)
        if running is not None:
            running.process.load -= running.load
        return running


def _devices(device: torch.device, n_processes: int, cache: CacheConfig) -> list[torch.device]:
    """The device of each process.

    Raises:
        ValueError: processes share a GPU, and cache.gib is not given.
    """
    if device.type != "cuda":
        return [device] * n_processes
    n_gpus = torch.cuda.device_count()
    if n_processes > n_gpus and cache.gib is None:
        raise ValueError(
            f"cache.gib must be given for {n_processes} processes on {n_gpus} GPU{'s' * (n_gpus > 1)}: those that "
            "share a GPU divide its memory"
        )
    return [torch.device("cuda", i % n_gpus) for i in range(n_processes)]
