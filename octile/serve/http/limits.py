"""Limits of connections and steps, and reading a body within its limits."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from octile.serve.http.errors import ApiError

FIRST_STEP_SECONDS = 600.0  # of an engine, in which it may compile kernels
HUNG_SECONDS = 300.0  # of a later step; one of a long prompt has taken 169 s, on a busy CPU
BODY_SECONDS = 30.0  # to send a body
HEAD_SECONDS = 10.0  # to send the head of a request
HEAD_BYTES = 16 * 1024  # of a request
WRITE_SECONDS = 5.0  # to read what was written when a request's time is over, or its connection closes


async def read_body(request: Request, limit: int, deadline: float) -> bytes:
    """Read the body of a request.

    Args:
        request: the request.
        limit: bytes of the body.
        deadline: when the request's time is over, in the event loop's time.

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
    seconds = min(BODY_SECONDS, deadline - asyncio.get_running_loop().time())
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                content += piece
                if len(content) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:.3g} seconds") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has closed the connection") from None
    return bytes(content)
