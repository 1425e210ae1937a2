"""Every pipeline schedule on 2, 4 and 8 gloo ranks compared with one process; see pipeline_cases.py."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.parallel import pipeline_cases
from tests.parallel.pipeline_cases import SIZES, WORLD
from tests.worlds import Failures, assert_passed, start_once, start_ranks

NAMES = list(pipeline_cases.cases(dict.fromkeys(SIZES)))


def is_further(name: str) -> bool:
    """Whether other cases show the same: the schedule on 8 ranks, and the layers with it on 4."""
    return name.endswith(" of Quantized on 8") and not name.startswith("1f1b ")


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Failures]:
    """What went wrong in the further cases or in the others, by rank."""

    def start(further: bool, world: int, folder: str) -> None:
        names = [name for name in NAMES if is_further(name) == further]
        start_ranks(pipeline_cases.run, (folder, "cpu", names), world)

    worlds = [start_once(tmp_path_factory, f"pipeline-{further}", partial(start, further)) for further in (False, True)]
    return lambda further: worlds[further](WORLD)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if is_further(name) else []) for name in NAMES]
)
def test_ranks(failures, name: str):
    assert_passed(failures(is_further(name)), name)
