"""A response of server-sent events that ends when its client is gone or does not read.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octile.serve.http.errors import ApiError
from octile.serve.http.limits import WRITE_SECONDS

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


def event(value: object) -> str:
    """An event with a JSON value."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


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


class EventStream(Response):
    """A response that sends events as they come.

    Args:
        events: the events, already written; closed at the end, however that comes.
        deadline: time of the event loop at which the last event comes. A client that has not read what was sent
            `WRITE_SECONDS` later loses the connection.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], deadline: float):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._deadline = events, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, as ASGI has it."""
        try:
            async with asyncio.timeout_at(self._deadline + WRITE_SECONDS):
                await while_connected(receive, self._send(send))
        except TimeoutError:
            scope["state"]["abort"]()
            await asyncio.sleep(0)  # for the connection to know that it is lost
        except ApiError:  # the client is gone
            pass
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
