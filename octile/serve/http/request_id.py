"""The id of a request: that of its header `X-Request-Id`, or a new one. Each response has it in the same header.

The ids of answers contain it, so that what a client, a proxy and this server write of a request can be found together.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
ID = re.compile(r"[!-~]{1,128}")  # visible characters of ASCII


class AddRequestId:
    """Middleware that gives each request an id, in `request.state.request_id`. A header that is no id is ignored.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, as ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if ID.fullmatch(given) else uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        await self._app(scope, receive, with_id)
