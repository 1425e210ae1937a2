"""The server, which drains before it ends."""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from octile.serve.http.access_log import AccessLog
from octile.serve.http.address import listen
from octile.serve.http.app import AddRequestId, allow_origins, create_app
from octile.serve.http.config import HEAD_SECONDS, WRITE_SECONDS
from octile.serve.http.connection import Connection
from octile.serve.http.service import Service
from octile.text import format_count

KEEP_ALIVE_SECONDS = 30
MAX_FILES = 65536
OTHER_FILES = 64  # than connections: the engine's pipe, those of Python and its packages
FULL_SECONDS = 0.05  # after which a listener that has all its connections looks again
FAILED_SECONDS = 1.0  # after which one that could not accept a connection tries again


class Server(uvicorn.Server):
    """A server of one model. `run` returns when it has drained, and raises what made the engine fail.

    Args:
        service: the model.
        api_keys, hosts, weights_key: as in `create_app`.
        tls: context for HTTPS; None: HTTP is served.
        origins: as in `allow_origins`; none is allowed if there are none.
        has_access_log: whether each response is a line on stderr.
    """

    def __init__(
        self,
        service: Service,
        api_keys: tuple[str, ...] = (),
        hosts: tuple[str, ...] | None = None,
        weights_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        origins: tuple[str, ...] = (),
        has_access_log: bool = False,
    ):
        self.service, self._tls = service, tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._was_cut_off = False
        app: ASGIApp = create_app(service, api_keys, hosts, weights_key)
        if origins:
            app = allow_origins(app, origins)
        if has_access_log:
            app = AccessLog(app)
        super().__init__(
            uvicorn.Config(
                AddRequestId(app),
                http=Connection,
                ws="none",
                lifespan="on",
                loop="asyncio",
                log_level="error",  # what clients do wrong is theirs to know
                access_log=False,  # uvicorn's, which has no request ids
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(service.limits.drain + 2 * WRITE_SECONDS),
            )
        )
        service.engine.on_failure = self._end

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on bound sockets until `drain` is called or the engine fails."""
        super().run(sockets)
        if self.service.engine.failure is not None:
            raise self.service.engine.failure

    def drain(self) -> None:
        """End the server when it has drained; called again, at once. Any thread may call it."""
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut_off)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals: the process of the engine does, and has `drain` called."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections at sockets, as many together as open files allow."""
        self._loop = asyncio.get_running_loop()
        for bound in sockets or ():
            listen(bound)
        await super().startup([])
        limit, connections = max_connections(allow_files()), self.server_state.connections
        self.servers = [Listener(bound, self._connect, connections, limit, self._tls) for bound in sockets or ()]  # type: ignore[misc]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests in flight, for as long as the limits say, and end."""
        service = self.service
        service.is_draining = True
        if service.in_flight and service.engine.failure is None:  # otherwise they are answered with that error now
            what = (
                f"{format_count(service.in_flight, 'choice')} in flight, for at most {service.limits.drain:g} seconds"
            )
            with suppress(OSError):  # nobody reads it
                print(f"octile: answering {what}; a second signal ends them now", file=sys.stderr, flush=True)
        timer = asyncio.get_running_loop().call_later(service.limits.drain, self._cut_off)
        await super().shutdown(sockets)
        timer.cancel()

    def _connect(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    def _cut_off(self) -> None:
        """End what is in flight with an error, and soon after, or if it was cut off before, all connections."""
        self.service.engine.abort("the server has ended before the request was finished")
        if self._was_cut_off:
            self._abort_connections()
        else:
            asyncio.get_running_loop().call_later(WRITE_SECONDS, self._abort_connections)
        self._was_cut_off = True

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _end(self) -> None:
        self.should_exit = True


class Listener:
    """Accepts connections up to a limit; those beyond it wait in the system's queue.

    asyncio's server has no limit, and prints thousands of tracebacks a second while no file can be opened. This one
    prints at most one line a second.

    Args:
        listening: the socket.
        connect: makes the protocol of a connection.
        connections: those that are open.
        limit: how many there may be.
        tls: context for HTTPS; None: HTTP is served.

    Attributes:
        sockets: the socket, as `asyncio.Server` has it.
    """

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[], Connection],
        connections: Collection[object],
        limit: int,
        tls: ssl.SSLContext | None = None,
    ):
        self.sockets = (listening,)
        self._listening, self._connect, self._connections, self._limit = listening, connect, connections, limit
        self._loop = asyncio.get_running_loop()
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": WRITE_SECONDS}
        self._later: asyncio.TimerHandle | None = None
        self._printed = -math.inf
        self._starting = set[asyncio.Task[None]]()  # connections that are accepted and not open yet
        listening.setblocking(False)
        self._begin()

    def close(self) -> None:
        """Accept no more connections."""
        if self._later is not None:
            self._later.cancel()
        if self._tls:
            for task in self._starting:  # its handshake could take longer than the server lives
                task.cancel()
        self._loop.remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Wait for nothing: a listener has no connections of its own."""

    def _begin(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        if len(self._connections) + len(self._starting) >= self._limit:
            return self._wait(FULL_SECONDS, f"{self._limit} are open, the most that this process takes")
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            return self._wait(FAILED_SECONDS, str(error))
        accepted.setblocking(False)
        task = self._loop.create_task(self._start(accepted))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._connect, accepted, **self._tls)
        except OSError:  # the client has reset it, or its handshake has failed
            accepted.close()

    def _wait(self, seconds: float, why: str) -> None:
        self._loop.remove_reader(self._listening)
        self._later = self._loop.call_later(seconds, self._begin)
        if (now := self._loop.time()) >= self._printed + 1:
            self._printed = now
            with suppress(OSError):  # nobody reads it
                print(f"octile: connections wait to be accepted: {why}", file=sys.stderr, flush=True)


def max_connections(n_files: int) -> int:
    """How many connections a process takes that may have so many open files."""
    return max(n_files - OTHER_FILES, n_files // 2)


def allow_files() -> int:
    """Let this process have as many open files as the system lets it, each connection being one; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
