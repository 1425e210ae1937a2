"""What a process sends to the process of an engine, what that sends back, and the error when one of them has ended.

Requests that are to be added are a list of `Request`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octile.serve.engine.config import InFlight
from octile.serve.engine.request import Output
from octile.serve.engine.stats import Stats
from octile.serve.weights.source import WeightsSource

# to the engine


class Cancel(NamedTuple):
    """End a request; it may have ended."""

    request_id: int


class UpdateWeights(NamedTuple):
    """Replace the weights; one update at a time. It is answered by `WeightsUpdated` or `WeightsRefused`."""

    source: WeightsSource
    in_flight: InFlight


class CancelUpdate(NamedTuple):
    """Have an update that writes nothing yet end with `WeightsRefused`; it may have ended."""


# from the engine


class Stepped(NamedTuple):
    """What a step has added to requests, and `ChangedStats` after it."""

    outputs: Sequence[Output]
    stats: Stats


class WeightsUpdated(NamedTuple):
    """The weights were replaced.

    Attributes:
        version: version of the new weights; answers that they compute have it.
        seconds: time from the request to the last byte that was written.
        write_seconds: the part of it in which no step ran, for the weights were written.
        nbytes: bytes of all new tensors.
    """

    version: int
    seconds: float
    write_seconds: float
    nbytes: int


class WeightsRefused(NamedTuple):
    """The weights are the old ones, and why."""

    why: str


class Failed(NamedTuple):
    """The engine ends because of an exception."""

    error: Exception


class Drain(NamedTuple):
    """Answer the requests in flight, and end; asked again, end now."""


class ProcessEndedError(RuntimeError):
    """A process has ended, or was killed because it hangs, with its requests."""

    exit_code = 1
