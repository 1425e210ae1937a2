"""Errors in OpenAI's format, and responses that are written as fast as their client reads, and end when it is gone.

A part is written when the system has taken the one before it (`octile.serve.http.connection`), and a response has ended
when the system has taken all of it.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
PIECE_BYTES = 2**16
LEVELS = 4  # of an answer: the body, its choices, a choice, its log-probabilities; then come long lists
MEMBERS = 256  # of a long list, written at once
NEVER_RETRY = {"x-should-retry": "false"}  # to OpenAI's clients, which retry every status from 500 on


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: the HTTP status.
        message: what came and what is needed.
        param: the field of the body that is wrong.
        code: the word by which a program knows the error.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that represents the error, in a response or in an event of a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response with the error's status."""
        return JSONResponse(self.body(), self.status, self.headers)


def event(value: object) -> str:
    """An event with a JSON value."""
    return f"data: {_json_text(value)}\n\n"


async def json_bytes(value: object) -> bytes:
    """Write a JSON value, and let the event loop go on meanwhile: an answer may have a hundred megabytes."""
    content, written = bytearray(), 0
    for piece in json_pieces(value):
        content += piece.encode()
        if len(content) > written + PIECE_BYTES:
            written = len(content)
            await asyncio.sleep(0)
    return bytes(content)


def json_pieces(value: object, levels: int = LEVELS) -> Iterator[str]:
    """Yield a JSON value in pieces: the members of its first levels one by one, those of a list below in slices."""
    if isinstance(value, dict) and levels:
        for i, (key, member) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_json_text(key)}:"
            yield from json_pieces(member, levels - 1)
        yield "}" if value else "{}"
    elif isinstance(value, list) and levels:
        for i, member in enumerate(value):
            yield "," if i else "["
            yield from json_pieces(member, levels - 1)
        yield "]" if value else "[]"
    elif isinstance(value, list):
        for i in range(0, len(value), MEMBERS):
            yield f"{',' if i else '['}{_json_text(value[i : i + MEMBERS])[1:-1]}"
        yield "]" if value else "[]"
    else:
        yield _json_text(value)


def _json_text(value: object) -> str:
    """Write a JSON value; ValueError if it has NaN or an infinity, which are no JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """Do work, and cancel it when the client closes the connection. The request's body must have been read.

    Raises:
        ApiError: 499, the client has closed the connection; nobody reads the response.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "the client has closed the connection")
    finally:
        for task in (working, gone):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working  # it cancels its choices


async def _until_disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PacedResponse(Response):
    """A response that is written as fast as its client reads.

    Args:
        parts: parts of the body, as they come.
        held: closed when all of it is written, or when the client is gone or its time is over.
        headers: headers of the response.
    """

    def __init__(self, parts: AsyncIterator[bytes], held: AsyncExitStack, headers: dict[str, str]):
        super().__init__(headers=headers)
        if "content-length" not in headers:
            del self.headers["content-length"]
        self._parts, self._held = parts, held

    @classmethod
    def of_events(cls, events: AsyncIterator[str], held: AsyncExitStack) -> PacedResponse:
        """Make a response of server-sent events, already written."""
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
        return cls((text.encode() async for text in events), held, headers)

    @classmethod
    def of_json(cls, content: bytes, held: AsyncExitStack) -> PacedResponse:
        """Make a response of one JSON value, already written."""
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        return cls(_pieces(content), held, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as ASGI has it."""
        async with self._held:
            with suppress(ApiError):  # the client is gone
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for i in range(0, len(content), PIECE_BYTES):
        yield content[i : i + PIECE_BYTES]
