"""Wait for a GPU no longer than a timeout: it may wait for the GPU of another rank, which never comes."""

from __future__ import annotations

import math
import time

import torch

from octile.parallel.ranks import RanksTimeoutError

POLL = 0.0001  # seconds between two looks at an event


def wait_for(event: torch.cuda.Event, timeout: float = math.inf) -> None:
    """Wait until the GPU has come to an event.

    Args:
        event: that is recorded.
        timeout: seconds; infinity waits without looking, as the event was made to wait.

    Raises:
        RanksTimeoutError: the GPU did not come to it in time.
    """
    begin = time.monotonic()
    while timeout < math.inf and not event.query():
        if time.monotonic() - begin > timeout:
            raise RanksTimeoutError(f"timed out after {timeout:g} s for the GPU to finish a step")
        time.sleep(POLL)
    event.synchronize()
