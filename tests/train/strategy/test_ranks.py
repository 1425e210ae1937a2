"""`octile train` on 2 and 4 gloo ranks: equal to one process, refused, killed, hanging; see rank_cases.py."""

import socket
from collections.abc import Callable

import pytest

from tests.train.strategy import rank_cases
from tests.worlds import Failures, assert_passed, start_once, start_ranks

NAMES = {world: list(rank_cases.cases(world)) for world in (2, 4)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong in a world, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(rank_cases.run, (world, folder, str(store.folder), free_port()), world)

    return start_once(tmp_path_factory, "trainers", start)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES.items() for name in names])
def test_trainers(failures, world: int, name: str):
    assert_passed(failures(world), name)
