"""Tests of what rank 0 notices of the others, in processes that end in several ways."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from octile.parallel.lost_ranks import LostRanks, send_farewell
from tests.worlds import begin_ranks

GROUP_TIMEOUT = timedelta(seconds=1)


def wait(rank: int, folder: str, endings: str) -> None:
    """Let rank 0 write how many others were lost; the others end after the group's timeout, by their letters."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", GROUP_TIMEOUT, 1 + len(endings), rank)
    group = dist.group.WORLD
    if rank == 0:
        lost: list[Exception] = []
        LostRanks(group, lost.append).close()
        Path(folder, "lost").write_text(str(len(lost)))
    else:
        time.sleep(1.5 * GROUP_TIMEOUT.total_seconds())
        if endings[rank - 1] == "f":
            send_farewell(group)
    os._exit(0)  # no barrier, which another rank might miss


@pytest.mark.parametrize(
    ("endings", "n_lost"),
    [("ff", 0), ("fe", 1), ("ef", 1), ("ee", 2)],
    ids=["two farewells", "the last without", "the first without", "both without"],
)
def test_a_rank_that_ends_without_a_farewell_is_lost(endings, n_lost, tmp_path):
    for process in begin_ranks(wait, (str(tmp_path), endings), 3):
        process.join(60)
    assert (tmp_path / "lost").read_text() == str(n_lost)
