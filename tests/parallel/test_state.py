"""ZeRO-1 on 2 and 4 gloo ranks compared with one process, bit for bit; see state_cases.py."""

from collections.abc import Callable

import pytest

from tests.parallel import state_cases
from tests.worlds import Failures, assert_passed, start_once, start_ranks

NAMES = {world: list(state_cases.cases(world)) for world in (2, 4)}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong in a world, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(state_cases.run, (world, folder), world)

    return start_once(tmp_path_factory, "state", start)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES.items() for name in names])
def test_ranks(failures, world: int, name: str):
    assert_passed(failures(world), name)
