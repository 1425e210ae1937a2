"""What a server takes at most, for how long, which keys and origins it can have, and how it parses chats.

This module imports no package of the extra `serve`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from octile.serve.http.tls import TlsFiles
from octile.validation import Range, check_fields

FIRST_STEP_SECONDS = 600.0  # of an engine, in which it may compile kernels
HUNG_SECONDS = 300.0  # of a later step; one of a long prompt has taken 169 s, on a busy CPU
BODY_SECONDS = 30.0  # to send a body
HEAD_SECONDS = 10.0  # to send the head of a request
HEAD_BYTES = 16 * 1024  # of a request
WRITE_SECONDS = 5.0  # to read what was written when a request's time is over, or its connection closes


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


ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]*)?")
DEFAULT_PORTS = {"http": "80", "https": "443"}  # which browsers leave out


def check_origin(name: str, origin: str) -> None:
    """Refuse an origin that no browser would send.

    Raises:
        ValueError: it is one.
    """
    if origin == "*":
        return
    if not ORIGIN.fullmatch(origin):
        why = "SCHEME://HOST or SCHEME://HOST:PORT in lower case, without a path"
        raise ValueError(f"{name} must be * or an origin as browsers send it, {why}, not {origin!r}")
    port = DEFAULT_PORTS.get(origin.partition(":")[0])
    if port and origin.endswith(f":{port}"):
        raise ValueError(f"{name} must leave out the default port :{port}, as browsers do, not {origin!r}")


ReasoningFormat = Literal["deepseek_r1"]
ToolCallFormat = Literal["deepseek_v3", "deepseek_v31", "kimi_k2"]


class Parsers(NamedTuple):
    """How what the model writes in a chat is divided into the parts of a message, by vLLM's names.

    Attributes:
        reasoning: how its thought is written; None: it stays in the text.
        tool_calls: how its calls of functions are written; None: requests with tools are refused.
    """

    reasoning: ReasoningFormat | None = None
    tool_calls: ToolCallFormat | None = None


def check_key(name: str, key: str) -> None:
    """Refuse a key that no client could send in a header, such as one with a newline from a file. It is not shown.

    Raises:
        ValueError: it is one.
    """
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(f"{name} must be printable ASCII without blanks at its ends, to be sent in a header")


class HttpConfig(NamedTuple):
    """How a model is served over HTTP.

    Attributes:
        model_name: the name by which clients ask for the model.
        limits: what the server takes at most.
        api_keys: one of them is needed; none is if there are none.
        weights_key: is needed to update the weights; None: they cannot be updated.
        parsers: how what the model writes in chats is parsed.
        tls: files for HTTPS; None: HTTP is served.
        origins: origins whose scripts browsers let read answers.
        has_access_log: whether each response is a line on stderr.
    """

    model_name: str
    limits: Limits
    api_keys: tuple[str, ...] = ()
    weights_key: str | None = None
    parsers: Parsers = Parsers()
    tls: TlsFiles | None = None
    origins: tuple[str, ...] = ()
    has_access_log: bool = False
