"""One of two ranks of `octile train`, for test_bad_ranks.py: what torchrun starts, in a process that is forked."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from octile.cli import main
from octile.train.compute import StepComputation
from octile.train.data.token_store import TokenStore
from octile.train.run import rank_checks
from octile.train.trainer import Trainer
from tests.train.conftest import estimate_memory_once, write_no_report
from tests.train.run.own_process import write_output_to


def have_other_code() -> None:
    """Let this rank have other source files."""
    rank_checks.source_digest = lambda: "other"


def have_other_data() -> None:
    """Let this rank find other tokens in the run's folder, as on a host whose disk has another run of that name."""
    open_store = TokenStore.open
    TokenStore.open = lambda folder: open_store(os.environ["OTHER_DATA"])


def have_other_recipe() -> None:
    """Let this rank find other contents in the recipe's file."""
    read_text = Path.read_text
    Path.read_text = lambda file, *rest, **named: read_text(file, *rest, **named) + "# here" * (file.suffix == ".toml")


def fail_at(step: int, fail: Callable[[], None]) -> None:
    """Let this rank fail in the first backward pass of a step."""
    compute, backward = StepComputation.compute, torch.autograd.backward

    def failing(*args, **kwargs):
        torch.autograd.backward = backward
        fail()
        backward(*args, **kwargs)

    def compute_and_fail(self, tokens_BS):
        if self._progress.steps_done + 1 == step:
            torch.autograd.backward = failing
        return compute(self, tokens_BS)

    StepComputation.compute = compute_and_fail


def fail_before(step: int, fail: Callable[[], None]) -> None:
    """Let this rank fail before it launches a step."""
    launch = Trainer.launch

    def fail_and_launch(self):
        if self.steps_done + 1 == step:
            fail()
        launch(self)

    Trainer.launch = fail_and_launch


def raise_an_error() -> None:
    raise ValueError("a fault that only this rank has")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


AHEAD = "LAUNCHED_AHEAD"  # in the environment: steps are launched before earlier ones are collected, as on GPUs
FAULTS = {  # the rank that has it, and what it does first; without a name there is none
    "": (0, lambda: None),
    "other code": (1, have_other_code),
    "other data": (1, have_other_data),
    "other recipe": (1, have_other_recipe),
    "no resume": (1, lambda: sys.argv.remove("--resume")),
    "other seed": (1, lambda: sys.argv.append("--seed=1")),
    "error": (1, partial(fail_at, 2, raise_an_error)),
    "killed": (0, partial(fail_at, 3, die)),
    "killed at step 7": (0, partial(fail_at, 7, die)),
    "hang": (1, partial(fail_at, 3, hang)),
    "hang before a step": (1, partial(fail_before, 3, hang)),
}


def run(
    rank: int, port: int, folder: str, fault: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Run the command as a rank, with its output in files of the folder."""
    torch.set_num_threads(1)
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    write_output_to(Path(folder), str(rank))
    sys.argv = ["octile", "train", *arguments]
    patch = pytest.MonkeyPatch()
    write_no_report(patch)
    estimate_memory_once(patch)
    if AHEAD in environment:
        patch.setattr("octile.train.strategy.single.why_eager", lambda *_: None)
    if fault in ("error", "killed"):  # that rank 0 does not report
        patch.setattr("octile.parallel.ranks.PATIENCE", timedelta(seconds=0.3))
    faulty_rank, begin = FAULTS[fault]
    if rank == faulty_rank:
        begin()
    main(sys.argv[1:])
