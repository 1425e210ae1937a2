"""What a process sends to the process of an engine, what that sends back, and the error when one of them has ended.

Requests that are to be added are a list of `Request`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octile.serve.engine.request import Output
from octile.serve.engine.stats import Stats

# to the engine


class Cancel(NamedTuple):
    """End a request; it may have ended."""

    request_id: int


# from the engine


class Stepped(NamedTuple):
    """What a step has added to requests, and `ChangedStats` after it."""

    outputs: Sequence[Output]
    stats: Stats


class Failed(NamedTuple):
    """The engine ends because of an exception."""

    error: Exception


class Drain(NamedTuple):
    """Answer the requests in flight, and end; asked again, end now."""


class ProcessEndedError(RuntimeError):
    """A process has ended, or was killed because it hangs, with its requests."""

    exit_code = 1
