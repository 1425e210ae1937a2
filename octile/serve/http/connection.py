"""What uvicorn's HTTP/1.1 protocol lacks: a time limit for the head of a request, abort, and responses without buffers.

`send` returns at once as long as the system takes what is written; after that it waits until the system has taken all
of what was written before. A handler finds `abort` in its scope's state. It ends the connection at once and discards
what the client has not read.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from octile.serve.http.errors import ApiError
from octile.serve.http.limits import HEAD_SECONDS


class Connection(H11Protocol):
    """A connection to a client."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # noqa: D102
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)
        self.app_state: dict[str, Any] = {**self.app_state, "abort": transport.abort}
        self._time_head()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        super().data_received(data)
        self._time_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in OpenAI's format."""
        content = json.dumps(ApiError(400, msg).body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(content))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._stop_timer()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        """Have the timer run while the head of a request is not complete."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()
