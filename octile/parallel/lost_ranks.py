"""Rank 0 learns that another rank has ended, also while a collective of its own waits for that rank.

    rank 0         lost = LostRanks(group, on_lost); in the end lost.close(timeout)
    other ranks    send_farewell(group) in the end

A send of gloo to a rank that has just ended can wait for the timeout of its group, minutes. When a connection breaks,
gloo wakes what waits to receive, and what waits for the other side to receive, but not what it has begun to transmit
(`Pair::signalException` in its transport/tcp/pair.cc). So rank 0 waits to receive a byte from each other rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from octile.parallel.ranks import FOREVER, RanksTimeoutError

TAG = 1  # of the bytes; other messages between two ranks have 0
GRACE = 1.0  # seconds for a collective that waits for the same rank to raise: it says whether it has timed out


class LostRanks:
    """Waits for the end of each other rank of a group, on rank 0.

    Args:
        group: group of all ranks, by gloo.
        on_lost: is called by a thread, with gloo's exception, when a rank has ended without a farewell, or when it or
            this one has closed their connection, since a collective has timed out.
    """

    def __init__(self, group: dist.ProcessGroup, on_lost: Callable[[Exception], object]):
        self._group, self._on_lost = group, on_lost
        ranks = range(1, dist.get_world_size(group))
        self._threads = [threading.Thread(target=self._wait, args=[rank], daemon=True) for rank in ranks]
        for thread in self._threads:
            thread.start()

    def close(self, timeout: timedelta) -> None:
        """Wait for the others' farewell, or their end.

        Raises:
            RanksTimeoutError: a rank has neither sent a farewell nor ended in this time.
        """
        latest = time.monotonic() + timeout.total_seconds()
        for thread in self._threads:
            thread.join(max(0.0, latest - time.monotonic()))
            if thread.is_alive():
                raise RanksTimeoutError("timed out: a rank has sent no farewell")

    def _wait(self, rank: int) -> None:
        byte = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            received = dist.irecv(byte, group=self._group, group_src=rank, tag=TAG)
            assert received is not None  # this rank is of the group
            received.wait(FOREVER)  # longer than the timeout of the group
        except RuntimeError as error:
            time.sleep(GRACE)
            self._on_lost(error)


def send_farewell(group: dist.ProcessGroup) -> None:
    """Have rank 0 expect the end of this rank.

    Args:
        group: as in `LostRanks`.

    Raises:
        RuntimeError: rank 0 has ended.
    """
    dist.send(torch.zeros(1, dtype=torch.uint8, device="cpu"), group=group, group_dst=0, tag=TAG)
