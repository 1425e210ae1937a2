"""What a server takes at most, and reading a body within it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from starlette.requests import ClientDisconnect, Request

from octile.serve.http.errors import ApiError
from octile.validation import Range, check_fields

BODY_SECONDS = 30.0  # to send a body
HEAD_SECONDS = 10.0  # to send the head of a request
WRITE_SECONDS = 5.0  # to read what was written when a request's time is over


@dataclass(frozen=True)
class Limits:
    """What a server takes at most.

    Attributes:
        in_flight: choices (a request has n of them for each prompt) that wait or run; a request beyond is refused with
            503.
        body: bytes of a request's body.
        new_tokens: tokens that a choice may ask for; the model's context if not given.
        seconds: time for a request, from its head to the last byte of its response.
        drain: seconds after SIGTERM or Ctrl-C in which requests in flight are still answered.
    """

    in_flight: Annotated[int, Range(at_least=1, at_most=100_000)] = 256
    body: Annotated[int, Range(at_least=1024, at_most=2**30)] = 4 * 2**20
    new_tokens: Annotated[int, Range(at_least=1)] | None = None
    seconds: Annotated[float, Range(above=0, at_most=86_400)] = 600.0
    drain: Annotated[float, Range(at_least=0, at_most=86_400)] = 30.0

    def __post_init__(self) -> None:
        check_fields(self, "limits.")


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: 415, it is announced as something else than JSON; 413, it has more bytes than the limit; 408, it does
            not arrive in time.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a browser then asks before it sends another site's request
        raise ApiError(415, f"content-type must be application/json, not {kind or 'missing'}")
    announced = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body has more than {limit} bytes, which is the most that this server reads")
    if int(announced) > limit:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                content += piece
                if len(content) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has closed the connection") from None
    return bytes(content)
