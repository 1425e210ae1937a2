"""The server, which drains before it ends."""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from octile.report.page import format_count
from octile.serve.http.address import BACKLOG
from octile.serve.http.app import create_app
from octile.serve.http.connection import Connection
from octile.serve.http.limits import WRITE_SECONDS
from octile.serve.http.service import Service

KEEP_ALIVE_SECONDS = 30
MAX_FILES = 65536


class Server(uvicorn.Server):
    """A server of one model. `run` returns when it has drained, and raises what made the engine fail.

    Args:
        service: the model.
        api_keys, hosts: as in `create_app`.
    """

    def __init__(
        self,
        service: Service,
        api_keys: tuple[str, ...] = (),
        hosts: tuple[str, ...] | None = None,
    ):
        self.service = service
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
