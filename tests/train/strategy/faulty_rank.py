"""`octile train` whose rank 1 is killed at a step, but not after a restart: python faulty_rank.py STEP ARGUMENTS…

For test_torchrun.py.
"""

import os
import sys
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from octile.cli import main
from tests.train.conftest import estimate_memory_once, write_short_report
from tests.train.strategy.bad_rank import die, fail_at, fail_before
from tests.worlds import forked_context


def run(step: int, arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    write_short_report(patch)
    estimate_memory_once(patch)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        (fail_before if "--device=cuda" in arguments else fail_at)(step, die)  # a captured step computes nothing anew
    main(["train", *arguments])


def start_and_restart(_: int, folder: str, step: int, arguments: Sequence[str]) -> None:
    """Be torchrun for two ranks that are forked, and restart them once; a folder has their output."""
    logs = DefaultLogsSpecs(folder, redirects=Std.ALL)
    own = LaunchConfig(
        1, 1, 2, logs, "faulty", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1,
        start_method=forked_context().get_start_method(),
    )  # fmt: skip
    elastic_launch(own, run)(step, arguments)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
