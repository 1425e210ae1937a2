"""`octile train` on the ranks of a pipeline, 2 and 4 of gloo, compared with one process; see pipeline_cases.py."""

from collections.abc import Callable

import pytest

from tests.train.strategy import pipeline_cases
from tests.train.strategy.test_ranks import free_port
from tests.worlds import Failures, assert_passed, start_once, start_ranks

NAMES = {world: list(pipeline_cases.cases(world)) for world in (2, 4)}


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong in a world, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(pipeline_cases.run, (world, folder, str(store.folder), free_port()), world)

    return start_once(tmp_path_factory, "pipelined", start)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES.items() for name in names])
def test_trainers(failures, world: int, name: str):
    assert_passed(failures(world), name)
