"""Every pipeline schedule on 2, 4 and 8 gloo ranks compared with one process; see pipeline_cases.py."""

from collections.abc import Callable

import pytest

from tests.parallel import pipeline_cases
from tests.parallel.pipeline_cases import SIZES, WORLD
from tests.worlds import Failures, assert_passed, start_once, start_ranks


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(pipeline_cases.run, (folder,), world)

    return start_once(tmp_path_factory, "pipeline", start)


@pytest.mark.parametrize("name", pipeline_cases.cases(dict.fromkeys(SIZES)))
def test_ranks(failures, name: str):
    assert_passed(failures(WORLD), name)
