"""The server: its address is bound before the model is loaded, and it drains before it ends."""

from __future__ import annotations

import asyncio
import errno
import math
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from octile.report.page import format_count
from octile.serve.http.app import create_app
from octile.serve.http.connection import Connection
from octile.serve.http.limits import WRITE_SECONDS
from octile.serve.http.service import Service

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 30
MAX_FILES = 65536


def bind(host: str, port: int) -> socket.socket:
    """Bind an address. Connections are refused until a server listens.

    Raises:
        ValueError: the host is unknown, or the address is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host {host!r} is not an address of this machine: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"host {host!r} is not an address of this machine: {error.strerror}") from None
        raise ValueError(f"port {port} of {host} cannot be used: {error.strerror}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a bound address."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """A server of one model. `run` returns when it has drained, and raises what made the engine fail.

    Args:
        service: the model.
        api_keys, hosts: as in `create_app`.
        announcement: a line to print as soon as connections are accepted.
    """

    def __init__(
        self,
        service: Service,
        api_keys: tuple[str, ...] = (),
        announcement: str | None = None,
        hosts: tuple[str, ...] | None = None,
    ):
        self.service, self._announcement = service, announcement
        self._loop: asyncio.AbstractEventLoop | None = None
        self._was_cut_off = False
        super().__init__(
            uvicorn.Config(
                create_app(service, api_keys, hosts),
                http=Connection,
                ws="none",
                lifespan="on",
                loop="asyncio",
                log_level="error",  # what clients do wrong is theirs to know
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(service.limits.drain + 2 * WRITE_SECONDS),
            )
        )
        service.engine.on_failure = self._end

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on bound sockets until `drain` is called or the engine fails."""
        allow_files()
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
        """Accept connections."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._announcement is not None:
            print(self._announcement, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests in flight, for as long as the limits say, and end."""
        service = self.service
        service.is_draining = True
        if service.in_flight:
            what = (
                f"{format_count(service.in_flight, 'choice')} in flight, for at most {service.limits.drain:g} seconds"
            )
            print(f"octile: answering {what}; a second signal ends them now", file=sys.stderr, flush=True)
        timer = asyncio.get_running_loop().call_later(service.limits.drain, self._cut_off)
        await super().shutdown(sockets)
        timer.cancel()

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


def allow_files() -> int:
    """Let this process have as many open files as the system lets it, each connection being one; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
