"""Every pipeline schedule on 2, 4 and 8 gloo ranks compared with one process; see pipeline_cases.py."""

import multiprocessing
from collections.abc import Callable

import pytest
import torch.multiprocessing as mp

from tests.parallel import pipeline_cases
from tests.parallel.pipeline_cases import SIZES, WORLD
from tests.worlds import Failures, assert_passed, start_once


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong, by rank."""

    def start(world: int, folder: str) -> None:
        multiprocessing.set_forkserver_preload([pipeline_cases.__name__])
        mp.start_processes(pipeline_cases.run, (folder,), world, start_method="forkserver")

    return start_once(tmp_path_factory, "pipeline", start)


@pytest.mark.parametrize("name", pipeline_cases.cases(dict.fromkeys(SIZES)))
def test_ranks(failures, name: str):
    assert_passed(failures(WORLD), name)
