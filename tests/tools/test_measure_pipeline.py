"""The phases of tools/measure_pipeline.py, which runs on two GPUs."""

from dataclasses import replace

import pytest

from octile.train.config import preset
from tools.measure_pipeline import MICRO_BATCHES, config_of

SMALL = preset("small")
CONFIG = replace(SMALL, batch_size=MICRO_BATCHES * SMALL.micro_batch_size, micro_batches=MICRO_BATCHES)


@pytest.mark.parametrize("phase", ["1fb1", "torch-dualpipev", "slow-1f1b", "eager-both"])
def test_an_unknown_phase_is_refused(phase: str):
    with pytest.raises(ValueError, match=r"^(a phase|parallel\.schedule) must be "):
        config_of(phase, CONFIG, 2)


def test_one_rank_has_no_pipeline():
    with pytest.raises(ValueError, match="phase 1f1b needs --nproc-per-node 2"):
        config_of("1f1b", CONFIG, 1)
    assert config_of("both", CONFIG, 1) == CONFIG


@pytest.mark.parametrize("phase", ["1f1b", "zb1p", "dualpipev", "eager-dualpipe", "torch-gpipe"])
def test_a_phase_has_the_schedule_that_it_names(phase: str):
    assert config_of(phase, CONFIG, 2).parallel.schedule == phase.split("-")[-1]
