"""What uvicorn's HTTP/1.1 protocol lacks: a time limit for each state, abort, and responses without buffers.

    state of a connection                       it ends
    the head of a request is not complete       after HEAD_SECONDS, however many bytes come
    a request is answered                       when the application's time is over (`octile.serve.http.app`)
    between two requests                        after the server's time to keep it alive
    answered, the request is not complete       after WRITE_SECONDS; what still comes is discarded
    closing, the answer is not read             after WRITE_SECONDS

`send` returns at once as long as the system takes what is written; after that it waits until the system has taken all
of what was written before. A handler finds `connection` in its scope's state: `abort` ends it at once and discards what
the client has not read, `write` writes a part of a stream without a task that waits for it.

What a connection holds refers to it weakly, so that all of it is freed when it ends. Otherwise only garbage collections
would, during which a busy server would answer nobody for 0.1 s.

With TLS asyncio encrypts. It ends both sides of a connection together, so that a client that ends its side is gone, and
holds up to 64 KiB that the system has not taken.

Source: RFC 9112, sections 2.3 (versions), 6.3 (length of a body) and 9.6 (closing).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from weakref import proxy

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from octile.serve.http.config import HEAD_BYTES, HEAD_SECONDS, WRITE_SECONDS
from octile.serve.http.responses import ApiError

PROBE_SECONDS = 0.05, 1.0  # between two probes of a client that sends no more: at first, and at most
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
REFUSALS = {
    431: f"the head of the request has more than {HEAD_BYTES} bytes, which is the most that this server reads",
    501: "the transfer coding of the body is not supported: chunked is",
    505: "the version of HTTP is not supported: 1.1 is",
}


class Connection(H11Protocol):
    """A connection to a client.

    Attributes:
        is_closing: whether nothing more is answered.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn: _Parser = _Parser()
        self._inner, self.app = self.app, partial(Connection._answer, proxy(self))
        self._timer: asyncio.TimerHandle | None = None
        self.is_closing = False
        self._has_ended = False  # the client sends no more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # noqa: D102
        self._system, self._is_tls = transport, transport.get_extra_info("sslcontext") is not None
        super().connection_made(cast("asyncio.Transport", _Transport(transport, proxy(self))))
        # TLS holds what the system does not take, and waits at once if it may hold nothing
        transport.set_write_buffer_limits(1 if self._is_tls else 0, 0)
        self.app_state: dict[str, Any] = {**self.app_state, "connection": proxy(self)}
        self._time_head()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self.is_closing or self.conn.their_state is h11.MUST_CLOSE:  # nothing more is answered
            return
        super().data_received(data)
        self._time_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer the requests that are complete; a client that waits for no answer has closed its connection."""
        self._has_ended = True
        if self.is_closing:  # the client has read the answer
            self._system.close()
        elif self._is_answering() and not self._is_tls:  # which asyncio ends on both sides
            self._probe()
        else:
            self.close()
        return not self._is_tls

    def on_response_complete(self) -> None:
        """Go on with the next request, unless the client has sent its last one."""
        super().on_response_complete()
        if self.is_closing:
            return
        if self._has_ended:
            self.eof_received()
        elif self.conn.has_buffered():  # the begin of a head came with the request before
            self._time_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is refused, in OpenAI's format, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            status = self.conn.refused_with
            content = json.dumps(ApiError(status, REFUSALS.get(status, self.conn.why or msg)).body()).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self._system.write(head.encode() + content)
        self.close()

    def shutdown(self) -> None:
        """Close when the request that runs is answered."""
        if not self.is_closing:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self.is_closing = True
        self._stop_timer()
        self._unset_keepalive_if_required()  # its handle would hold this connection, which holds it
        super().connection_lost(exc)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and close the connection after an answer to a request that is not complete."""
        cycle = self.cycle

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and cycle.more_body:
                message = {**message, "headers": [*message.get("headers", ()), CLOSE_HEADER]}
            await send(message)

        await self._inner(scope, receive, send_closing)

    def abort(self) -> None:
        """End the connection, and have uvicorn know it now: the transport tells later, with TLS after two callbacks."""
        self._system.abort()
        self.cycle.disconnected = True

    def write(self, part: Callable[[], bytes]) -> bool:
        """Write the next part of a streamed response, unless the system has not taken what was written before.

        Args:
            part: returns the part.

        Returns:
            whether it was written; otherwise `part` was not called.
        """
        if self.flow.write_paused or self.cycle.disconnected:
            return False
        if body := part():  # an empty chunk is the last one
            # as h11 writes it, whose state it does not change (RFC 9112, section 7.1)
            is_chunked = self.scope["http_version"] != "1.0"
            self._system.write(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)
        return True

    def _is_answering(self) -> bool:
        """Whether a request is complete and its answer is not."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def close(self) -> None:
        """Close as soon as the client has read what is written, and sends no more; abort if that takes too long.

        The system would discard an answer that is not read when bytes arrive at a closed socket.
        """
        if self.is_closing:
            return
        self.is_closing = True
        self._stop_timer()
        self._timer = self.loop.call_later(WRITE_SECONDS, self._system.abort)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._has_ended or self.conn.their_state not in {h11.SEND_BODY, h11.ERROR}:
            self._system.close()
            return
        if self._system.can_write_eof():  # TLS cannot; the client closes after the answer, which says so
            with suppress(OSError):  # the client has closed the connection
                self._system.write_eof()
        self._system.resume_reading()

    def _probe(self, seconds: float = PROBE_SECONDS[0]) -> None:
        """Find out whether a client that sends no more still waits for its answer, until the answer begins.

        One that has closed its connection looks the same, until it resets the connection because bytes arrive, which
        the next write notices. Clients skip a response 100 that they have not asked for (RFC 9110, section 15.2.1).
        """
        self._stop_timer()
        if self._is_answering() and not self.cycle.response_started and self.scope["http_version"] != "1.0":
            self._system.write(CONTINUE)
            self._timer = self.loop.call_later(seconds, self._probe, min(2 * seconds, PROBE_SECONDS[1]))

    def _time_head(self) -> None:
        """Have the timer run while the head of a request is not complete."""
        if self.is_closing:
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._system.abort()


class _Transport:
    """A transport for uvicorn, which closes it in the way of the connection, of which this has a weak proxy."""

    def __init__(self, transport: asyncio.Transport, connection: Connection):
        self._transport, self._connection = transport, connection

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.is_closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Parser(h11.Connection):
    """Reads requests, and refuses some that h11 accepts.

    Those are heads of more than HEAD_BYTES that arrive at once, versions of HTTP other than 1, and bodies of two
    lengths, by which a proxy could take a part of a body for another request.

    Attributes:
        refused_with: the status of the refusal.
        why: what is wrong with the request.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self.refused_with, self.why = 400, ""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event; see `h11.Connection.next_event`."""
        before = self._n_buffered() if self.their_state is h11.IDLE else 0
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event, before - self._n_buffered())
        except h11.RemoteProtocolError as error:
            why, _, _ = str(error).partition(": bytearray(")  # h11 quotes the line, of up to 16 KiB
            self.refused_with, self.why = error.error_status_hint, f"the request is not valid HTTP: {why}"
            raise
        return event

    def has_buffered(self) -> bool:
        """Whether bytes of the next request have come."""
        return self._n_buffered() > 0

    def _n_buffered(self) -> int:
        return len(self.trailing_data[0])

    @staticmethod
    def _check(request: h11.Request, head_bytes: int) -> None:
        if head_bytes > HEAD_BYTES:
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        if request.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError("another version of HTTP", error_status_hint=505)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            raise h11.RemoteProtocolError("the body has two lengths")
