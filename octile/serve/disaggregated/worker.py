"""The prefill and the decode process: an engine each, which the router commands through a pipe.

A prefill process computes the latents of prompts and chooses their first tokens. These latents go to its pool of pages;
if the pool is full, the process waits until pages come back. A decode process adopts them and generates the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octile.ops.latent_cache import PAGE
from octile.serve.disaggregated.page_pool import FilledPages, PagePool, open_pool
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.engine import Engine, FirstToken
from octile.serve.engine.request import Output, Request
from octile.serve.engine.stats import ChangedStats
from octile.serve.process.messages import Cancel, Failed, Stepped
from octile.serve.process.signals import freeze_loaded, signals_ignored
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.load import Folder, Phase


class WorkerOptions(NamedTuple):
    """What a process needs to load the model.

    Attributes:
        run: the folder.
        device: device of the process.
        threads: threads of torch, on a CPU.
        engine, cache: options of `Folder.load`.
    """

    run: Path
    device: torch.device
    threads: int
    engine: EngineConfig
    cache: CacheConfig


# from the router, besides requests and `Cancel`


class Adopt(NamedTuple):
    """Continue a prompt that the prefill process of a number has prefilled to pages of its pool."""

    request: Request
    first: FirstToken
    process: int
    pages: Sequence[int]


class Free(NamedTuple):
    """Take pages of the pool back."""

    pages: Sequence[int]


class Ping(NamedTuple):
    """Answer that this process does not hang."""


class OpenPools(NamedTuple):
    """Open the pools of the prefill processes."""

    shared: Sequence[bytes]


# to the router, besides `Stepped` and `Failed`


class Ready(NamedTuple):
    """The model is loaded.

    Attributes:
        max_position: positions of a request at most.
        n_pages, bytes_per_page: size of the cache.
        shared: handles of the pool, one for each decode process.
    """

    max_position: int
    n_pages: int
    bytes_per_page: int
    shared: Sequence[bytes]


class Prefilled(NamedTuple):
    """A prompt is prefilled: its first token, and the pages of the pool that have its latents."""

    request_id: int
    first: FirstToken
    pages: Sequence[int]


class Copied(NamedTuple):
    """Pages of the pool of a prefill process that are not needed any more."""

    process: int
    pages: Sequence[int]


class Pong(NamedTuple):
    """This process carries out commands."""


def prefill(connection: Connection, options: WorkerOptions, n_decode: int) -> None:
    """Prefill prompts until the router closes the pipe.

    Args:
        connection: to the router.
        options: what loads the model.
        n_decode: how many processes open the pool.
    """
    drafts = min(options.engine.n_drafts, 1)  # whose pass leaves the layer's latents of the prompt
    options = options._replace(engine=replace(options.engine, n_drafts=drafts))
    _run(connection, options, lambda engine, runner: PrefillWorker(connection, engine, runner, n_decode), "prefill")


def decode(connection: Connection, options: WorkerOptions) -> None:
    """Continue texts until the router closes the pipe."""
    _run(connection, options, lambda engine, runner: DecodeWorker(connection, engine, runner), "decode")


@signals_ignored()
def _run(
    connection: Connection, options: WorkerOptions, make: Callable[[Engine, ModelRunner], _Worker], phase: Phase
) -> None:
    try:
        if options.device.type == "cuda":
            torch.cuda.set_device(options.device)
        else:
            torch.set_num_threads(options.threads)
        engine, runner = Folder.open(options.run).load(options.device, options.engine, options.cache, phase)
        engine.prepare_grammars()
        worker = make(engine, runner)
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        connection.send(Failed(error))
        return
    freeze_loaded()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the router has ended
        worker.run()


class _Worker(ABC):
    """An engine that the router commands."""

    def __init__(self, connection: Connection, engine: Engine, runner: ModelRunner):
        self.connection, self.engine, self.runner = connection, engine, runner
        engine.steps.runs_ahead = False  # the next pass would go before the copies of latents, for which the host waits
        self.stats = ChangedStats(engine.stats)

    def run(self) -> None:
        """Carry out commands and steps. It ends with the EOFError of a closed pipe."""
        while True:
            while not self.engine.has_work or self.connection.poll():
                self.receive()
            outputs = self.engine.step()
            self.send(outputs)

    def receive(self) -> None:
        """Wait for a command and carry it out."""
        command = self.connection.recv()
        if isinstance(command, Cancel):
            if self.engine.cancel(command.request_id):
                self.connection.send(Stepped((), self.stats.next()))
        elif isinstance(command, Ping):
            self.connection.send(Pong())
        else:
            self.carry_out(command)

    @abstractmethod
    def carry_out(self, command: object) -> None:
        """Carry out a command of this kind of process."""

    @abstractmethod
    def send(self, outputs: list[Output]) -> None:
        """Send what a step has added."""


class PrefillWorker(_Worker):
    """Prefills prompts.

    Args:
        connection: to the router.
        engine, runner: those of the model.
        n_decode: how many processes open the pool.
    """

    def __init__(self, connection: Connection, engine: Engine, runner: ModelRunner, n_decode: int):
        super().__init__(connection, engine, runner)
        self.pool = PagePool(-(-runner.max_position // PAGE), runner.pages)  # one of the longest texts
        connection.send(_ready(runner, [self.pool.share() for _ in range(n_decode)]))

    def carry_out(self, command: object) -> None:
        """Add a request, or take pages back."""
        if isinstance(command, Request):
            self.engine.submit(command)
        elif isinstance(command, Free):
            self.pool.free(command.pages)
        else:
            raise TypeError(f"a prefill process has no command {command!r}")

    def send(self, outputs: list[Output]) -> None:
        """Send what has ended, and hand over what goes on."""
        for output in outputs:
            if output.finish_reason is None:
                self._hand_over(output)
        ended = [output for output in outputs if output.finish_reason is not None]
        self.connection.send(Stepped(ended, self.stats.next()))

    def _hand_over(self, output: Output) -> None:
        """Fill pages of the pool, as soon as there are enough, unless the request is canceled before."""
        while request := self.engine.get(output.request_id):
            n_pages = -(-len(request.prompt) // PAGE)
            if n_pages <= self.pool.n_free:
                pages = self.pool.fill(request.pages[:n_pages])
                logprobs = output.logprobs[0] if output.logprobs else None
                known = output.prompt_logprobs, output.cached_tokens, output.prefill_seconds
                first = FirstToken(output.tokens[0], logprobs, *known)
                self.connection.send(Prefilled(output.request_id, first, pages))
                self.engine.cancel(request.id)
            else:
                self.receive()


class DecodeWorker(_Worker):
    """Continues what prefill processes have prefilled.

    Args:
        connection: to the router.
        engine, runner: those of the model.
    """

    def __init__(self, connection: Connection, engine: Engine, runner: ModelRunner):
        super().__init__(connection, engine, runner)
        self._held = deque[tuple[FilledPages, Copied]]()  # pages of pools, until they are copied
        self._pools: list[Tensor] = []
        connection.send(_ready(runner, ()))

    def carry_out(self, command: object) -> None:
        """Open the pools, or adopt a request."""
        if isinstance(command, OpenPools):
            self._pools = [open_pool(shared) for shared in command.shared]
        elif isinstance(command, Adopt):
            latents = FilledPages(self._pools[command.process], command.pages, self.runner.pages)
            self.engine.adopt(command.request, command.first, latents)
            self._held.append((latents, Copied(command.process, command.pages)))
        else:
            raise TypeError(f"a decode process has no command {command!r}")

    def receive(self) -> None:
        """Carry out a command; one may have canceled a request that held pages."""
        super().receive()
        self._return_pages()

    def send(self, outputs: list[Output]) -> None:
        """Send all outputs, and return the pages that are copied."""
        self.connection.send(Stepped(outputs, self.stats.next()))
        self._return_pages()

    def _return_pages(self) -> None:
        held = self._held
        for _ in range(len(held)):
            latents, copied = held.popleft()
            if latents.is_free:
                self.connection.send(copied)
            else:
                held.append((latents, copied))


def _ready(runner: ModelRunner, shared: Sequence[bytes]) -> Ready:
    return Ready(runner.max_position, runner.n_pages, runner.pages.bytes_per_page, shared)
