"""The phases of tools/measure_pipeline.py, which runs on two GPUs; their losses on two ranks on the CPU."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from octile.parallel.ranks import Ranks, join, leave
from octile.train.config import preset
from tests.train.conftest import MICRO, micro
from tests.train.strategy.test_ranks import free_port
from tests.worlds import Failures, assert_passed, run_cases, start_once, start_ranks
from tools import measure_pipeline
from tools.measure_pipeline import MICRO_BATCHES, config_of, measure

SMALL = preset("small")
CONFIG = replace(SMALL, batch_size=MICRO_BATCHES * SMALL.micro_batch_size, micro_batches=MICRO_BATCHES)


@pytest.mark.parametrize("phase", ["1fb1", "torch-zb1p", "slow-1f1b", "eager-both"])
def test_an_unknown_phase_is_refused(phase: str):
    with pytest.raises(ValueError, match=r"^(a phase|parallel\.schedule) must be "):
        config_of(phase, CONFIG, 2)


def test_one_rank_has_no_pipeline():
    with pytest.raises(ValueError, match="phase 1f1b needs --nproc-per-node 2"):
        config_of("1f1b", CONFIG, 1)
    assert config_of("both", CONFIG, 1) == CONFIG


@pytest.mark.parametrize("phase", ["1f1b", "zb1p", "dualpipev", "eager-dualpipe", "torch-gpipe", "torch-dualpipev"])
def test_a_phase_has_the_schedule_that_it_names(phase: str):
    assert config_of(phase, CONFIG, 2).parallel.schedule == phase.split("-")[-1]


def check_losses(ranks: Ranks, schedule: str) -> None:
    """In torch's executor the losses of three steps have the bits of octile's."""
    model = replace(MICRO, num_hidden_layers=4, num_nextn_predict_layers=1)
    base = micro(model=model, batch_size=8, micro_batches=8, steps=40)
    octile, torch_ = (
        measure(phase, config_of(phase, base, 2), ranks, torch.device("cpu")).losses
        for phase in (schedule, f"torch-{schedule}")
    )
    assert torch_ == octile
    assert octile[-1] != octile[0]


def run(rank: int, folder: str, port: int) -> None:
    """Compare the losses of torch's executor with octile's, as one of two ranks."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    measure_pipeline.WARM_UP = measure_pipeline.STEPS = 1
    ranks = join(torch.device("cpu"), 60)
    run_cases({name: partial(check_losses, ranks, name) for name in ("1f1b", "dualpipev")}, folder, rank)
    leave()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong in each schedule, by rank."""
    return start_once(
        tmp_path_factory, "by_torch", lambda world, folder: start_ranks(run, (folder, free_port()), world)
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_torchs_executor_has_the_losses_of_octiles(failures, schedule: str):
    assert_passed(failures(2), schedule)
