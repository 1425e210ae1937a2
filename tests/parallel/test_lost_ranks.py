"""Tests of what rank 0 notices of the others, in processes that end in several ways."""

import os
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed as dist

from octile.parallel.lost_ranks import LostRanks, send_farewell
from tests.worlds import begin_ranks

GROUP_TIMEOUT = timedelta(seconds=1)


def wait(rank: int, folder: str, endings: str) -> None:
    """Let rank 0 write what it notices; the others end after the group's timeout, by their letters, or hang."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", timedelta(seconds=60), 1 + len(endings), rank)
    dist.barrier()
    group, noticed = dist.new_group(timeout=GROUP_TIMEOUT), Path(folder, "noticed")
    if rank == 0:
        lost: list[Exception] = []
        ranks = LostRanks(group, lost.append)
        try:
            ranks.close(timedelta(seconds=2.5 if "h" in endings else 60))
            noticed.write_text(f"{len(lost)} lost")
        except TimeoutError as error:
            noticed.write_text(str(error))
    else:
        time.sleep(1.5 * GROUP_TIMEOUT.total_seconds())
        if endings[rank - 1] == "f":
            send_farewell(group)
        while endings[rank - 1] == "h" and not noticed.exists():
            time.sleep(0.1)
    os._exit(0)  # no barrier, which another rank might miss


EXPECTED = {
    "ff": "0 lost",
    "fe": "1 lost",
    "ef": "1 lost",
    "ee": "2 lost",
    "fh": "timed out: a rank has sent no farewell",
}


@pytest.fixture(scope="module")
def noticed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What rank 0 wrote, by the endings of the others: all groups wait at the same time."""
    folders = {endings: tmp_path_factory.mktemp(endings) for endings in EXPECTED}
    groups = [begin_ranks(wait, (str(folder), endings), 3) for endings, folder in folders.items()]
    for process in chain(*groups):
        process.join(60)
    return {endings: (folder / "noticed").read_text() for endings, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "endings",
    EXPECTED,
    ids=["two farewells", "the last without", "the first without", "both without", "the last hangs"],
)
def test_rank_0_notices_how_the_others_end(noticed: dict[str, str], endings: str):
    assert noticed[endings] == EXPECTED[endings]
