"""`octile train` on 2 and 4 gloo ranks: equal to one process, refused, killed, hanging; see rank_cases.py."""

import socket
from collections.abc import Callable
from functools import partial

import pytest

from tests.train.strategy import rank_cases
from tests.worlds import Failures, assert_passed, start_once, start_ranks

FURTHER = {  # with what shows the same
    "equal_run-4-2": "equal_run-2-2, and moved-4-2, whose steps and state are those of one process, too",
    "moved-2-2": "moved-4-2, whose experts are spread and copied, and test_moved_runs, whose are only spread",
    "collected-float32": "collected-deepseek_v3, which has experts of its own and shards of the other weights",
    "captured_late": "late_weights-deepseek_v3",  # nothing is captured on a CPU
    "late_weights-2": "late_weights-1 and late_weights-deepseek_v3, of spread experts",
    "becoming_eager-2": "becoming_eager-1, which gathers the weights of all experts, too",
    "deepseek_v3-2": "delayed-2 and late_weights-deepseek_v3, of spread experts",
}
QUICK = {  # which always run, on two ranks: all cases there take half a minute, those on four ranks longer
    "equal_run-2-1", "equal_run-2-2", "deepseek_v3-1", "late_weights-deepseek_v3", "skips", "ramp", "agreement",
    "refused_exchange", "checkpoint_timeout",
}  # fmt: skip
NAMES = {world: list(rank_cases.cases(world)) for world in (2, 4)}
assert not QUICK - set(NAMES[2]), "a case has another name now"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def mark_of(world: int, name: str) -> str:
    if name in FURTHER:
        return "exhaustive"
    return "" if world == 2 and name in QUICK else "slow"


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Failures]:
    """What went wrong in the cases of a world with a mark, by rank."""

    def start(mark: str, world: int, folder: str) -> None:
        names = [name for name in NAMES[world] if mark_of(world, name) == mark]
        start_ranks(rank_cases.run, (world, folder, str(store.folder), free_port(), "cpu", False, names), world)

    marks = "", "slow", "exhaustive"
    worlds = {mark: start_once(tmp_path_factory, f"trainers-{mark}", partial(start, mark)) for mark in marks}
    return lambda world, mark: worlds[mark](world)


def marks(world: int, name: str) -> list[pytest.MarkDecorator]:
    return [getattr(pytest.mark, mark)] if (mark := mark_of(world, name)) else []


@pytest.mark.parametrize(
    ("world", "name"),
    [pytest.param(world, name, marks=marks(world, name)) for world, names in NAMES.items() for name in names],
)
def test_trainers(failures, world: int, name: str):
    assert_passed(failures(world, mark_of(world, name)), name)
