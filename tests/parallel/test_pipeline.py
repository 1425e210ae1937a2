"""Every pipeline schedule on 2, 4 and 8 gloo ranks compared with one process; see pipeline_cases.py."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.parallel import pipeline_cases
from tests.parallel.pipeline_cases import SIZES
from tests.worlds import Failures, assert_passed, start_once, start_ranks

NAMES = list(pipeline_cases.cases(dict.fromkeys(SIZES)))
WORLDS = {"": 5, "slow": 8, "exhaustive": 8}  # ranks that run the cases with a mark; of 5, groups are the last 4 and 2


def mark_of(name: str) -> str:
    """The mark of a case: 4 ranks run each schedule, too, and 8 run the layers with one schedule."""
    if not name.endswith(" on 8"):
        return ""
    return "exhaustive" if " of Quantized " in name and not name.startswith("1f1b ") else "slow"


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Failures]:
    """What went wrong in the cases with a mark, by rank."""

    def start(mark: str, world: int, folder: str) -> None:
        names = [name for name in NAMES if mark_of(name) == mark]
        start_ranks(pipeline_cases.run, (folder, "cpu", names, world), world)

    worlds = {mark: start_once(tmp_path_factory, f"pipeline-{mark}", partial(start, mark)) for mark in WORLDS}
    return lambda mark: worlds[mark](WORLDS[mark])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(pytest.mark, mark_of(name)) if mark_of(name) else ()) for name in NAMES]
)
def test_ranks(failures, name: str):
    assert_passed(failures(mark_of(name)), name)
