"""The access log: a line on stderr for each response, in logfmt.

    time=2026-11-27T09:30:01.250Z client=127.0.0.1 method=POST path=/v1/completions status=200 seconds=0.412
    prompt_tokens=12 new_tokens=40 request_id=4f0c…

It is one line. The time is that of the request's head, and the seconds go on to the last byte that was written. After
the tokens stands error=504 if an error with this status has ended a stream whose head said 200, and error=499 if the
client has not taken the whole response.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLIENT_HAS_LEFT = 499  # as nginx logs it


class AccessLog:
    """Middleware that writes the lines.

    Args:
        app: the application, which may leave its `Answer` in the state of a request, for the numbers of tokens.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, as ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        came, begin, status, is_whole = datetime.now(UTC), time.perf_counter(), CLIENT_HAS_LEFT, False

        async def with_status(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, with_status)
        finally:
            line = _line(scope, came, status, is_whole, time.perf_counter() - begin)
            with suppress(OSError):  # nobody reads it
                print(line, file=sys.stderr, flush=True)


def _line(scope: Scope, came: datetime, status: int, is_whole: bool, seconds: float) -> str:
    client, answer = scope.get("client"), scope["state"].get("answer")
    fields = {
        "time": came.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "client": client[0] if client else "-",
        "method": scope["method"],
        "path": quote(scope["path"], safe="/:"),
        "status": str(status),
        "seconds": f"{seconds:.3f}",
    }
    if answer is not None:
        fields |= {"prompt_tokens": str(answer.n_prompt_tokens), "new_tokens": str(answer.n_new_tokens)}
    error = CLIENT_HAS_LEFT if not is_whole else answer.error_status if answer is not None else None
    if error not in (None, status):
        fields["error"] = str(error)
    fields["request_id"] = _quoted(answer.request_id if answer is not None else scope["state"]["request_id"])
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _quoted(value: str) -> str:
    """A value as logfmt has it: in quotes if it has some, or spaces, or what separates names from values."""
    return value if value.isprintable() and value and not set(value) & {" ", '"', "="} else json.dumps(value)
